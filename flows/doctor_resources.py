"""Doctor: what a night needs of the machine: disk, and on a GPU memory and time."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import STAGE_PREFIX, Config
from distill.errors import ConfigError, PreflightError
from flows.doctor_checks import (
    Check,
    Finding,
    Load,
    Subject,
    fail,
    guarded,
    named_tables,
    ok,
    warn,
)

if TYPE_CHECKING:
    from distill.devices import Device
    from distill.sections import ModelSection
    from distill.workload import Shape

DISK_FAIL = 200 * 2**20
"""Bytes; a night of the smallest preset writes less than that."""
DISK_WARN = 5 * 2**30
PROBE = 1 << 16
"""Bytes that are written and read back."""
ADAM = 8
"""Bytes of optimizer state per trained number: two moments in float32."""
COPIES = 3
"""Folders of weights without optimizer state that a stage leaves behind: its final weights, what
the cache or the registry keeps of them, and what is being written."""


def check_disk(home: Path, needed: int = 0) -> list[Check]:
    """Is there a folder, is it writable, is there room, and does what is written come back?"""
    return guarded("disk", lambda: _disk(home, needed))


def _disk(home: Path, needed: int) -> list[Finding]:
    place = home.resolve()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return [fail(f"{place} is no folder", "choose another folder with --home or run.home")]
    advice = "free some space, or choose another folder with run.home"
    if not os.access(place, os.W_OK):
        return [fail(f"{place} is not writable", advice)]
    free = shutil.disk_usage(place).free
    detail = f"{_size(free)} free for {home.resolve()}"
    if needed:
        detail += f", a night writes about {_size(needed)}"
    if free < max(DISK_FAIL, needed):
        return [fail(detail, advice)]
    problem = write_and_read(place)
    if problem:
        return [fail(f"{place}: {problem}", "replace or remount the disk, or choose another")]
    if free < DISK_WARN:
        return [warn(detail, advice)]
    return [ok(f"{detail}; {PROBE >> 10} KiB written, synced and read back")]


def write_and_read(folder: Path) -> str:
    """What is wrong with a file written, synced and read back; empty when nothing is.

    PreflightError where the file cannot be written.
    """
    from distill.rundir import clear_disk_errors

    path, content = folder / f".doctor.partial-{os.getpid()}", os.urandom(PROBE)
    try:
        with clear_disk_errors(path), path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        found = path.read_bytes()
    except OSError as error:
        raise PreflightError(f"{path} cannot be read back: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    if found == content:
        return ""
    pairs = enumerate(zip(found, content, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(found), len(content)))
    return f"what was written does not come back: byte {first} of {PROBE} differs"


def _size(count: float) -> str:
    gib = count / 2**30
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{count / 2**20:.1f} MiB"


def space_needed(config: Config, home: Path, load: Load) -> int:
    """Bytes that the checkpoints and results of a night take: size times how many are kept."""
    total = 0
    for stage in config.stages:
        if stage.target == "data":
            continue
        own = config.for_stage(stage)
        subject = Subject(name=stage.name, own=own, config=config, home=home, load=load)
        numbers, width = count_numbers(subject)
        trained = adapter_numbers(subject, numbers) if own.model.kind == "adapter" else numbers
        weights = trained * (4 if own.model.kind == "adapter" else width)
        kept = max(2, own.checkpoint.keep) + 1  # one more while the newest is written
        total += kept * (weights + ADAM * trained) + COPIES * weights
    return total


def count_numbers(subject: Subject) -> tuple[int, int]:
    """Parameters of the stage's model, and bytes of each: from headers, or from its description."""
    from math import prod

    from distill.workload import built_shape
    from flows.doctor_models import tensor_shapes

    maker = subject.maker.model
    width = 2 if maker.dtype == "bfloat16" else 4
    folder = subject.loaded.folder
    if folder is not None:
        files = sorted(folder.glob("*.safetensors"))
        return sum(prod(s) for f in files for s in tensor_shapes(f).values()), width
    if maker.build is None:
        return 0, width
    return built_shape(maker.build, len(subject.loaded.tokenizer)).num_weights, width


def adapter_numbers(subject: Subject, numbers: int) -> int:
    """Of an adapter over every linear layer: rank x (in + out) each; a bound where layers are not
    known by name."""
    from flows.doctor_models import tensor_shapes

    folder = subject.loaded.folder
    if folder is None:
        return numbers
    shapes = [
        shape
        for file in sorted(folder.glob("*.safetensors"))
        for name, shape in tensor_shapes(file).items()
        if len(shape) == 2 and not any(word in name for word in ("embed", "lm_head"))
    ]
    return sum(subject.own.model.rank * (shape[0] + shape[1]) for shape in shapes)


def check_fits(subject: Subject) -> list[Finding]:
    """Memory and time of a step on a GPU; nothing to say where none is used and none is named.
    Where they cannot be estimated it is said: a night may well run."""
    from distill.footprint import floor, footprint
    from distill.workload import workload_of

    stage = subject.own.stages[0] if subject.own.stages else None
    if stage is None or stage.target == "data":
        return []
    try:
        device = subject.device or gpu_here(subject.own)
        if device is None:
            return []
        student = model_shape(subject, subject.own.model.path, subject.own.model)
        teacher = _widest(subject)
    except ConfigError as error:
        return [warn(str(error), "watch the memory of the first steps yourself")]
    needs = subject.objective.needs if subject.objective else frozenset()
    lengths = [len(ids) for ids in subject.chat.prompts(subject.prompts, limit=0)]
    work = workload_of(
        subject.own,
        student,
        prompt=sum(lengths) // len(lengths),
        teacher=teacher,
        exact="teacher.distribution" in needs,
    )
    verdict, least = footprint(work).fits(device.memory), floor(work, device)
    where = f"{device.name} with {_size(device.memory)}"
    if not verdict.fits:
        what, _, advice = verdict.text.rpartition(": ")
        return [fail(f"{where}: {what}", advice)]
    steps = subject.own.trainer.steps
    return [
        ok(f"{where}: {verdict.text}"),
        ok(
            f"a step takes at least {least.total:.3g} s there (replies {least.replies:.2g}, "
            f"teacher {least.teacher:.2g}, training {least.training:.2g}, sync {least.sync:.2g}); "
            f"{steps} steps {steps * least.total / 60:.2g} min; two to three times that is usual"
        ),
    ]


def gpu_here(config: Config) -> Device | None:
    """The first GPU of this machine; None without one, and for a model on the CPU. ConfigError for
    a GPU that nobody knows the rates of."""
    if config.model.device == "cpu":
        return None
    import torch

    from distill.devices import find_device

    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    return replace(find_device(torch.cuda.get_device_name(0)), memory=memory)


def model_shape(subject: Subject, path: str, model: ModelSection) -> Shape:
    """The sizes of a model: of one that an earlier stage makes, as it will be made."""
    from distill.workload import built_shape, read_shape

    if path.startswith(STAGE_PREFIX):
        stage = subject.config.stage(path.removeprefix(STAGE_PREFIX))
        made = subject.config.for_stage(stage).model
        return model_shape(subject, made.path, made)
    loaded = subject.load(path)
    if loaded.folder is not None:
        return read_shape(loaded.folder)
    if model.build is None:
        raise ConfigError("no estimate: model.path is empty and there is no [model.build]")
    return built_shape(model.build, len(loaded.tokenizer))


def _widest(subject: Subject) -> Shape | None:
    """The largest model among the teachers of this process."""
    named = subject.own.teacher
    found = [
        model_shape(subject, str(options["path"]), subject.own.model)
        for name, options in named_tables(named.name, named.options)
        if name in ("local", "text") and options.get("path")
    ]
    return max(found, key=lambda shape: shape.num_weights, default=None)
