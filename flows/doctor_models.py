"""Doctor: the files of models and adapters. Reads headers; weights only where it says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distill.config import STAGE_PREFIX, Config
from distill.errors import CheckpointError, DataError
from flows.doctor_checks import (
    Finding,
    Load,
    Loaded,
    Subject,
    end_ids,
    fail,
    named_tables,
    ok,
    read_table,
    warn,
)

SHOWN = 8
"""Characters of a digest that are shown."""


def loader(config: Config, home: Path) -> Load:
    """Loads each model of a configuration once: its tokenizer and what its files say."""
    known: dict[str, Loaded] = {}

    def load(path: str) -> Loaded:
        if path not in known:
            known[path] = _load(path, config, load, home)
        return known[path]

    return load


def _load(path: str, config: Config, load: Load, home: Path) -> Loaded:
    from huggingface_hub.errors import StrictDataclassError

    from distill.models import char_tokenizer, load_tokenizer
    from distill.pretrained import resolve_model

    if path.startswith(STAGE_PREFIX):
        maker = config.for_stage(config.stage(path.removeprefix(STAGE_PREFIX)))
        return load(maker.model.path)
    if not path:
        from evals.envs.world import ALPHABET

        build = config.model.build
        positions = build.max_positions if build else None
        return Loaded(tokenizer=char_tokenizer(ALPHABET), positions=positions)
    stages = [config.for_stage(stage).model for stage in config.stages]
    model = next((m for m in [*stages, config.model] if m.path == path), None)
    found = resolve_model(path, home=home, revision=model.revision if model else None)
    folder = Path(found.dir_or_id)
    trust = model.trust_remote_code if model else False
    settings = read_table(folder / "config.json")
    text = settings.get("text_config", settings)  # of models that also see or hear
    try:
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trust)
    except StrictDataclassError as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder / 'config.json'} contradicts itself: {why}") from error
    return Loaded(
        tokenizer=tokenizer,
        eos_token_ids=end_ids(folder),
        vocab_size=text.get("vocab_size"),
        positions=text.get("max_position_embeddings"),
        folder=folder,
    )


def check_model(subject: Subject) -> list[Finding]:
    """The tokenizer loads, belongs to the weights, and knows how a reply ends."""
    from distill.tokens import tokenizer_digest

    loaded, chat = subject.loaded, subject.chat
    tokenizer, size = loaded.tokenizer, len(loaded.tokenizer)
    stops = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in chat.stop_token_ids)
    found = [
        ok(
            f"{size} tokens, replies end with {stops}; token map "
            f"{tokenizer_digest(tokenizer)[:SHOWN]}, {len(tokenizer.added_tokens_encoder)} added, "
            f"own padding side {tokenizer.padding_side} (rows are padded on the right)"
        )
    ]
    if loaded.vocab_size is not None and loaded.vocab_size < size:
        found.append(_narrow(subject, loaded.vocab_size))
    elif loaded.vocab_size is not None and loaded.vocab_size > size:
        extra = loaded.vocab_size - size
        found.append(
            ok(f"the output layer has {loaded.vocab_size} rows; the last {extra} are padding")
        )
    return found


def _narrow(subject: Subject, rows: int) -> Finding:
    """A tokenizer with more ids than its model has rows: some models of vision keep it so."""
    tokenizer, chat = subject.loaded.tokenizer, subject.chat
    used = {*chat.stop_token_ids, chat.pad_id}
    used |= {i for i in (tokenizer.pad_token_id, tokenizer.bos_token_id) if i is not None}
    with suppress(DataError):  # said by the checks of the data and of the template
        used |= {i for ids in chat.prompts(subject.prompts, limit=0) for i in ids}
    detail = f"the tokenizer has {len(tokenizer)} tokens, the model {rows}"
    first = min((i for i in used if i >= rows), default=None)
    if first is None:
        extra = len(tokenizer) - rows
        return warn(
            f"{detail}: the last {extra} ids have no row and must not be used",
            "keep what they stand for out of the tasks, such as images",
        )
    return fail(
        f"{detail}: {tokenizer.convert_ids_to_tokens(first)!r} (id {first}) is used and has no row",
        "use the tokenizer that belongs to the weights",
    )


def check_adapter(subject: Subject) -> list[Finding]:
    """Adapters that are named as a teacher or reference: whole, and made for this base."""
    found: list[Finding] = []
    for named in (subject.own.teacher, subject.own.reference):
        for name, options in named_tables(named.name, named.options):
            adapter = str(options.get("adapter", ""))
            if name == "local" and adapter and not adapter.startswith(STAGE_PREFIX):
                found += _adapter(Path(adapter).expanduser(), subject)
    return found


def _adapter(folder: Path, subject: Subject) -> list[Finding]:
    from distill.models import ADAPTER_WEIGHTS, adapter_dir

    shapes = tensor_shapes(adapter_dir(folder) / ADAPTER_WEIGHTS)
    base = subject.loaded.folder
    settings = read_table(folder / "adapter_config.json")
    recorded = str(settings.get("base_model_name_or_path") or "")
    if base is None:
        return [ok(f"{folder}: {len(shapes)} tensors; its base is yet to be made")]
    below: dict[str, tuple[int, ...]] = {}
    for file in sorted(base.glob("*.safetensors")):
        below |= tensor_shapes(file)
    wrong = _misfit(shapes, below, turned=bool(settings.get("fan_in_fan_out")))
    advice = "name the model that the adapter was trained on in model.path, or another adapter"
    if wrong:
        return [
            fail(f"{folder} is an adapter for another base ({recorded or '?'}): {wrong}", advice)
        ]
    same = {subject.own.model.path, str(base)}
    if (
        recorded
        and recorded not in same
        and Path(recorded).name not in {Path(x).name for x in same}
    ):
        return [
            warn(
                f"{folder} was made on {recorded}, the student is {subject.own.model.path}; the "
                "shapes fit",
                f"sure only if both are the same weights; else {advice}",
            )
        ]
    return [ok(f"{folder}: {len(shapes)} tensors that fit {base}")]


def _misfit(
    adapter: Mapping[str, tuple[int, ...]],
    base: Mapping[str, tuple[int, ...]],
    *,
    turned: bool,
) -> str:
    """The first tensor of an adapter that its base has no place for; empty when all fit.

    `turned`: the base keeps its weights as [in, out] (`fan_in_fan_out`), where sides say nothing.
    """
    for name, shape in sorted(adapter.items()):
        for part, side in ((".lora_A.", 1), (".lora_B.", 0)):
            if part not in name:
                continue
            layer = name.partition(part)[0].removeprefix("base_model.model.")
            layer = layer.removesuffix(".base_layer")
            places = _places(layer, base)
            if not places and layer.rpartition(".")[2] != "lm_head":  # a tied head is not stored
                return f"the base has no {layer}.weight"
            known = {p: base[p] for p in places if p.endswith(".weight") and len(base[p]) == 2}
            if turned or len(shape) != 2 or not known:
                continue
            if all(shape[side] != sides[side] for sides in known.values()):
                place, sides = next(iter(known.items()))
                return f"{name} is {list(shape)}, but {place} is {list(sides)}"
    return ""


def _places(layer: str, base: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The tensor of a layer, or those that may be it. Files and classes often disagree about what
    stands before the number of a layer, so names are then compared from there on."""
    if f"{layer}.weight" in base:
        return [f"{layer}.weight"]
    tail = re.search(r"[^.]+\.\d+\..*$", layer)
    words = tail.group() if tail else layer.rpartition(".")[2]
    return [name for name in base if f".{words}." in f".{name}."]


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, from the header. CheckpointError for a damaged or cut file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            return {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"weights {file} are missing, corrupt or cut short ({error}); copy the file again"
        ) from error


def check_finite(subject: Subject) -> list[Finding]:
    """Reads every weight of the stage's models from disk and looks for NaN and infinities."""
    folders = [subject.loaded.folder]
    for named in (subject.own.teacher, subject.own.reference):
        for _, options in named_tables(named.name, named.options):
            path, adapter = str(options.get("path", "")), str(options.get("adapter", ""))
            if path and not path.startswith(STAGE_PREFIX):
                folders.append(subject.load(path).folder)
            if adapter and not adapter.startswith(STAGE_PREFIX):
                folders.append(Path(adapter).expanduser())
    files = [f for folder in folders if folder for f in sorted(folder.glob("*.safetensors"))]
    count, bad = 0, ""
    for file in dict.fromkeys(files):
        numbers, first = _not_finite(file)
        count, bad = count + numbers, bad or first
    if bad:
        return [fail(bad, "restore the file from its source; these weights cannot be trained")]
    return [ok(f"{count} numbers in {len(set(files))} files, all finite")] if files else []


def _not_finite(file: Path) -> tuple[int, str]:
    """How many numbers a file holds, and where the first that is not finite stands."""
    import torch
    from safetensors import safe_open

    count = 0
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            tensor = tensors.get_tensor(name)
            count += tensor.numel()
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
                return count, f"{file}: {name} holds {float(tensor[tuple(place)])} at {place}"
    return count, ""


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads, most of all beside other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def micro_policy(subject: Subject) -> Any:
    """A tiny random model over the stage's own tokenizer: what the path of the loss needs, without
    the weights. It is far from uniform, so that an error of the path shows."""
    from distill.models import build_model
    from distill.policy import Policy
    from distill.sections import ModelBuild

    build = ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64, initializer_range=0.3)
    tokenizer = subject.loaded.tokenizer
    model = build_model(build, tokenizer, seed=subject.own.run.seed)
    if subject.loaded.vocab_size is not None:
        model.resize_token_embeddings(subject.loaded.vocab_size, mean_resizing=False)
    return Policy(model, base="micro", temperature=subject.own.sampling.temperature or 1.0)
