"""What notes must not hold, and whether they are right."""

from __future__ import annotations

import json
import time

import pytest

from distill.errors import ConfigError, DataError
from hindsight_parts import SKILL, make_episode, make_note, make_task
from skills.hindsight.analysts import Checked
from skills.hindsight.checks import CheckRules, check_note, is_correct, leaks, secrets_of
from skills.hindsight.episodes import Step
from skills.hindsight.rule_analyst import RuleAnalyst
from tree import ROOT

CASES = json.loads((ROOT / "tests/data/skills_to_check.json").read_text(encoding="utf-8"))
SOLUTION = "Read the label and turn the valve to the left exactly two times until it hisses"
TASK = make_task(answer="left twice", meta={"solution": SOLUTION})
EPISODE = make_episode(task=TASK)
GOOD = "Always read what is written before you touch anything."


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Turn it left twice and wait a moment.", "it states the answer of a task"),
        ("Turn it LEFT  Twice, and wait.", "it states the answer of a task"),
        ("Turn it **l\u0435ft** twice and wait.", "it states the answer of a task"),
        ("First read the label and turn the valve to the left, then wait.", "quotes 8 or more"),
        ("Read the label, then decide how often to turn.", ""),
        (GOOD, ""),
    ],
)
def test_a_skill_that_quotes_the_answer_or_the_solution_leaks(text, found):
    assert found in leaks(text, EPISODE)
    assert bool(leaks(text, EPISODE)) == bool(found)
    note = check_note(make_note(episode_skill=text), EPISODE)
    # Letters of two alphabets in one word are unsafe before they are anything else.
    refused = "leaked" if text.isascii() else "unsafe"
    assert note.status == (refused if found else "ok")


def test_a_short_answer_leaks_only_where_it_is_called_the_answer():
    episode = make_episode(task=make_task(answer="12"))
    assert leaks("The answer is 12, as always here.", episode)
    assert not leaks("Count 12 times before you answer.", episode)


def test_a_short_solution_counts_as_an_answer():
    secrets = secrets_of([make_task(meta={"solution": "turn left"}), TASK, TASK])
    assert secrets.answers == ("turn left", "left twice")
    assert secrets.solutions == (SOLUTION,)


@pytest.mark.parametrize(
    ("step", "text", "found"),
    [
        (0, "Go on, for the label says turn it left twice here.", True),
        (1, "Go on, for the label says turn it left twice here.", True),
        (2, "Go on, for the label says turn it left twice here.", False),
        (0, "Look around: you see a blue label somewhere.", True),
        (1, "Look around: you see a blue label somewhere.", False),
        (2, "Turn on, and the valve opens with a loud hiss.", True),
        (0, "Open the valve. Look for a label with a text first.", False),
        (0, GOOD, False),
    ],
)
def test_a_skill_of_a_step_must_not_quote_what_was_seen_later(step, text, found):
    episode = make_episode()
    assert bool(leaks(text, episode, step=step)) == found
    assert not leaks(text, episode)
    note = check_note(make_note(step_skills={step: text}), episode)
    assert (note.status, note.episode_skill) == ("ok", SKILL)
    assert (step in note.step_skills) != found
    assert (f"step {step}: it quotes" in note.reason) == found


def test_feedback_counts_as_seen_later_and_the_prompt_as_known():
    text = "Check that the pressure is above nine bar at once."
    told = "The pressure is above nine bar at once"
    assert leaks(text, make_episode(feedback=told), step=2)
    known = make_episode(feedback=told, task=make_task(prompt=f"Note: {told}."))
    assert not leaks(text, known, step=2)


def test_what_is_seen_twice_is_known_from_the_first_time_on():
    said = "The pump is silent now"
    steps = [Step(observation=o, response="wait") for o in ("Go.", said, said, said)]
    text = "Act when the pump is silent now, and never before."
    found = [bool(leaks(text, make_episode(steps=tuple(steps)), step=step)) for step in range(4)]
    assert found == [True, False, False, False]


def test_a_longer_ngram_finds_less():
    episode = make_episode(feedback="one two three four five six seven eight nine ten")
    text = "say one two three four five six and stop"
    assert not leaks(text, episode, step=0)
    assert leaks(text, episode, step=0, ngram=6)


def test_observations_that_repeat_themselves_cost_no_more_than_others():
    seen = " ".join(["a b"] * 2000)
    steps = tuple(Step(observation=seen, response="look", state=str(i)) for i in range(20))
    skill = " ".join(["a a b b"] * 240)
    begun = time.perf_counter()
    note = check_note(make_note(step_skills={0: skill}), make_episode(steps=steps))
    assert time.perf_counter() - begun < 2.0  # 0.05 s; it was 10 s
    assert note.step_skills == {0: skill}


def test_words_count_as_known_only_in_the_order_in_which_they_were_read():
    steps = tuple(
        Step(observation=seen, response="look", state=str(i))
        for i, seen in enumerate(("one two three four", "four three two one, and five", "end"))
    )
    episode = make_episode(steps=steps, ending="")
    text = "Say four three two one and five."
    assert leaks(text, episode, step=0, ngram=4)
    assert not leaks(text, episode, step=1, ngram=4)
    assert not leaks("Say one two three four and five.", episode, step=0, ngram=4)


def test_a_note_of_which_only_leaking_steps_are_left_is_refused():
    note = make_note(episode_skill="", step_skills={0: "You see a blue label, so stop."})
    checked = check_note(note, make_episode())
    assert checked.status == "leaked"
    assert checked.step_skills == {}
    assert "step 0" in checked.reason


def test_the_answer_in_the_skill_of_a_step_refuses_the_whole_note():
    note = check_note(make_note(step_skills={2: "Turn it left twice."}), EPISODE)
    assert (note.status, note.episode_skill, note.step_skills) == ("leaked", "", {})


@pytest.mark.parametrize("case", CASES["malicious"], ids=lambda case: case["name"])
@pytest.mark.parametrize("where", ["episode", "step"])
def test_a_malicious_text_is_unsafe_and_nothing_of_it_is_left_to_read(case, where):
    text = "\n".join(value for key, value in case.items() if key not in ("name", "check"))
    for mark, host in (("{url}", "https:/" + "/evil.example/x"), ("{ip}", "10.20" + ".30.40")):
        text = text.replace(mark, host)
    fields = {"episode_skill": text} if where == "episode" else {"step_skills": {0: text}}
    note = check_note(make_note(**fields, raw="raw"), make_episode())
    assert note.status == "unsafe"
    assert (note.episode_skill, note.episode_summary, note.step_skills) == ("", "", {})
    assert note.reason.isascii()
    assert len(note.reason) <= 500
    assert note.raw == "raw"


@pytest.mark.parametrize("case", CASES["benign"], ids=lambda case: case["name"])
def test_a_benign_text_passes(case):
    text = "\n".join(value for key, value in case.items() if key != "name")
    assert check_note(make_note(episode_skill=text), make_episode()).status == "ok"


def test_what_passes_carries_no_markup_of_a_chat_template():
    rules = CheckRules(safety=False)
    note = check_note(
        make_note(episode_skill="Stop <|im_end|> here\u200b now"), make_episode(), rules
    )
    assert note.episode_skill == "Stop < |im_end| > here now"


@pytest.mark.parametrize("status", ["skipped", "empty", "invalid", "leaked", "unsafe", "failed"])
def test_other_notes_come_back_as_they_are(status):
    note = make_note(status=status, episode_skill="")
    assert check_note(note, make_episode()) is note


def test_checks_can_be_switched_off():
    text = "Turn it left twice and wait a moment."
    assert check_note(
        make_note(episode_skill=text), EPISODE, CheckRules(answers=False)
    ).episode_skill
    steps = {0: "Look around: you see a blue label somewhere."}
    off = CheckRules(later=False)
    assert check_note(make_note(step_skills=steps), make_episode(), off).step_skills == steps
    with pytest.raises(ConfigError):
        CheckRules(ngram=0)


# -- right or wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skill", "lesson", "right"),
    [
        ("dac", "dac", True),
        (" DAC ", "dac", True),
        ("dca", "dac", False),
        ("dac", "", None),
        ("dac", None, None),
    ],
)
def test_a_note_is_right_when_it_says_what_the_lesson_says(skill, lesson, right):
    episode = make_episode(task=make_task(meta={"lesson": lesson}))
    note = check_note(make_note(episode_skill=skill), episode)
    assert note.correct is right


def test_skills_of_steps_are_compared_with_the_lessons_of_their_states():
    task = make_task(meta={"step_lessons": {"s0": "look", "s2": "turn"}})
    episode = make_episode(task=task)
    assert (
        is_correct(make_note(episode_skill="x", step_skills={0: "look", 1: "?"}), episode) is True
    )
    assert is_correct(make_note(step_skills={0: "look", 2: "push"}), episode) is False
    assert is_correct(make_note(step_skills={1: "anything"}), episode) is None
    assert is_correct(make_note(status="invalid", step_skills={0: "look"}), episode) is None


def test_lessons_that_are_no_texts_are_refused():
    with pytest.raises(DataError, match="step_lessons"):
        is_correct(make_note(), make_episode(task=make_task(meta={"step_lessons": {"s0": 1}})))


def test_a_checked_analyst_says_whether_its_notes_are_right():
    task = make_task(meta={"lesson": "abc", "step_lessons": {"s1": "b"}})
    other = make_task("t1", meta={"lesson": "xyz", "step_lessons": {"s1": "y"}})
    episodes = [make_episode("a", task=task), make_episode("b", task=other)]
    right = Checked(RuleAnalyst()).write(episodes, step=1)
    assert [n.correct for n in right] == [True, True]
    wrong = Checked(RuleAnalyst(wrong="random")).write(episodes, step=1)
    assert [(n.correct, n.episode_skill, n.step_skills) for n in wrong] == [
        (False, "xyz", {1: "y"}),
        (False, "abc", {1: "b"}),
    ]
