"""The champion pointer: promoted with a verdict, rolled back, and whole after any crash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distill.errors import CheckpointError, ConfigError, EvalError
from distill.rundir import append_jsonl, digest_file, read_jsonl, write_json
from distill.types import CheckpointRef, Decision, DomainResult, Verdict
from flows import registry
from flows.cli import main
from skill_nights import order_skill
from skills.bank import SkillBank


def weights(folder: Path, content: str) -> CheckpointRef:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    files = {"model.safetensors": digest_file(folder / "model.safetensors")}
    write_json(folder / "manifest.json", {"format": 1, "files": files})
    return CheckpointRef(
        path=folder,
        step=5,
        policy_version=5,
        base="full",
        kind="full",
        digest=files["model.safetensors"],
    )


def verdict(path: Path, decision: Decision, candidate: str) -> Path:
    result = DomainResult(
        teacher=None, before=0.1, after=0.9, difference=0.8, low=0.7, high=0.9, n=10
    )
    write_json(
        path,
        Verdict(
            decision=decision,
            reasons=(),
            candidate=candidate,
            incumbent="before",
            domains={},
            overall=result,
            detectable=0.1,
        ),
    )
    return path


def actions(home: Path) -> list[tuple[str, str]]:
    return [(e.action, e.run or "") for e in registry.history(home, "toy")]


@pytest.fixture
def line(tmp_path: Path) -> list[CheckpointRef]:
    """Three champions, promoted one after the other."""
    refs = [weights(tmp_path / name, name) for name in "abc"]
    for ref in refs:
        registry.promote(tmp_path, "toy", ref, run=ref.path.name)
    return refs


def test_the_first_champion_has_no_predecessor_and_a_copy_of_the_weights(tmp_path: Path) -> None:
    ref = weights(tmp_path / "final", "w")
    done = registry.promote(tmp_path, "toy", ref, run="r1", action="initial")
    assert (done.action, done.from_digest, done.to_digest) == ("initial", None, ref.digest)
    shutil.rmtree(ref.path)
    champion = registry.current(tmp_path, "toy")
    assert champion is not None
    assert (champion.path / "model.safetensors").read_text() == "w"
    assert champion.path.name == ref.digest[:12]
    assert (champion.ref().digest, champion.ref().step) == (ref.digest, 5)
    assert registry.models(tmp_path) == ["toy"]


def test_a_model_without_champion_is_none_and_cannot_roll_back(tmp_path: Path) -> None:
    assert registry.current(tmp_path, "toy") is None
    assert registry.history(tmp_path, "toy") == []
    with pytest.raises(ConfigError, match="nothing to roll back"):
        registry.rollback(tmp_path, "toy")


def test_history_links_every_champion_to_the_one_before(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    links = [(e.from_digest, e.to_digest) for e in registry.history(tmp_path, "toy")]
    a, b, c = (ref.digest for ref in line)
    assert links == [(None, a), (a, b), (b, c)]


def test_promoting_again_changes_nothing(tmp_path: Path, line: list[CheckpointRef]) -> None:
    first = registry.history(tmp_path, "toy")[-1].promotion()
    assert registry.promote(tmp_path, "toy", line[-1], run="c") == first
    assert len(registry.history(tmp_path, "toy")) == 3


def test_a_second_rollback_goes_further_back_and_a_promotion_starts_there(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    a, b, c = (ref.digest for ref in line)
    assert registry.rollback(tmp_path, "toy").to_digest == b
    assert registry.rollback(tmp_path, "toy").to_digest == a
    with pytest.raises(ConfigError, match="no champion before"):
        registry.rollback(tmp_path, "toy")
    assert registry.promote(tmp_path, "toy", line[2], run="d").from_digest == a
    assert registry.rollback(tmp_path, "toy").to_digest == a
    assert registry.rollback(tmp_path, "toy", to=c[:8]).to_digest == c
    assert actions(tmp_path)[-3:] == [("promote", "d"), ("rollback", "a"), ("rollback", "d")]


def test_a_rollback_to_an_unknown_champion_names_the_known_ones(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    with pytest.raises(ConfigError, match=line[0].digest[:12]):
        registry.rollback(tmp_path, "toy", to="zzz")
    with pytest.raises(ConfigError, match="stands for 3 champions"):
        registry.rollback(tmp_path, "toy", to="")


def test_a_rollback_to_damaged_weights_is_refused_and_moves_nothing(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    folder = tmp_path / "registry" / "toy" / "champions" / line[1].digest[:12]
    (folder / "model.safetensors").write_text("rot")
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors"):
        registry.rollback(tmp_path, "toy")
    champion = registry.current(tmp_path, "toy")
    assert champion is not None
    assert champion.digest == line[2].digest


def test_a_verdict_must_be_about_these_weights_and_say_promote(tmp_path: Path) -> None:
    ref = weights(tmp_path / "final", "w")
    for decision, candidate in (("hold", ref.digest), ("reject", ref.digest), ("promote", "x")):
        path = verdict(tmp_path / "verdict.json", decision, candidate)  # type: ignore[arg-type]
        with pytest.raises(EvalError):
            registry.promote(tmp_path, "toy", ref, run="r", verdict_path=path)
    assert registry.current(tmp_path, "toy") is None
    path = verdict(tmp_path / "verdict.json", "promote", ref.digest)
    registry.promote(tmp_path, "toy", ref, run="r", verdict_path=path)
    assert registry.history(tmp_path, "toy")[0].verdict == str(path)


def test_damaged_weights_are_never_promoted(tmp_path: Path) -> None:
    ref = weights(tmp_path / "final", "w")
    (ref.path / "model.safetensors").write_text("rot")
    with pytest.raises(CheckpointError, match="damaged"):
        registry.promote(tmp_path, "toy", ref, run="r")
    assert not (tmp_path / "registry").exists()


def test_a_crash_between_copy_and_flip_is_finished_by_the_retry(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    ref = weights(tmp_path / "d", "d")
    copied = tmp_path / "registry" / "toy" / "champions" / ref.digest[:12]
    shutil.copytree(ref.path, copied)
    champion = registry.current(tmp_path, "toy")
    assert champion is not None
    assert champion.digest == line[2].digest
    registry.promote(tmp_path, "toy", ref, run="d")
    assert actions(tmp_path) == [("promote", run) for run in "abcd"]


def test_a_damaged_copy_left_by_a_crash_is_made_anew(tmp_path: Path) -> None:
    ref = weights(tmp_path / "d", "d")
    copied = tmp_path / "registry" / "toy" / "champions" / ref.digest[:12]
    shutil.copytree(ref.path, copied)
    (copied / "model.safetensors").write_text("rot")
    registry.promote(tmp_path, "toy", ref, run="d")
    assert (copied / "model.safetensors").read_text() == "d"


def test_a_crash_between_flip_and_history_is_repaired_by_the_next_call(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    path = tmp_path / "registry" / "toy" / "history.jsonl"
    rows = read_jsonl(path)
    path.unlink()
    append_jsonl(path, rows[:-1])
    assert actions(tmp_path) == [("promote", run) for run in "abc"]
    registry.promote(tmp_path, "toy", line[2], run="c")
    assert read_jsonl(path) == rows
    path.unlink()
    append_jsonl(path, rows[:-1])
    assert registry.rollback(tmp_path, "toy").to_digest == line[1].digest
    assert read_jsonl(path)[:3] == rows


def test_a_champion_whose_weights_are_gone_is_an_error_with_the_way_out(
    tmp_path: Path, line: list[CheckpointRef]
) -> None:
    shutil.rmtree(tmp_path / "registry" / "toy" / "champions" / line[2].digest[:12])
    with pytest.raises(CheckpointError, match="distill rollback toy --yes"):
        registry.current(tmp_path, "toy")
    assert registry.rollback(tmp_path, "toy").to_digest == line[1].digest


# -- the skills that belong to the weights ---------------------------------------------------------


@pytest.fixture
def with_bank(tmp_path: Path) -> SkillBank:
    """Three champions, each with a version of the bank `calls`; the last one is active."""
    bank = SkillBank.create(tmp_path, "calls")
    for name in "abc":
        bank.add([order_skill(name.upper(), name)])
        ref = weights(tmp_path / name, name)
        registry.promote(tmp_path, "toy", ref, run=name, bank=f"calls@{bank.snapshot()}")
    return bank


def version_of(home: Path) -> str:
    champion = registry.current(home, "toy")
    assert champion is not None
    assert champion.bank is not None
    return champion.bank


def roll_back(home: Path, *more: str) -> None:
    assert main(["rollback", "toy", "--yes", "--home", str(home), *more]) == 0


def test_a_rollback_that_was_killed_before_the_bank_moved_is_finished_by_the_next(
    tmp_path: Path, with_bank: SkillBank, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (e.bank for e in registry.history(tmp_path, "toy"))
    registry.rollback(tmp_path, "toy")
    assert version_of(tmp_path) == second
    assert f"calls@{with_bank.snapshot()}" == third
    roll_back(tmp_path)
    assert "interrupted" in capsys.readouterr().err
    assert version_of(tmp_path) == second == f"calls@{with_bank.snapshot()}"
    roll_back(tmp_path)
    assert version_of(tmp_path) == first == f"calls@{with_bank.snapshot()}"
    assert "interrupted" not in capsys.readouterr().err


def test_repeating_a_rollback_to_a_champion_takes_the_bank_there(
    tmp_path: Path, with_bank: SkillBank
) -> None:
    digest = registry.history(tmp_path, "toy")[0].to_digest
    registry.rollback(tmp_path, "toy", digest)
    roll_back(tmp_path, "--to", digest)
    ops = with_bank.history()
    roll_back(tmp_path, "--to", digest)
    assert with_bank.history() == ops
    assert version_of(tmp_path) == f"calls@{with_bank.snapshot()}"


def test_a_bank_that_a_person_moved_after_a_rollback_does_not_stop_the_next_one(
    tmp_path: Path, with_bank: SkillBank
) -> None:
    third = with_bank.snapshot()
    roll_back(tmp_path)
    with_bank.rollback(third, actor="somebody")
    roll_back(tmp_path)
    first = registry.history(tmp_path, "toy")[0]
    assert version_of(tmp_path) == first.bank == f"calls@{with_bank.snapshot()}"
