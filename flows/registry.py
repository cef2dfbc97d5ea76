"""The champion of every model: a pointer, its history, and the weights it points to.

    registry/<model>/  current.json  history.jsonl  champions/<digest12>/

The weights are copied first, then the pointer flips in one rename, then the history grows. The
pointer carries its history row, so a crash between the last two is repaired by the next call.
Callers that change something hold `model_lock`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill.errors import CheckpointError, ConfigError, DataError, EvalError
from distill.lock import Lock
from distill.rundir import (
    append_jsonl,
    digest_file,
    from_json,
    now,
    read_json,
    read_jsonl,
    staged_dir,
    write_json,
)
from distill.types import CheckpointRef, Promotion, Verdict

Kind = Literal["adapter", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion:
    """The weights that a model name stands for. `path` holds our own copy of them."""

    model: str
    digest: str
    kind: Kind
    base: str
    path: Path
    run: str | None
    at: str
    step: int = 0
    policy_version: int = 0
    bank: str | None = None
    """Skills that belong to the weights, as NAME@VERSION; None where none are shown."""

    def ref(self) -> CheckpointRef:
        return CheckpointRef(
            path=self.path,
            step=self.step,
            policy_version=self.policy_version,
            base=self.base,
            kind=self.kind,
            digest=self.digest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the history: a promotion, what it points to, and the verdict behind it."""

    model: str
    action: Literal["promote", "rollback", "initial"]
    from_digest: str | None
    to_digest: str
    run: str | None
    at: str
    kind: Kind
    base: str
    step: int = 0
    policy_version: int = 0
    verdict: str | None = None
    """File with the verdict, as given; None when a person decided."""
    bank: str | None = None
    """Skills that belong to the weights, as NAME@VERSION; None where none are shown."""

    def promotion(self) -> Promotion:
        return Promotion(
            model=self.model,
            action=self.action,
            from_digest=self.from_digest,
            to_digest=self.to_digest,
            run=self.run,
            at=self.at,
        )


def model_lock(home: Path, model: str) -> Lock:
    """Held by a night for its whole duration, and by everything else that moves the pointer."""
    return Lock(_folder(home, model) / "lock.json", f"night on model {model!r}")


def current(home: Path, model: str) -> Champion | None:
    """The champion, or None before the first promotion. CheckpointError when its files are gone."""
    entry = _pointer(home, model)
    if entry is None:
        return None
    path = _weights(home, model, entry.to_digest)
    if not path.is_dir():
        raise CheckpointError(
            f"the champion of {model!r} should lie in {path}, which is missing; "
            f"restore it, or choose an earlier one: distill rollback {model} --yes"
        )
    return Champion(
        model=model,
        digest=entry.to_digest,
        kind=entry.kind,
        base=entry.base,
        path=path,
        run=entry.run,
        at=entry.at,
        step=entry.step,
        policy_version=entry.policy_version,
        bank=entry.bank,
    )


def history(home: Path, model: str) -> list[Entry]:
    """Every change of the pointer, oldest first, also one that a crash left unlisted."""
    path = _folder(home, model) / "history.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    entries = [from_json(Entry, row, where=f"{path}, row {i + 1}") for i, row in enumerate(rows)]
    pointer = _pointer(home, model)
    if pointer is not None and (not entries or entries[-1] != pointer):
        entries.append(pointer)
    return entries


def models(home: Path) -> list[str]:
    """Names that have a champion."""
    return sorted(path.parent.name for path in (home / "registry").glob("*/current.json"))


def promote(
    home: Path,
    model: str,
    checkpoint: CheckpointRef,
    *,
    run: str | None,
    verdict_path: Path | None = None,
    action: Literal["promote", "initial"] = "promote",
    bank: str | None = None,
) -> Promotion:
    """Make `checkpoint` the champion. Repeating a call that succeeded or crashed changes nothing
    more. EvalError when the verdict at `verdict_path` is about other weights or not `promote`."""
    if verdict_path is not None:
        _check_verdict(verdict_path, checkpoint)
    before = _settle(home, model)
    if before is not None and before.to_digest == checkpoint.digest:
        return before.promotion()
    _copy_weights(checkpoint.path, _weights(home, model, checkpoint.digest))
    entry = Entry(
        model=model,
        action=action,
        from_digest=before.to_digest if before else None,
        to_digest=checkpoint.digest,
        run=run,
        at=now(),
        kind=checkpoint.kind,
        base=checkpoint.base,
        step=checkpoint.step,
        policy_version=checkpoint.policy_version,
        verdict=str(verdict_path) if verdict_path else None,
        bank=bank,
    )
    return _flip(home, entry)


def rollback(home: Path, model: str, to: str | None = None) -> Promotion:
    """Point to the champion before the current one, or to the one whose digest starts with `to`."""
    _settle(home, model)
    entries = history(home, model)
    if not entries:
        raise ConfigError(f"{model!r} has no champion in {home / 'registry'}; nothing to roll back")
    target = _target(entries, model, to)
    path = _weights(home, model, target.to_digest)
    if not path.is_dir():
        raise CheckpointError(f"the weights of {target.to_digest[:12]} are missing from {path}")
    verify_files(path)
    if target.to_digest == entries[-1].to_digest:
        return entries[-1].promotion()
    entry = Entry(
        model=model,
        action="rollback",
        from_digest=entries[-1].to_digest,
        to_digest=target.to_digest,
        run=target.run,
        at=now(),
        kind=target.kind,
        base=target.base,
        step=target.step,
        policy_version=target.policy_version,
        bank=target.bank,
    )
    return _flip(home, entry)


def verify_files(folder: Path) -> None:
    """CheckpointError unless every file that `manifest.json` lists has the digest it names."""
    manifest = folder / "manifest.json"
    try:
        files = read_json(manifest)["files"]
        damaged = [name for name, digest in files.items() if digest_file(folder / name) != digest]
    except (DataError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {error}") from error
    if damaged:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(damaged)} changed since it was made"
        )


def _target(entries: list[Entry], model: str, to: str | None) -> Entry:
    """A rollback undoes promotions, so a second one goes further back and never forward again."""
    line: list[Entry] = []
    for entry in entries:
        if entry.action == "rollback":
            while line and line[-1].to_digest != entry.to_digest:
                line.pop()
        if not line or line[-1].to_digest != entry.to_digest:
            line.append(entry)
    if to is None:
        if len(line) < 2:
            raise ConfigError(f"{model!r} has had no champion before {line[-1].to_digest[:12]}")
        return line[-2]
    found = {entry.to_digest: entry for entry in entries if entry.to_digest.startswith(to)}
    if len(found) != 1:
        known = ", ".join(dict.fromkeys(entry.to_digest[:12] for entry in entries))
        raise ConfigError(
            f"{to!r} stands for {len(found)} champions of {model!r}; the known ones are: {known}"
        )
    return next(iter(found.values()))


def _check_verdict(path: Path, checkpoint: CheckpointRef) -> None:
    verdict = from_json(Verdict, read_json(path), where=str(path))
    if verdict.candidate != checkpoint.digest:
        raise EvalError(
            f"{path} judges {verdict.candidate[:12]}, the checkpoint is {checkpoint.digest[:12]}"
        )
    if verdict.decision != "promote":
        raise EvalError(f"{path} says {verdict.decision!r}, so the candidate cannot be promoted")


def _copy_weights(source: Path, path: Path) -> None:
    verify_files(source)
    if path.exists():
        try:
            verify_files(path)
            return
        except CheckpointError:
            shutil.rmtree(path)
    with staged_dir(path) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        verify_files(partial)


def _flip(home: Path, entry: Entry) -> Promotion:
    write_json(_folder(home, entry.model) / "current.json", entry)
    _settle(home, entry.model)
    return entry.promotion()


def _settle(home: Path, model: str) -> Entry | None:
    """Append the pointer's row to the history if it is not there yet; return the pointer."""
    pointer = _pointer(home, model)
    path = _folder(home, model) / "history.jsonl"
    if pointer is not None:
        rows: list[Any] = read_jsonl(path) if path.exists() else []
        if not rows or from_json(Entry, rows[-1], where=str(path)) != pointer:
            append_jsonl(path, [pointer], sync=True)
    return pointer


def _pointer(home: Path, model: str) -> Entry | None:
    path = _folder(home, model) / "current.json"
    return from_json(Entry, read_json(path), where=str(path)) if path.exists() else None


def _folder(home: Path, model: str) -> Path:
    return home / "registry" / model


def _weights(home: Path, model: str, digest: str) -> Path:
    return _folder(home, model) / "champions" / digest[:12]
