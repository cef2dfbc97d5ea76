"""Errors that a user can act on.

    DistillError
    ├── ConfigError(ValueError)       a wrong key, value or combination      exit code 2
    ├── DataError(ValueError)         tasks, files or logs that cannot be used         2
    ├── AlignmentError(ValueError)    token ids or positions of two sides differ       1
    ├── EngineError(RuntimeError)     a rollout engine failed                          1
    ├── TeacherError(RuntimeError)    a teacher failed or returned unusable scores     1
    ├── SkillBankError(RuntimeError)  a skill bank is damaged or locked                1
    ├── EvalError(RuntimeError)       an evaluation could not be scored                1
    ├── CheckpointError(RuntimeError) a checkpoint is missing, damaged or foreign      2
    ├── CollapseError(RuntimeError)   the monitor ended a stage that collapsed         1
    ├── PreflightError(RuntimeError)  the machine or the model is not ready           20
    └── MissingExtra(ImportError)     an optional package is not installed             2

A message says what was expected, what was found, where, and what to try next.
"""

from __future__ import annotations

from typing import ClassVar


class DistillError(Exception):
    """Base of every error that carries a message for the user."""

    exit_code: ClassVar[int] = 1


class ConfigError(DistillError, ValueError):
    exit_code = 2


class DataError(DistillError, ValueError):
    exit_code = 2


class AlignmentError(DistillError, ValueError):
    pass


class EngineError(DistillError, RuntimeError):
    pass


class TeacherError(DistillError, RuntimeError):
    pass


class SkillBankError(DistillError, RuntimeError):
    pass


class EvalError(DistillError, RuntimeError):
    pass


class CheckpointError(DistillError, RuntimeError):
    exit_code = 2


class CollapseError(DistillError, RuntimeError):
    pass


class PreflightError(DistillError, RuntimeError):
    exit_code = 20


class MissingExtra(DistillError, ImportError):
    exit_code = 2

    @classmethod
    def of(cls, package: str, *, extra: str, feature: str) -> MissingExtra:
        return cls(
            f"{feature} needs the package {package!r}, which is not installed; "
            f"try: pip install 'distill-nightly[{extra}]'"
        )
