"""How weights reach an engine that does not share them: a folder, and what proves their arrival.

A published folder is an ordinary Hugging Face one (full weights or a PEFT adapter). Beside the
weights lies `probe.json`: a few short sequences and what the trainer says of them. An engine that
has loaded the folder compares its own log-probabilities before it samples, every time: an adapter
that never arrived and a head that kept its old weights look like nothing at all otherwise.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.errors import DataError, EngineError
from distill.models import FULL_WEIGHTS, checkpoint_ref
from distill.policy import STUDENT, Policy
from distill.rundir import from_json, read_json, staged_dir, write_json
from distill.types import CheckpointRef, TeacherView

PROBE = "probe.json"
HEAD = "lm_head.weight"
NUM_SEQUENCES = 2
LENGTH = 12
NOTICEABLE = 0.01
"""Share of the tolerance, and of the trainer's own change, that counts as a change at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Sequences, and the trainer's log-probability of each token after the first."""

    token_ids: tuple[tuple[int, ...], ...]  # [S][L]
    logprobs: tuple[tuple[float, ...], ...]  # [S][L - 1], at temperature 1

    def require(self, found: Sequence[Sequence[float]], *, tolerance: float, engine: str) -> float:
        """The mean gap between an engine's log-probabilities and the trainer's, in nats.

        EngineError when it exceeds `tolerance`, naming the first token that is that far off.
        """
        gaps: list[tuple[float, int, int]] = []
        for row, (ours, theirs) in enumerate(zip(self.logprobs, found, strict=True)):
            if len(ours) != len(theirs):
                raise EngineError(
                    f"{engine} scored {len(theirs)} of {len(ours)} tokens of a probe; update the "
                    "engine"
                )
            gaps += [
                (abs(a - b), row, i) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
            ]
        mean = math.fsum(gap for gap, _, _ in gaps) / len(gaps)
        if mean <= tolerance:
            return mean
        first = next(item for item in gaps if not item[0] <= tolerance)
        _, row, i = first
        raise EngineError(
            f"{engine} does not have the weights that were sent: its log-probabilities differ from "
            f"the trainer's by {mean:.4g} nats on average (allowed {tolerance:.4g}); first at "
            f"token {i + 2} of probe {row + 1}, id {self.token_ids[row][i + 1]}: "
            f"{found[row][i]:.4f} there, {self.logprobs[row][i]:.4f} here; check that the engine "
            "serves this very base model in the same dtype, or raise engine.tolerance"
        )


@dataclass(slots=True)
class Arrivals:
    """What an engine said of the last probe. An update may be far smaller than the tolerance; an
    engine that never took it then answers exactly as before, while the trainer does not."""

    _probe: Probe | None = None
    _found: list[list[float]] | None = None

    def require(
        self, probe: Probe, found: Sequence[Sequence[float]], *, tolerance: float, engine: str
    ) -> float:
        """As `Probe.require`. EngineError also when the trainer's answers have moved since the last
        probe, by more than a hundredth of the tolerance, and the engine's have not."""
        gap = probe.require(found, tolerance=tolerance, engine=engine)
        rows = [list(row) for row in found]
        if self._probe is not None and self._found is not None:
            moved = mean_change(self._probe.logprobs, probe.logprobs)
            answered = mean_change(self._found, rows)
            if moved > tolerance * NOTICEABLE and answered < moved * NOTICEABLE:
                raise EngineError(
                    f"{engine} answers as it did before the weights were sent (change "
                    f"{answered:.3g} nats), while those of the trainer moved by {moved:.3g}: it "
                    "kept its old weights; see its log, and start it again"
                )
        self._probe, self._found = probe, rows
        return gap


def mean_change(old: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> float:
    """Mean difference between two models' answers to a probe, in nats per token."""
    pairs = [abs(a - b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
    return math.fsum(pairs) / len(pairs)


def make_probe(policy: Policy, *, num_ids: int, role: str = STUDENT) -> Probe:
    """Fixed sequences of ids below `num_ids`, and what a role says of them at temperature 1."""
    seed = int.from_bytes(hashlib.sha256(b"probe").digest()[:8], "little")
    drawn = np.random.Generator(np.random.Philox(key=seed)).random((NUM_SEQUENCES, LENGTH))
    rows = tuple(tuple(int(x * num_ids) for x in row) for row in drawn)
    views = [
        TeacherView(token_ids=row, positions=tuple(range(1, LENGTH)), kind="probe", id=f"probe{i}")
        for i, row in enumerate(rows)
    ]
    kept, policy.temperature = policy.temperature, 1.0
    try:
        scores = policy.score(views, role)
    finally:
        policy.temperature = kept
    return Probe(token_ids=rows, logprobs=tuple(found.logprobs for found in scores))


def read_probe(folder: Path) -> Probe | None:
    """The probe of a published folder; None for weights that nobody published."""
    path = folder / PROBE
    return from_json(Probe, read_json(path), where=str(path)) if path.exists() else None


def publish(
    policy: Policy,
    tokenizer: Any,
    folder: Path,
    *,
    step: int,
    policy_version: int,
    role: str = STUDENT,
) -> CheckpointRef:
    """Write the weights of a role and their probe for an engine; replaces what `folder` held.

    `role` is the student, or a copy of it (`sampling`).
    """
    num_ids = min(len(tokenizer), policy.head(role).vocab_size)
    if folder.exists():
        shutil.rmtree(folder)
    with staged_dir(folder) as partial:
        if policy.kind == "adapter":
            _save_adapter(policy, role, partial)
        else:
            _save_full(policy, role, tokenizer, partial)
        write_json(partial / PROBE, make_probe(policy, num_ids=num_ids, role=role))
    return checkpoint_ref(folder, base=policy.base, step=step, policy_version=policy_version)


def _save_adapter(policy: Policy, role: str, folder: Path) -> None:
    name = "default" if role == STUDENT else role
    options: dict[str, Any] = {}
    if not policy.group.is_alone:
        state = policy.whole_state(role)  # by the student's names
        options["state_dict"] = {k.replace(".default.", f".{name}."): v for k, v in state.items()}
    policy.model.save_pretrained(
        str(folder), selected_adapters=[name], save_embedding_layers=False, **options
    )
    inner = folder / name  # where peft puts every adapter but the default one
    if inner.is_dir():
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()


def _save_full(policy: Policy, role: str, tokenizer: Any, folder: Path) -> None:
    """Full weights, with a tied head under its own name too: an engine that packs the head into a
    layout of its own keeps the old one unless it is sent."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model = policy.model if role == STUDENT else policy.followers[role].model
    options = {} if policy.group.is_alone else {"state_dict": policy.whole_state(role)}
    model.save_pretrained(str(folder), **options)
    tokenizer.save_pretrained(str(folder))
    path = folder / FULL_WEIGHTS
    if not path.is_file():
        raise DataError(
            f"the model of {policy.base} was saved in several files, which an engine cannot be "
            'sent yet; train an adapter: model.kind = "adapter"'
        )
    with safe_open(str(path), "pt") as file:
        if HEAD in file.keys():  # noqa: SIM118  (not a mapping)
            return
    tensors = load_file(str(path))
    tensors[HEAD] = policy.head(role).weight.detach().cpu().clone().contiguous()
    save_file(tensors, str(path), metadata={"format": "pt"})
