"""Hindsight in the generated world of several calls: real episodes, in the grammar of its base."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from distill.engines.scripted import ScriptedEngine
from distill.models import char_tokenizer
from distill.rollout import TurnRules, collect
from distill.tokens import Chat
from distill.types import Sampling
from evals.envs.world import ALPHABET, World
from hindsight_parts import ScriptedModel
from skills.hindsight.analysts import Checked
from skills.hindsight.checks import CheckRules
from skills.hindsight.episodes import read_episodes
from skills.hindsight.model_analyst import AnalystOptions, ModelAnalyst
from skills.hindsight.parse import ReplyRules
from skills.hindsight.prompting import PromptOptions
from skills.hindsight.rate import ValidRate
from skills.hindsight.rule_analyst import RuleAnalyst

CHAT = Chat(char_tokenizer(ALPHABET), max_length=128)
WORLD = World(domains=("calls",))
TASKS = list(WORLD.tasks("train")[:12])
ATTEMPT = re.compile(r"[A-Z]\d{3}:\d=([a-e]\d>[xi]?\d=){0,3}[a-e]\d>(\+|#|#[a-e]{3}>)")
ORDER = ReplyRules(format="slot", min_words=1, slot=r"(?!.*(.).*\1)[a-e]{3}")


def act(prompt, sample):
    """The right tools where the number of the prompt is odd, else always `a`, with the last key."""
    text = CHAT.decode(prompt)
    head = text[:4]
    order = next(t.answer for t in TASKS if t.prompt[0].content.startswith(head))
    accepted = len(re.findall(r">\d=", text))
    tool = order[accepted] if key_of(head) % 2 else "a"
    key = re.findall(r"(\d)=", text)[-1]
    return CHAT.replies([tool + key])[0]


def key_of(head):
    return int(head[1:])


def episodes(rows="turns", **options):
    rules = TurnRules(max_turns=8, rows=rows, **options)
    rollouts = collect(
        TASKS,
        WORLD,
        ScriptedEngine(act),
        CHAT,
        Sampling(num_samples=1, max_new_tokens=4),
        key="k",
        turns=rules,
    )
    reading = read_episodes(rollouts, {t.id: t for t in TASKS}.__getitem__, CHAT.decode)
    assert len(reading.episodes) == len(TASKS)
    return list(reading.episodes)


def test_both_outcomes_are_there():
    assert {e.outcome for e in episodes()} == {"success", "failure"}


def test_rows_of_both_shapes_are_the_same_conversation():
    assert [e.text for e in episodes("turns")] == [e.text for e in episodes("conversation")]


@pytest.mark.parametrize("truth", ["none", "answer"])
def test_an_analyst_reads_attempts_in_the_grammar_of_its_base(truth):
    model = ScriptedModel(lambda prompt, call: "[]")
    options = AnalystOptions(rules=ORDER, prompts=PromptOptions(truth=truth))
    found = episodes()
    notes = ModelAnalyst(model, options).write(found, step=0)
    prompts = [messages[-1].content for messages in model.calls[0]]
    assert all(ATTEMPT.fullmatch(prompt) for prompt in prompts)
    for episode, prompt in zip(found, prompts, strict=True):
        assert prompt.startswith(episode.task.prompt[0].content)
        lost = "#" if truth == "none" else f"#{episode.task.answer}>"
        assert prompt.endswith(">+" if episode.outcome == "success" else f">{lost}")
    assert {n.status for n in notes} == {"empty"}


def test_the_lessons_of_the_world_are_right_and_those_of_others_are_wrong():
    found = episodes()
    notes = Checked(RuleAnalyst()).write(found, step=0)
    assert {(n.status, n.correct) for n in notes} == {("ok", True)}
    assert all(
        set(n.step_skills) == set(range(len(e.steps))) for n, e in zip(notes, found, strict=True)
    )
    for note, episode in zip(notes, found, strict=True):
        if episode.outcome == "success":
            said = [step.response[0] for step in episode.steps]
            assert [note.step_skills[i] for i in range(len(said))] == said
    wrong = Checked(RuleAnalyst(wrong="random", pool=TASKS)).write(found, step=0)
    assert {(n.status, n.correct) for n in wrong} == {("ok", False)}


def test_an_analyst_that_is_sometimes_wrong_is_readable_and_known_to_be_wrong():
    found = episodes()
    right = {e.task.prompt[0].content: e.task.answer for e in found}
    model = ScriptedModel(
        lambda prompt, call: f"[{right[prompt[:7]] if key_of(prompt[:4]) % 2 else 'abb'}]"
    )
    notes = Checked(ModelAnalyst(model, AnalystOptions(rules=ORDER))).write(found, step=0)
    odd = sum(key_of(e.task.prompt[0].content[:4]) % 2 for e in found)
    rate = ValidRate(window=len(found)).add(notes)
    assert rate.total == {"ok": odd, "invalid": len(found) - odd}
    assert rate.correct_rate == 1.0


def test_a_lesson_that_is_the_answer_passes_only_where_the_check_is_off():
    world = World(domains=("calls",), call_order=4, call_turns=5)
    (task,) = world.tasks("train")[:1]
    found = [e for e in episodes() if e.outcome == "failure"][:1]
    long = [replace(episode, task=task) for episode in found]
    assert [n.status for n in Checked(RuleAnalyst(steps=False)).write(long, step=0)] == ["leaked"]
    off = Checked(RuleAnalyst(steps=False), CheckRules(answers=False))
    assert [n.status for n in off.write(long, step=0)] == ["ok"]
