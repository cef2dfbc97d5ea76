"""What a stage needs of a device before anything is loaded: bytes, and the least time of a step.

Letters: B rollouts, P prompt and C reply tokens, T tokens of a micro-batch, L layers, d hidden
size, V vocabulary, N weights in matrix products (the head included), n trained weights.

Times are floors: arithmetic and memory traffic at the peak rates of a device, without attention's
own products, kernels that wait, or the tokenizer. A real step takes two to three times as long.
Bytes are estimates: within a factor of 2 of what is measured. No torch in here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distill.devices import GIB, Device
from distill.workload import Workload

USABLE = 0.92
"""Share of a device's memory that tensors get; the rest is the driver's, and gaps."""
HEAD_CHUNK = 2**23
"""Logits of one chunk of the head, in elements."""
HEAD_BUFFERS = 6
"""float32 tensors of a chunk's size that live at once."""
Phase = Literal["always", "replies", "teacher", "training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Bytes of one purpose, and while what they are held."""

    name: str
    size: int
    phase: Phase = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a stage fits, and what to lower where it does not."""

    fits: bool
    need: int
    """Bytes at the worst moment."""
    usable: int
    """Bytes that there are."""
    biggest: Item
    text: str
    """One sentence for a person."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a stage on the device, and beside it on the host."""

    items: Sequence[Item]
    host: int
    """Bytes of an optimizer that is kept on the CPU."""
    work: Workload

    def held(self, phase: Phase) -> list[Item]:
        """What is held during a phase."""
        return [i for i in self.items if i.phase in ("always", phase)]

    @property
    def need(self) -> int:
        """Bytes at the worst moment of a step."""
        return max(sum(i.size for i in self.held(p)) for p in _MOMENTS)

    def fits(self, memory: int) -> Verdict:
        """The verdict for a device with so many bytes."""
        usable = int(memory * USABLE)
        worst = max(_MOMENTS, key=lambda p: sum(i.size for i in self.held(p)))
        biggest = max(self.held(worst), key=lambda i: i.size)
        text = (
            f"needs about {_gib(self.need)} of {_gib(usable)} usable; the biggest part is "
            f"{biggest.name} with {_gib(biggest.size)}"
        )
        fits = self.need <= usable
        if not fits:
            text += f": {_advice(biggest.name, self.work)}"
        return Verdict(fits=fits, need=self.need, usable=usable, biggest=biggest, text=text)


_MOMENTS: tuple[Phase, ...] = ("replies", "teacher", "training")


def footprint(work: Workload) -> Footprint:
    """Bytes of every part of a stage; see `Workload`."""
    student, width, n = work.student, work.width, work.trained
    trained_width = width if work.rank is None else 4
    masters = work.offload or (work.master_weights and trained_width < 4)
    adapter = 0 if work.rank is None else 4 * n
    state = n * (8 + (4 if masters else 0))
    # Gradients of half precision are added to a float32 sum, and both live for a moment.
    grads = n * (trained_width + (4 if masters and not work.offload else 0))
    items = [
        Item(name="student weights", size=student.num_weights * width + adapter),
        Item(name="copies of the student", size=work.copies * _copy_bytes(work)),
        Item(name="optimizer", size=0 if work.offload else state),
        Item(name="gradients", size=grads, phase="training"),
        Item(name="activations", size=_activations(work), phase="training"),
        Item(name="logits", size=_logits(work), phase="training"),
    ]
    if work.engine == "copy":
        items.append(Item(name="engine weights", size=student.num_weights * width))
    if work.engine in ("shared", "copy"):
        cache = work.at_once * (work.prompt + work.reply) * student.cache_bytes(width)
        items.append(Item(name="key-value cache", size=cache, phase="replies"))
    items += _teacher_items(work)
    host = state + n * 4 if work.offload else 0
    return Footprint(items=tuple(i for i in items if i.size), host=host, work=work)


def _copy_bytes(work: Workload) -> int:
    return work.student.num_weights * work.width if work.rank is None else 4 * work.trained


def _activations(work: Workload) -> int:
    student, tokens = work.student, work.at_most
    layer = student.layer_bytes(work.width, adapter=work.rank is not None)
    if work.eager:
        layer += 9 * student.heads * (work.prompt + work.reply)
    entering = student.hidden * work.width
    per_token = (
        student.layers * entering + layer if work.recompute else student.layers * layer + entering
    )
    return tokens * per_token


def _logits(work: Workload) -> int:
    """The chunks of the head, and the float32 sums of its gradient where it is trained."""
    student = work.student
    chunk = 4 * HEAD_BUFFERS * min(HEAD_CHUNK, work.at_most * student.vocab)
    sums = (2 if work.exact else 1) * 4 * student.vocab * student.hidden
    return chunk + (sums if work.rank is None else 0)


def _teacher_items(work: Workload) -> list[Item]:
    teacher = work.teacher
    if teacher is None or work.teacher_at == "served":
        return []
    found = []
    if work.teacher_at == "local":
        found.append(Item(name="teacher weights", size=teacher.num_weights * work.teacher_width))
    if work.exact:
        kept = work.rollouts * work.reply * teacher.hidden * work.teacher_width
        found.append(Item(name="hidden states of the teacher", size=kept, phase="training"))
        found.append(Item(name="hidden states of the teacher", size=kept, phase="teacher"))
    passing = work.at_most * (4 * teacher.hidden + 3 * teacher.inner) * work.teacher_width
    found.append(Item(name="forward pass of the teacher", size=passing, phase="teacher"))
    return found


def _advice(name: str, work: Workload) -> str:
    half = [] if work.width == 2 else ['set model.dtype = "bfloat16"']
    adapter = [] if work.rank else ['set model.kind = "adapter"']
    offload = [] if work.offload else ['set trainer.offload = "optimizer"']
    again = [] if work.recompute else ["set trainer.gradient_checkpointing = true"]
    elsewhere = ["serve the teacher from another device"]
    ways = {
        "student weights": [*half, "choose a smaller model"],
        "copies of the student": [*adapter, "choose another teacher or sampling.refresh = 0"],
        "optimizer": [*offload, *adapter],
        "gradients": adapter or ["lower model.rank"],
        "activations": [*again, "lower trainer.micro_batch_tokens"],
        "logits": [*adapter, "lower trainer.micro_batch_tokens"],
        "engine weights": ["use an engine on another device", *half],
        "key-value cache": ["lower the engine's batch or sampling.max_new_tokens", *half],
        "teacher weights": [
            *([] if work.teacher_width == 2 else ['set teacher.dtype = "bfloat16"']),
            *elsewhere,
        ],
        "hidden states of the teacher": ["lower trainer.batch", *elsewhere],
        "forward pass of the teacher": ["lower trainer.micro_batch_tokens", *elsewhere],
    }
    return ", or ".join(ways[name])


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Least seconds of the parts of a step that follow one another on one device."""

    replies: float
    teacher: float
    training: float
    sync: float

    @property
    def total(self) -> float:
        return self.replies + self.teacher + self.training + self.sync

    def at(self, utilization: float) -> Floor:
        """The same with matrix products at a share of the peak, such as 0.4."""
        return Floor(
            replies=self.replies,
            teacher=self.teacher / utilization,
            training=self.training / utilization,
            sync=self.sync,
        )


def floor(work: Workload, device: Device) -> Floor:
    """The least time of a step: `total` is what no implementation can be faster than."""
    peak = device.flops(work.width)
    return Floor(
        replies=_reply_seconds(work, device),
        teacher=_teacher_seconds(work, device),
        training=work.epochs * _passes(work) * work.student.matmul_weights * work.tokens / peak,
        sync=_sync_bytes(work) / device.link,
    )


def _passes(work: Workload) -> int:
    """FLOPs per weight and token: two forward, four backward, two to compute layers again; without
    gradients of frozen weights two less."""
    return (6 if work.rank is None else 4) + (2 if work.recompute else 0)


def _reply_seconds(work: Workload, device: Device) -> float:
    if work.engine == "none":
        return 0.0
    weights = work.student.matmul_weights
    waves = math.ceil(work.rollouts / work.at_once)
    read = waves * work.reply * weights * work.width
    cached = work.rollouts * work.reply * (work.prompt + work.reply / 2)
    moved = read + cached * work.student.cache_bytes(work.width)
    products = 2 * weights * work.rollouts * (work.prompt / work.samples + work.reply)
    return max(products / device.flops(work.width), moved / device.bandwidth)


def _teacher_seconds(work: Workload, device: Device) -> float:
    if work.teacher is None:
        return 0.0
    if work.teacher_at == "served":  # the other device computes, this one waits for its answer
        answer = 4 + 6 * work.candidates
        return work.rollouts * work.reply * answer / device.link
    width = work.width if work.teacher_at == "own" else work.teacher_width
    return 2 * work.teacher.matmul_weights * work.tokens / device.flops(width)


def _sync_bytes(work: Workload) -> int:
    if work.engine in ("shared", "none"):
        return 0
    return 2 * work.trained if work.rank is not None else work.width * work.trained
