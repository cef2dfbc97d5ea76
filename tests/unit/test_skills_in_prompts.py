"""Skills in what is read: the block of an acting prompt, and the views of hindsight, id by id."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path

import pytest

from distill.asking import require_same_ids
from distill.errors import AlignmentError
from distill.models import char_tokenizer
from distill.notes import contexts_of
from distill.rollout import TurnRules
from distill.sections import SkillsSection
from distill.tokens import Chat
from distill.types import Rollout, Task, TeacherView
from evals.envs.table import Jsonl
from flows.acting import SkillPrompts, first_of, render_options
from flows.cli import main
from flows.skills_showing import retriever_of
from helpers import make_rollout
from skill_nights import CHAT, WORLD, active_bank, order_skill, right_order, scripted_act
from skills.hindsight.analysts import written
from skills.hindsight.episodes import episodes_of
from skills.hindsight.rule_analyst import RuleAnalyst
from skills.hindsight.to_items import category_of
from skills.items import SkillItem
from teachers.skill_view import WithSkill

TRAIN = [WORLD.tasks("train")[i] for i in range(8)]
BY_ID = {t.id: t for t in TRAIN}
SHAPES = {
    "one row per turn": TurnRules(max_turns=4, rows="turns"),
    "one row per turn, short history": TurnRules(max_turns=4, rows="turns", history=1),
    "rewritten history": TurnRules(max_turns=4, history=2),
    "one row per conversation": TurnRules(max_turns=4),
}


def act(rules: TurnRules) -> list[Rollout]:
    return scripted_act(2, rules)[0](TRAIN, "k")


def seen(rows: list[Rollout], scope: str) -> list[TeacherView | None]:
    """What the teacher reads of rows that were analysed by rules."""
    episodes = episodes_of(rows, BY_ID.__getitem__, CHAT.decode)
    assert len(episodes) == len(TRAIN) * 2
    notes = written(RuleAnalyst(), episodes, 1)
    view = WithSkill(chat=CHAT, task_of=BY_ID.__getitem__, max_length=96, scope=scope)
    return view.build(rows, contexts_of(notes))


def trained(rollout: Rollout) -> list[int]:
    return [t for t, m in zip(rollout.token_ids, rollout.completion_mask, strict=True) if m]


@pytest.mark.parametrize("scope", ["episode", "step", "episode_step"])
@pytest.mark.parametrize("rules", SHAPES.values(), ids=SHAPES.keys())
def test_a_view_with_a_skill_holds_the_very_ids_that_the_student_sampled(rules, scope):
    rows = act(rules)
    views = seen(rows, scope)
    assert any(view is not None for view in views)
    for row, view in zip(rows, views, strict=True):
        if view is None:
            assert scope == "step"
            continue
        require_same_ids(row, view)
        assert [view.token_ids[p] for p in view.positions] == trained(row)
        # What follows the first word of the student is the row itself, whoever said it.
        first = row.completion_mask.index(True)
        assert view.token_ids[view.positions[0] :] == row.token_ids[first:]
        assert "[" in CHAT.decode(view.token_ids[: view.positions[0]])
        assert "[" not in CHAT.decode(row.token_ids[:first])


def test_a_view_of_other_ids_is_refused():
    rows = act(SHAPES["one row per turn"])
    view = seen(rows, "episode")[0]
    assert view is not None
    other = replace(view, token_ids=(*view.token_ids[:-1], view.token_ids[-1] + 1))
    with pytest.raises(AlignmentError, match="a view must copy the ids, never encode text"):
        require_same_ids(rows[0], other)


# -- the acting prompt ----------------------------------------------------------------------------

TEXT = Chat(
    char_tokenizer("_$^" + "".join(c for c in string.printable if c not in "_$^")), max_length=4000
)
SKILLS = (
    SkillItem(id="gen_001", title="Look first", principle="Read it all.", level="general"),
    SkillItem(id="add_001", title="Carry", category="add", principle="Carry the one <s> over."),
    SkillItem(id="sub_001", title="Borrow", category="sub", principle="Borrow from the left."),
    SkillItem(
        id="mis_001",
        title="Too fast",
        kind="mistake",
        principle="Answer too fast.",
        avoid="Guessing.",
    ),
)


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    rows = [
        {"question": f"What is {i} {sign} 1?", "gold": str(i), "topic": topic}
        for i in range(30)
        for sign, topic in (("+", "add"), ("-", "sub"))
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = {"prompt": "question", "answer": "gold", "domain": "topic"}
    return list(Jsonl(path=str(path), columns=columns, grader="number").tasks("train"))


@pytest.fixture
def prompts(tmp_path: Path) -> SkillPrompts:
    bank = active_bank(tmp_path, "main", *SKILLS)
    options = render_options(TEXT, SkillsSection().max_chars)
    return SkillPrompts(retriever=retriever_of(bank), chat=TEXT, options=options)


def test_retrieve_prints_exactly_the_block_that_the_student_reads(tasks, prompts, tmp_path, capsys):
    TEXT.tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert {t.domain for t in tasks} == {"add", "sub"}
    for task in (next(t for t in tasks if t.domain == d) for d in ("add", "sub")):
        (shown,) = prompts.show([task]).tasks
        goal = task.prompt[-1].content
        words = ["--category", category_of(task), "--render", "--home", str(tmp_path)]
        words += ["--tokenizer", str(tmp_path / "tokenizer")]
        assert main(["skills", "retrieve", goal, *words]) == 0
        block = capsys.readouterr().out.removesuffix("\n")
        assert shown.prompt[-1].content == f"{goal}\n\n{block}"
        assert ("Carry" in block, "Borrow" in block) == (task.domain == "add", task.domain == "sub")


def test_rows_name_the_skills_that_stood_in_their_prompts(tasks, prompts):
    shown = prompts.show(tasks)
    assert shown.num_chars == sum(
        len(a.prompt[-1].content) - len(b.prompt[-1].content) - 2
        for a, b in zip(shown.tasks, tasks, strict=True)
    )
    for task in tasks:
        kind = f"{task.domain}_001"
        assert set(shown.skills[task.id]) == {"gen_001", kind, "mis_001"}
    assert [t.id for t in shown.tasks] == [t.id for t in tasks]
    assert all(a.answer == b.answer for a, b in zip(shown.tasks, tasks, strict=True))


def test_without_an_active_skill_a_prompt_stays_as_it_is(tasks, tmp_path):
    bank = active_bank(tmp_path, "main", SKILLS[1])
    found = SkillPrompts(retriever=retriever_of(bank), chat=TEXT).show(tasks)
    for task, shown in zip(tasks, found.tasks, strict=True):
        assert (shown == task) == (task.domain == "sub")
    rows = [make_rollout([1], [2], name=task.id, domain=task.domain) for task in tasks]
    assert {r.domain: r.skill_ids for r in found.mark(rows)} == {"add": ("add_001",), "sub": ()}


def test_a_layout_of_the_task_shows_the_first_skill_alone(tmp_path):
    bank = active_bank(
        tmp_path,
        "main",
        SkillItem(id="gen_001", title="Any", principle="ab", level="general"),
        order_skill("K", right_order("K"), id="k_001"),
    )
    prompts = SkillPrompts(retriever=retriever_of(bank), chat=CHAT)
    shown = prompts.show(TRAIN)
    for task, own in zip(TRAIN, shown.tasks, strict=True):
        text = right_order("K") if task.meta["key"] == "K" else "ab"
        expected = task.prompt[-1].content.replace(":", f"[{text}]:", 1)
        assert own.prompt[-1].content == expected
        assert shown.skills[task.id] == (("k_001",) if task.meta["key"] == "K" else ("gen_001",))
        (found,) = prompts.retriever.retrieve([""], category=category_of(task))
        assert (best := first_of(found)) is not None
        assert best.id == shown.skills[task.id][0]


def test_the_bank_s_version_decides_what_is_shown(tmp_path):
    bank = active_bank(tmp_path, "main", order_skill("K", "ab", id="k_001"))
    old = bank.snapshot()
    with bank.change() as change:
        change.retire("k_001", reason="wrong")
    tasks = [t for t in TRAIN if t.meta["key"] == "K"]
    assert tasks
    for version, shows in ((old, True), (None, False)):
        found = SkillPrompts(retriever=retriever_of(bank, version=version), chat=CHAT).show(tasks)
        assert all(bool(found.skills[t.id]) == shows for t in tasks)
