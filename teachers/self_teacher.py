"""The student as its own teacher: the same weights with the adapter off, and a privileged view."""

from __future__ import annotations

from distill.policy import BASE, Policy
from teachers.local import LocalTeacher


def self_teacher(policy: Policy, *, role: str = BASE) -> LocalTeacher:
    """A teacher over a role of the student's own model; one copy of the weights.

    For full weights the role `base` is the frozen start of the night.
    """
    if role == BASE:
        policy.keep_start()
    return LocalTeacher(policy, name=f"self:{role}", role=role)
