"""Labels from which a policy learns to be its own analyst."""

from __future__ import annotations

import json
import random

import pytest

from distill.errors import DataError
from distill.types import task_id
from distill.worked import demonstrate
from helpers import make_chat
from hindsight_parts import SKILL, make_episode, make_note, make_task
from skills.hindsight.episodes import Step
from skills.hindsight.labels import label_tasks, require_learnable, write_label
from skills.hindsight.parse import ReplyRules, parse_note
from skills.hindsight.prompting import PromptOptions, first_prompt

SEED = ReplyRules()
OPID = ReplyRules(max_step_skills=2)
SLOT = ReplyRules(format="slot", min_words=1)


def world(name, reply, outcome="success"):
    task = make_task(
        name, prompt="k=", meta={"views": {"analyst": f"{name}={{attempt}}:{{outcome}}"}}
    )
    return make_episode(
        name, outcome, task=task, steps=(Step(observation="", response=reply),), ending=""
    )


def test_a_label_task_asks_the_analysts_question_and_knows_a_good_answer():
    episode = make_episode()
    note = make_note(episode_summary="Fine.", step_skills={1: SKILL, 0: SKILL, 2: SKILL})
    labels = label_tasks([episode], [note], OPID)
    (task,) = labels.tasks
    assert task.prompt == first_prompt(episode, OPID, PromptOptions()).messages
    assert task.id == task_id("plant", task.prompt)
    assert (task.domain, task.split, task.answer) == ("analyst", "train", None)
    assert json.loads(task.meta["solution"]) == {
        "episode_summary": "Fine.",
        "episode_skill": SKILL,
        "step_skills": {"0": SKILL, "1": SKILL},
    }
    assert labels.left_out == {}


def test_labels_of_the_slot_format_become_rows_of_the_sft_objective():
    chat = make_chat()
    episodes = [world("a", "x"), world("b", "y", "failure")]
    notes = [
        make_note("a", episode_skill="dac"),
        make_note("b", "failure", status="empty", episode_skill=""),
    ]
    options = PromptOptions(success="1", failure="0")
    labels = label_tasks(episodes, notes, SLOT, options, domain="d", keep_empty=True)
    assert [t.meta["solution"] for t in labels.tasks] == ["[dac]", "[]"]
    assert [t.prompt[0].content for t in labels.tasks] == ["a=x:1", "b=y:0"]
    # The tokenizer of the tests has no brackets; the prompt is what matters here.
    plain = [
        make_task(t.id, prompt=t.prompt[0].content, meta={"solution": "dac"}) for t in labels.tasks
    ]
    rows = demonstrate(plain, chat, key="k")
    assert [r.num_trained for r in rows] == [4, 4]
    assert label_tasks(episodes, notes, SLOT, options).left_out == {"empty": 1}


@pytest.mark.parametrize("status", ["skipped", "invalid", "leaked", "unsafe", "failed", "empty"])
def test_only_valid_notes_are_learnt(status):
    labels = label_tasks([make_episode()], [make_note(status=status, episode_skill="")], SEED)
    assert labels.tasks == ()
    assert labels.left_out == {status: 1}


def test_a_label_that_its_own_rules_would_refuse_is_left_out():
    notes = [make_note("a", episode_skill="Too short."), make_note("b", episode_skill="a]b")]
    assert label_tasks([make_episode()], notes[:1], SEED).left_out == {"unreadable": 1}
    assert label_tasks([world("b", "x")], notes[1:], SLOT).left_out == {"unreadable": 1}


def test_the_same_question_is_asked_once():
    episodes = [world("a", "x"), world("a", "x"), world("a", "y")]
    notes = [make_note("a", episode_skill="dac")] * 3
    labels = label_tasks(episodes, notes, SLOT)
    assert len(labels.tasks) == 2
    assert labels.left_out == {"repeated": 1}


@pytest.mark.parametrize("split", ["gate", "test"])
def test_tasks_that_judge_never_teach(split):
    episode = make_episode(task=make_task(split=split))
    with pytest.raises(DataError, match="may teach"):
        label_tasks([episode], [make_note()], SEED)
    require_learnable([make_episode(task=make_task(split="evolve"))])


def test_a_note_beside_another_episode_is_refused():
    with pytest.raises(DataError, match="in the same order"):
        label_tasks([make_episode("a")], [make_note("b")], SEED)


def test_what_is_written_as_a_label_is_read_back_as_the_same_note():
    rng = random.Random(1)
    signs = 'abc "\\{}[],:\n\t\u00e9\u4e2d`'
    for _ in range(200):
        skill = "word " * 5 + "".join(rng.choice(signs) for _ in range(30)) + "."
        steps = {
            i: f"five words for step {i} {rng.choice(signs)}." for i in rng.sample(range(6), 2)
        }
        note = make_note(episode_skill=skill, step_skills=dict(sorted(steps.items())))
        parsed = parse_note(write_label(note, OPID), 6, OPID)
        assert parsed.status == "ok"
        assert parsed.episode_skill == note.episode_skill
        assert parsed.step_skills == note.step_skills
