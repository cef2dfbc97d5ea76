"""One night: its configuration, its folder, and the weights it starts from."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.body import require_known_head
from distill.checkpoint import verify_manifest, write_manifest
from distill.config import STAGE_PREFIX, Config, Stage
from distill.errors import ConfigError
from distill.models import (
    build_model,
    char_tokenizer,
    checkpoint_ref,
    choose_attention,
    eos_token_ids,
    load_adapter,
    load_model,
    load_tokenizer,
    new_adapter,
    pick_device,
    save_weights,
)
from distill.policy import AdapterSpec, Policy
from distill.pretrained import resolve_model
from distill.rundir import (
    RunDir,
    digest_file,
    digest_json,
    read_json,
    staged_dir,
    write_json,
)
from distill.tokens import Chat
from distill.types import CheckpointRef
from flows import registry
from flows.progress import Progress

FINAL = "final"
START = "start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Student:
    """A policy with the tokenizer and template that it speaks."""

    policy: Policy
    chat: Chat


def live_ref(student: Student, step: int) -> CheckpointRef:
    """Names the weights in memory, for engines that share them."""
    return CheckpointRef(
        path=Path("live"),
        step=step,
        policy_version=step,
        base=student.policy.base,
        kind=student.policy.kind,
        digest="live",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """What every stage function gets. Disk is the truth: a Night can be made anew at any time."""

    config: Config
    run: RunDir
    progress: Progress
    read_only: bool = False
    """It only surrounds weights that are there already: nothing may be made for it."""

    @property
    def id(self) -> str:
        """What no other night is called, even where a run was deleted and another one got its
        name; empty where there is no such record."""
        return str(self._record.get("id", ""))

    @property
    def bank_versions(self) -> Mapping[str, str]:
        """Bank -> its version when the night began, for banks whose skills are shown."""
        record = self._record
        found = {str(k): str(v) for k, v in record.get("bank_versions", {}).items()}
        if not found and record.get("bank_version"):  # nights of before knew one bank
            name = self.config.for_stage(self.config.last_student()).skills.bank
            found = {name: str(record["bank_version"])}
        return found

    @property
    def _record(self) -> Mapping[str, Any]:
        path = self.run.path / "night.json"
        return dict(read_json(path)) if path.exists() else {}

    @property
    def home(self) -> Path:
        return self.run.home

    @property
    def bank_home(self) -> Path:
        """Folder that holds `bank/`."""
        return self.home

    @property
    def student_stages(self) -> list[Stage]:
        return [s for s in self.config.stages if s.target == "student"]

    @property
    def bootstrap_stages(self) -> list[Stage]:
        return [s for s in self.config.stages if s.target != "student"]

    def final(self, stage: str) -> Path:
        """Folder of the finished weights of a stage."""
        return self.run.stage_dir(stage) / FINAL

    @property
    def start(self) -> Path:
        """Folder of the weights that the student starts the night with."""
        return self.run.path / START

    def locate(self, path: str, revision: str | None = None) -> Path:
        """Folder of a model: `stage:NAME`, a package, a directory or a hub name.

        What a name stood for is kept in `models.json` and holds for the rest of the run.
        """
        if path.startswith(STAGE_PREFIX):
            return self.final(path.removeprefix(STAGE_PREFIX))
        record = self.run.path / "models.json"
        known = read_json(record) if record.exists() else {}
        name, asked = f"{path}@{revision}" if revision else path, revision
        if known.get(name, {}).get("source") == "hub":
            revision = known[name]["revision"]
        found = resolve_model(path, home=self.home, revision=revision)
        if name not in known and self.run.path.is_dir():
            pinned = found.revision or _folder_digest(Path(found.dir_or_id))
            entry = {"source": found.source, "revision": pinned, "asked": asked}
            write_json(record, {**known, name: entry})
        return Path(found.dir_or_id)

    def key(self, stage: str) -> str:
        """Prefix of every random key of a stage. Another night draws other tasks, but makes the
        same teacher and base: those may come from the cache."""
        number = 0
        if self.config.stage(stage).target in ("student", "data"):
            number = self._record.get("number", 0)
        return f"{self.config.run.seed}/{number}/{stage}"


def set_threads(night: Night) -> None:
    """Use the configured number of CPU threads; by default what torch chose when the night began,
    so that a resume on a changed machine still sums in the same order."""
    import torch

    path = night.run.path / "threads.json"
    if not path.exists():
        write_json(path, night.config.run.threads or torch.get_num_threads())
    torch.set_num_threads(read_json(path))


def _folder_digest(folder: Path) -> str | None:
    """Digest of a model's weights; of their index where they are many files."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).is_file():
            return digest_file(folder / name)
    return None


def begin(night: Night) -> None:
    """Record which night this is and whose weights it continues. Idempotent."""
    path = night.run.path / "night.json"
    if path.exists():
        return
    champion = registry.current(night.home, night.config.model.name)
    name = night.config.model.name
    incumbent: dict[str, Any] | None = None
    if champion is not None:
        _require_same_base(night, champion.kind, champion.base)
        _require_same_revision(night, champion.run)
        incumbent = {"digest": champion.digest, "path": str(champion.path)}
    record = {
        "id": secrets.token_hex(8),
        "number": _number(night, name),
        "model": name,
        "incumbent": incumbent,
        "bank_versions": _bank_versions(night),
    }
    write_json(path, record)


def _bank_versions(night: Night) -> dict[str, str]:
    """The versions of the banks that the night begins with; those that are not shown may change
    without it."""
    from flows.banking import bank_of, showing_stages

    found = {}
    for name, stage in showing_stages(night).items():
        bank = bank_of(night, night.config.for_stage(stage))
        assert bank is not None
        found[name] = bank.snapshot()
    return found


def _number(night: Night, model: str) -> int:
    """A number that no earlier night of the model had, whether it was promoted, held or killed: a
    night that repeated the draws of a held one would end just like it."""
    used = [len(registry.history(night.home, model)) - 1]
    for run in RunDir.all(night.home):
        record = run.path / "night.json"
        known = read_json(record) if record.exists() else {}
        if known.get("model") == model:
            used.append(known["number"])
    return max(used) + 1


def prepare_start(night: Night) -> CheckpointRef:
    """Fix the weights that the night starts from: the champion's, or those of the configuration.
    Idempotent."""
    stage_config = night.config.for_stage(night.student_stages[0])
    base = base_name(stage_config)
    if not night.start.exists():
        incumbent = read_json(night.run.path / "night.json")["incumbent"]
        with staged_dir(night.start) as partial:
            if incumbent is not None:
                verify_manifest(Path(incumbent["path"]))  # else a damaged champion would go on
                shutil.copytree(incumbent["path"], partial, dirs_exist_ok=True)
            else:
                student = load_student(night, stage_config, None)
                save_weights(student.policy, student.chat.tokenizer, partial)
            write_manifest(partial)
    verify_manifest(night.start)
    return checkpoint_ref(night.start, base=base)


def register_start(night: Night) -> None:
    """Without a champion the start becomes the first one, so that a rollback always has a target.
    Idempotent."""
    from flows.banking import version_of

    ref, name = prepare_start(night), night.config.model.name
    if registry.current(night.home, name) is None:
        bank = version_of(night, start=True)
        registry.promote(night.home, name, ref, run=night.run.name, action="initial", bank=bank)


def base_name(config: Config) -> str:
    """What the weights of a stage are based on, as the registry records it: the model and, for an
    adapter, its shape. Weights of another name are never continued."""
    model = config.model
    build = f"build {digest_json(model.build)[:12]}" if model.build else ""
    source = (
        f"{model.path} ({build})" if model.path.startswith(STAGE_PREFIX) else model.path or build
    )
    if model.revision:
        source = f"{source}@{model.revision}"
    if model.kind == "full":
        return source
    return f"{source}, {model.target_modules} of rank {model.rank}, alpha {model.alpha}"


def load_student(night: Night, config: Config, weights: Path | None) -> Student:
    """The policy of a stage: saved weights (full or adapter), or what the configuration says."""
    import torch

    model_config = config.model
    source = weights if model_config.kind == "full" else None
    if source is None and model_config.path:
        source = night.locate(model_config.path, model_config.revision)
    trust = model_config.trust_remote_code
    if source is not None:
        tokenizer = load_tokenizer(str(source), trust_remote_code=trust)
        model = load_model(str(source), dtype=model_config.dtype, trust_remote_code=trust)
    else:
        tokenizer, model = built(config)
        model = model.to(dtype=getattr(torch, model_config.dtype))
    model = choose_attention(model.to(pick_device(model_config.device)), model_config.attention)
    if model_config.kind == "adapter":
        model = _with_adapter(model, config, weights)
    require_known_head(model.eval())
    policy = Policy(
        model,
        base=base_name(config),
        kind=model_config.kind,
        # Worked solutions were not sampled, so no temperature belongs to them.
        temperature=1.0 if config.stages[0].kind == "sft" else config.sampling.temperature,
        max_tokens=config.trainer.micro_batch_tokens,
    )
    chat = Chat(
        tokenizer,
        stop=model_config.stop,
        eos_token_ids=eos_token_ids(model),
        max_length=model_config.max_length,
        template_kwargs=model_config.template_kwargs,
    )
    return Student(policy=policy, chat=chat)


def built(config: Config) -> tuple[Any, Any]:
    """Tokenizer and model that the configuration describes, freshly made."""
    from evals.envs.world import ALPHABET

    if config.model.build is None:
        raise ConfigError(
            "model.path is empty and there is no [model.build]; name a model or describe one"
        )
    tokenizer = char_tokenizer(ALPHABET)
    return tokenizer, build_model(config.model.build, tokenizer, seed=config.run.seed)


def _with_adapter(model: Any, config: Config, weights: Path | None) -> Any:
    if weights is not None:
        return load_adapter(model, weights)
    spec = AdapterSpec(
        rank=config.model.rank,
        alpha=config.model.alpha,
        target_modules=config.model.target_modules,
    )
    return new_adapter(model, spec, seed=config.run.seed)


def _require_same_base(night: Night, kind: str, base: str) -> None:
    config = night.config.for_stage(night.student_stages[0])
    wanted = (config.model.kind, base_name(config))
    if (kind, base) != wanted:
        raise ConfigError(
            f"the champion of model {config.model.name!r} is {kind} weights on {base!r}, but this "
            f"configuration trains {wanted[0]} weights on {wanted[1]!r}; choose another model.name"
        )


def _require_same_revision(night: Night, run: str | None) -> None:
    """An adapter fits the very weights that it was trained on, not another version of a name."""
    config = night.config.for_stage(night.student_stages[0])
    path = config.model.path
    record = night.home / "runs" / str(run) / "models.json"
    if config.model.kind != "adapter" or not record.exists() or path.startswith(STAGE_PREFIX):
        return
    night.locate(path, config.model.revision)
    name = f"{path}@{config.model.revision}" if config.model.revision else path
    before = read_json(record).get(name, {}).get("revision")
    now = read_json(night.run.path / "models.json").get(name, {}).get("revision")
    if before is not None and now is not None and before != now:
        raise ConfigError(
            f"the champion of model {config.model.name!r} was trained on {path} at {before[:12]}, "
            f"which now is {now[:12]}; pin model.revision, restore it, or choose another model.name"
        )
