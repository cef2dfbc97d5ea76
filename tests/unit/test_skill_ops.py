"""The log explains every version; life-cycle rules; finding repeats."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError, DistillError, SkillBankError
from distill.rundir import read_jsonl
from skills.bank import SkillBank
from skills.change import Change
from skills.check import verify
from skills.dedup import find_duplicates, ratio, text_of, turns_around
from skills.intake import AddOptions
from skills.items import Credit, Evidence, Safety, SkillItem
from skills.lifecycle import (
    Thresholds,
    Use,
    credited,
    gain,
    may_promote,
    merged,
    must_retire,
    voted,
)
from skills.ops import committed, cut_uncommitted, read_ops, replay

WORDS = [
    *("open", "close", "heat", "cool", "carry", "place", "look", "under", "lamp", "desk"),
    *("drawer", "fridge", "sink", "wash", "knife", "apple", "bread", "cup", "plate", "mug"),
    *("shelf", "compare", "price", "colour", "size", "before", "after", "check", "goal", "room"),
]


def sentence(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count)).capitalize() + "."


def random_skill(draw: random.Random, name: str = "") -> SkillItem:
    return SkillItem(
        id=name,
        title=sentence(draw, 3),
        principle=sentence(draw, 12),
        category=draw.choice(("kitchen", "shop", "garden")),
        evidence=(Evidence(traj_id=f"t{draw.randrange(40)}", outcome="success"),),
        credit=Credit(utility=round(draw.random(), 3)),
        safety=Safety(risk=draw.choice((1, 1, 2, 4))),
    )


def some(draw: random.Random, change: Change, *statuses: Any) -> str:
    names = [item.id for item in change.items(*statuses)]
    return draw.choice(names) if names else "nobody"


def actions(draw: random.Random, texts: list[SkillItem]) -> list[Callable[[Change], Any]]:
    """Things that can be done to a bank; some are refused, and that must leave it whole too."""
    return [
        lambda c: c.add([random_skill(draw) for _ in range(draw.randrange(1, 4))]),
        lambda c: c.add([draw.choice(texts)], AddOptions(dedup=draw.random() < 0.5)),
        lambda c: c.edit(replace(c.get(some(draw, c)), body=sentence(draw, 6))),
        lambda c: c.edit(replace(draw.choice(texts), id=some(draw, c))),
        lambda c: c.agree(some(draw, c), [Evidence(traj_id="new", outcome="failure")]),
        lambda c: c.merge(some(draw, c, "candidate", "active"), [some(draw, c, "candidate")]),
        lambda c: c.vote_down(some(draw, c)),
        lambda c: c.remove(some(draw, c), reason="test"),
        lambda c: c.retire(some(draw, c), reason="test"),
        lambda c: c.restore(some(draw, c, "retired", "quarantined"), reason="test"),
        lambda c: c.set_status(some(draw, c), draw.choice(("active", "quarantined"))),
        lambda c: c.pin(some(draw, c), pinned=draw.random() < 0.7),
        lambda c: c.credit(
            [Use(skill=some(draw, c), success=draw.random() < 0.5, num_without=1) for _ in "ab"]
        ),
        lambda c: c.dedupe(),
        lambda c: c.judge(),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_the_log_reproduces_every_version_and_no_retired_text_returns(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    texts = [random_skill(draw, f"x{n}") for n in range(12)]
    bank = SkillBank.create(tmp_path, "main", capacity=15)
    bank.add(texts[:8])
    retired: set[str] = set()
    for _ in range(15):
        # What is refused must leave the bank, and the change around it, whole.
        with bank.change(actor="random") as change:
            if draw.random() < 0.2:
                known = [str(op.version) for op in bank.history() if op.op == "ACTIVATE"]
                with contextlib.suppress(DistillError):
                    bank.undo(change, draw.choice(known) if draw.random() < 0.7 else None)
            for act in draw.choices(actions(draw, texts), k=draw.randrange(1, 5)):
                with contextlib.suppress(DistillError):
                    act(change)
        restored = {str(op.content) for op in bank.history() if op.op == "RESTORE"}
        version, items = bank.version(), bank.items()
        assert set(version.tombstones) >= retired - restored
        retired |= set(version.tombstones)
        alive = {item.sha256 for item in items if item.status != "retired"}
        assert alive & set(version.tombstones) == set()
        known = alive | set(version.tombstones)
        assert all(item.sha256 in known for item in items)
    stored = {p.stem: p.read_bytes() for p in (bank.path / "versions").iterdir()}
    replayed = {op.version: version for op, version in replay(bank.store, bank.history())}
    assert {name: version.encode() for name, version in replayed.items()} == stored
    assert bank.history()[-1].version == bank.snapshot()
    assert verify(bank.store).problems == ()
    assert len(stored) > 4
    kinds = {op.op for op in bank.history()}
    assert {"ADD", "ACTIVATE"} < kinds
    assert len(kinds) > 6


def test_every_line_names_who_when_what_and_why(tmp_path: Path) -> None:
    bank = SkillBank.create(tmp_path, "main", actor="me")
    draw = random.Random(0)
    bank.add([random_skill(draw, "a")], actor="night", reason="from run 7")
    init, add, activate = read_jsonl(bank.store.ops_path)
    assert [line["seq"] for line in (init, add, activate)] == [1, 2, 3]
    assert (add["actor"], add["op"], add["item"]) == ("night", "ADD", "a")
    assert add["reason"] == "from run 7"
    assert add["after"] == bank.rows()[0].item
    assert "before" not in add
    assert activate["previous"] == init["version"]
    assert activate["version"] == bank.snapshot()
    assert all(line["at"].endswith("+00:00") for line in (init, add, activate))


def test_a_line_that_does_not_follow_is_an_error_with_its_number(tmp_path: Path) -> None:
    bank = SkillBank.create(tmp_path, "main")
    draw = random.Random(0)
    for name in "abc":
        bank.add([random_skill(draw, name)])
    lines = bank.store.ops_path.read_text().splitlines(keepends=True)
    bank.store.ops_path.write_text("".join(lines[:1] + lines[3:]))
    found = list(replay(bank.store, read_ops(bank.store.ops_path)))
    assert all(version.id != op.version for op, version in found[1:])
    assert "should lead to" in verify(bank.store).problems[0].text
    bank.store.ops_path.write_text("".join([*lines[:3], "{broken\n", *lines[3:]]))
    with pytest.raises(SkillBankError, match="line 4 is not a line of an ops log"):
        bank.history()


def test_the_log_may_be_cut_anywhere_in_its_last_change(tmp_path: Path) -> None:
    bank = SkillBank.create(tmp_path, "main")
    draw = random.Random(0)
    bank.add([random_skill(draw, "a")])
    end, before = committed(bank.store.ops_path)
    bank.add([random_skill(draw, "b"), random_skill(draw, "c")])
    data = bank.store.ops_path.read_bytes()
    for size in range(end, len(data)):
        bank.store.ops_path.write_bytes(data[:size])
        assert committed(bank.store.ops_path) == (end, before)
        assert [op.item for op in bank.history()] == ["", "a", ""]
    dropped, last = cut_uncommitted(bank.store.ops_path)
    assert (dropped, last) == (len(data) - 1 - end, before)
    assert bank.store.ops_path.read_bytes() == data[:end]
    bank.recover()
    assert [row.id for row in bank.rows()] == ["a"]
    assert verify(bank.store).problems == ()
    bank.store.ops_path.write_bytes(b"")
    with pytest.raises(SkillBankError, match="names no version"):
        bank.recover()


def test_a_long_unfinished_change_is_found_from_the_end(tmp_path: Path) -> None:
    bank = SkillBank.create(tmp_path, "main")
    line = (
        b'{"seq": 2, "at": "t", "actor": "a", "op": "REMOVE", "item": "\\"op\\": \\"ACTIVATE\\""}\n'
    )
    with bank.store.ops_path.open("ab") as file:
        file.write(line * 5000)
    assert len(bank.history()) == 1
    bank.recover()
    assert len(bank.store.ops_path.read_bytes().splitlines()) == 1


def skill(**fields: Any) -> SkillItem:
    return SkillItem(**({"id": "s", "title": "T", "principle": "Do it."} | fields))


def test_the_moving_average_of_the_spec() -> None:
    use = Use(skill="s", success=True, credit=0.25)
    assert credited(skill(), use, Thresholds()).credit.utility == pytest.approx(0.45, abs=1e-9)


def test_saved_tokens_are_a_mean_over_uses() -> None:
    item = skill()
    for saved in (10.0, 20.0, 60.0):
        item = credited(item, Use(skill="s", success=True, tokens_saved=saved), Thresholds())
    assert item.credit.tokens_saved == pytest.approx(30.0)


def test_the_counters_of_expel() -> None:
    votes = voted(0, "ADD")
    assert votes == 2
    votes = voted(votes, "AGREE")
    votes = voted(votes, "EDIT")
    assert votes == 4
    assert (voted(votes, "REMOVE"), voted(votes, "REMOVE", full=True)) == (3, 1)
    assert voted(voted(0, "ADD"), "REMOVE", full=True) == -1


def test_a_rule_that_is_voted_down_is_deleted_at_zero_and_at_once_in_a_full_bank(
    tmp_path: Path,
) -> None:
    for capacity, expected in ((0, [False, True]), (1, [True])):
        bank = SkillBank.create(tmp_path, f"b{capacity}", capacity=capacity)
        bank.add([skill()])
        found = []
        while bank.rows():
            with bank.change() as change:
                found.append(change.vote_down("s"))
        assert found == expected
        assert verify(bank.store).problems == ()


def test_merging_weights_utility_by_uses_and_unites_the_rest() -> None:
    seen = [Evidence(traj_id=f"t{n}", outcome="success") for n in range(3)]
    left = skill(
        credit=Credit(utility=0.8, num_used=3, num_success=2, gain_low=0.1),
        evidence=seen[:2],
        safety=Safety(risk=2),
    )
    right = skill(
        id="other",
        title="Other",
        credit=Credit(utility=0.4, num_used=1),
        evidence=seen[1:],
        safety=Safety(risk=4, num_harm=1),
        pinned=True,
    )
    both = merged(left, right)
    assert both.credit.utility == pytest.approx(0.7)
    assert (both.credit.num_used, both.credit.num_success) == (4, 2)
    assert both.credit.gain_low is None
    assert both.evidence == tuple(seen)
    assert both.lineage.parents == (left.sha256, right.sha256)
    assert (both.lineage.op, both.pinned) == ("MERGE", True)
    assert (both.safety.risk, both.safety.num_harm) == (4, 1)
    assert (both.id, both.title, both.sha256) == ("s", "T", left.sha256)
    unused = merged(skill(credit=Credit(utility=0.2)), skill(credit=Credit(utility=0.6)))
    assert unused.credit.utility == pytest.approx(0.4)


def candidate(**credit: Any) -> SkillItem:
    values = {"num_used": 16, "num_success": 12, "num_without": 16, "num_success_without": 8}
    evidence = tuple(Evidence(traj_id=f"t{n}", outcome="success") for n in range(2))
    return skill(evidence=evidence, credit=Credit(**({"gain_low": 0.0} | values | credit)))


@pytest.mark.parametrize(
    ("item", "missing"),
    [
        (candidate(), None),
        (candidate(gain_low=-0.019), None),
        (candidate(gain_low=-0.02), "lower bound"),
        (candidate(gain_low=None), "lower bound"),
        (candidate(num_success=8), "no gain"),
        (candidate(num_without=15), "15 of 16"),
        (candidate(num_used=0, num_success=0), "0 of 16"),
        (replace(candidate(), evidence=candidate().evidence[:1]), "seen in 1 of 2"),
        (replace(candidate(), status="active"), "it is active"),
    ],
)
def test_a_candidate_is_promoted_only_for_a_measured_gain(
    item: SkillItem, missing: str | None
) -> None:
    found = may_promote(item, Thresholds())
    assert found is None if missing is None else missing in str(found)


def test_the_gain_is_the_difference_of_two_rates() -> None:
    assert gain(candidate().credit) == pytest.approx(0.25)
    assert gain(Credit()) is None


@pytest.mark.parametrize(
    ("item", "retires"),
    [
        (skill(safety=Safety(num_harm=1)), False),
        (skill(safety=Safety(num_harm=2)), True),
        (skill(credit=Credit(utility=0.2, num_used=19)), False),
        (skill(credit=Credit(utility=0.2, num_used=20)), True),
        (skill(credit=Credit(utility=0.25, num_used=20)), False),
    ],
)
def test_a_harmful_or_useless_skill_is_retired(item: SkillItem, retires: bool) -> None:
    assert (must_retire(item, Thresholds()) is not None) == retires


def test_judging_promotes_and_retires_and_says_why(tmp_path: Path) -> None:
    bank = SkillBank.create(tmp_path, "main")
    bad = skill(id="bad", title="Bad", principle="Leave.", safety=Safety(num_harm=2))
    bank.add([replace(candidate(), id="good"), bad, skill(id="new", principle="Walk about.")])
    with bank.change() as change:
        done = change.judge()
    assert done == {"good": "promoted: measured gain", "bad": "retired: 2 harm events"}
    assert [row.status for row in bank.rows()] == ["active", "retired", "candidate"]


# -- repeats --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "how"),
    [
        ("Open the fridge first.", "open  the FRIDGE first.", "content"),
        ("Open the fridge and take the apple.", "Open the fridge and take the apples!", "lexical"),
        ("Always open the fridge door.", "Never open the fridge door.", None),
        ("Cook it for 10 minutes in the oven.", "Cook it for 40 minutes in the oven.", None),
        ("Wash it before heating the pan.", "Wash it after heating the pan.", None),
        ("Open the fridge and take the apple.", "Look under the desk lamp for it.", None),
    ],
)
def test_what_counts_as_a_repeat(left: str, right: str, how: str | None) -> None:
    (match,) = find_duplicates([skill(principle=left)], [skill(id="x", principle=right)])
    assert (match.how if match else None) == how


def test_the_same_words_under_another_category_or_environment_are_another_skill() -> None:
    from skills.items import Scope

    others = [skill(category="shop"), skill(scope=Scope(env="other"))]
    assert find_duplicates([skill()], others) == [None, None]
    (match,) = find_duplicates([skill()], [skill(kind="workflow")])
    assert match is not None
    assert match.how == "text"


def test_long_texts_are_compared_by_words() -> None:
    draw = random.Random(0)
    body = sentence(draw, 400)
    near = body.replace("apple", "pear", 3)
    (match,) = find_duplicates([skill(body=body)], [skill(body=near)])
    assert match is not None
    assert match.score == pytest.approx(ratio(text_of(skill(body=body)), text_of(skill(body=near))))


def test_nothing_is_overlooked_that_comparing_all_pairs_would_find() -> None:
    draw = random.Random(3)
    old = [random_skill(draw, f"o{n}") for n in range(150)]
    new = []
    for n in range(60):
        words = old[draw.randrange(150)].principle.split()
        for _ in range(n % 4):
            words[draw.randrange(len(words))] = draw.choice(WORDS)
        new.append(replace(old[draw.randrange(150)], id=f"n{n}", principle=" ".join(words)))
    new = [replace(item, title=old[n].title) for n, item in enumerate(new)]
    found = find_duplicates(old, new)
    for n, item in enumerate(new):
        best = 0.0
        for other in [*old, *new[:n]]:
            left, right = text_of(other), text_of(item)
            if other.category == item.category and not turns_around(left, right):
                best = max(best, ratio(left, right))
        match = found[n]
        assert (match is not None) == (best > 0.85), (n, best)


def test_dedupe_keeps_the_text_of_the_better_one(tmp_path: Path) -> None:
    bank = SkillBank.create(tmp_path, "main")
    texts = ["Open the fridge and take an apple.", "Open the fridge and take an apple now."]
    low = skill(id="low", principle=texts[0], credit=Credit(utility=0.3))
    high = skill(id="high", principle=texts[1], credit=Credit(utility=0.7))
    bank.add([low, high, skill(id="other", principle="Walk about.")], AddOptions(dedup=False))
    with bank.change(dry_run=True) as change:
        assert len(change.dedupe()) == 1
    assert len(bank.rows()) == 3
    with bank.change() as change:
        ((gone, into, how),) = change.dedupe()
    assert (gone, into) == ("low", "high")
    assert how.startswith("lexical 0.9")
    assert bank.get("high").principle == texts[1]
    assert bank.get("high").credit.utility == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="with itself"), bank.change() as change:
        change.merge("high", ["high"])
