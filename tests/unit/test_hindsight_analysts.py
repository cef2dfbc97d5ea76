"""Who writes notes: rules, models, and what stands between them and the night."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from distill.errors import ConfigError, DataError, TeacherError
from distill.types import Message
from hindsight_parts import SKILL, ScriptedModel, make_episode, make_note, make_task
from skills.hindsight.analysts import Checked, Selected, is_lent, written
from skills.hindsight.episodes import Step
from skills.hindsight.model_analyst import AnalystOptions, ModelAnalyst
from skills.hindsight.parse import ReplyRules
from skills.hindsight.prompting import PromptOptions
from skills.hindsight.rate import STATUSES, ValidRate
from skills.hindsight.rule_analyst import RuleAnalyst

GOOD = json.dumps({"episode_summary": "Fine.", "episode_skill": SKILL, "step_skills": {"1": SKILL}})


class Fixed:
    """An analyst that says which episodes it was asked about."""

    def __init__(self, **notes):
        self.notes, self.asked = notes, []

    def write(self, episodes, *, step):
        self.asked.append([e.traj_id for e in episodes])
        return [
            self.notes.get(e.traj_id)
            or make_note(e.traj_id, e.outcome, episode_skill=f"skill {e.traj_id}")
            for e in episodes
        ]


# -- rules -----------------------------------------------------------------------------------------


def lessons(count, **fields):
    return [
        make_episode(
            f"e{i}",
            task=make_task(f"t{i}", meta={"lesson": f"rule{i}", "step_lessons": {"s1": f"do{i}"}}),
            **fields,
        )
        for i in range(count)
    ]


def test_the_rule_analyst_writes_the_lessons_of_the_task_and_of_known_states():
    (note,) = RuleAnalyst().write(lessons(1), step=1)
    assert (note.status, note.episode_skill, note.step_skills) == ("ok", "rule0", {1: "do0"})
    assert note.author == "rule"
    (note,) = RuleAnalyst(steps=False).write(lessons(1), step=1)
    assert note.step_skills == {}


def test_only_the_first_lessons_of_steps_are_written():
    task = make_task(meta={"step_lessons": {"s0": "a", "s1": "b", "s2": "c"}})
    (note,) = RuleAnalyst(max_step_skills=2).write([make_episode(task=task)], step=1)
    assert note.step_skills == {0: "a", 1: "b"}


def test_a_task_without_a_lesson_has_an_empty_note():
    (note,) = RuleAnalyst().write([make_episode()], step=1)
    assert (note.status, note.reason) == ("empty", "the task has no lesson")


def test_a_wrong_lesson_is_never_the_own_one_and_every_other_one_is_drawn():
    episodes = lessons(4)
    seen = Counter()
    for step in range(200):
        for i, note in enumerate(RuleAnalyst(wrong="random").write(episodes, step=step)):
            assert note.episode_skill != f"rule{i}"
            assert note.step_skills[1] != f"do{i}"
            seen[i, note.episode_skill] += 1
    assert len(seen) == 12
    assert min(seen.values()) > 40


def test_the_draw_depends_on_its_keys_only():
    episodes = lessons(5)
    analyst = RuleAnalyst(wrong="random", pool=[e.task for e in episodes])
    first = analyst.write(episodes, step=3)
    assert analyst.write(episodes[::-1], step=3) == first[::-1]
    assert analyst.write(episodes[:2], step=3) == first[:2]
    others = [
        RuleAnalyst(wrong="random", pool=analyst.pool, seed=s).write(episodes, step=3)
        for s in range(8)
    ]
    assert any(notes != first for notes in others)


def test_wrong_lessons_come_from_the_same_domain_and_from_elsewhere_only_without_one():
    own = make_task("t0", meta={"lesson": "a"})
    near = make_task("t1", meta={"lesson": "b"})
    far = make_task("t2", domain="far", meta={"lesson": "c"})
    for step in range(20):
        (note,) = RuleAnalyst(wrong="random", pool=[near, far]).write(
            [make_episode(task=own)], step=step
        )
        assert note.episode_skill == "b"
    (note,) = RuleAnalyst(wrong="random", pool=[far]).write([make_episode(task=own)], step=0)
    assert note.episode_skill == "c"


def test_without_another_lesson_there_is_no_wrong_one():
    same = [
        make_episode(n, task=make_task(n, meta={"lesson": x})) for n, x in (("a", "r"), ("b", "R"))
    ]
    notes = RuleAnalyst(wrong="random").write(same, step=1)
    assert {(n.status, n.reason) for n in notes} == {("empty", "there is no other lesson to draw")}


def test_a_control_that_is_not_known_is_refused():
    with pytest.raises(ConfigError):
        RuleAnalyst(wrong="shuffled")


# -- models ----------------------------------------------------------------------------------------

OPID = AnalystOptions(rules=ReplyRules(max_step_skills=3))


def test_all_episodes_are_asked_in_one_greedy_call_with_keys_of_their_own():
    model = ScriptedModel(lambda prompt, call: GOOD)
    episodes = [make_episode("a"), make_episode("b", "failure")]
    notes = ModelAnalyst(model, OPID, name="policy").write(episodes, step=7)
    assert [(n.traj_id, n.outcome, n.status, n.attempts) for n in notes] == [
        ("a", "success", "ok", 1),
        ("b", "failure", "ok", 1),
    ]
    assert notes[0].step_skills == {1: SKILL}
    assert notes[0].author == "policy"
    assert len({n.prompt_version for n in notes}) == 2
    (sampling,) = model.samplings
    assert sampling.temperature == 0.0
    assert sampling.keys == ("analyst/7/a/1", "analyst/7/b/1")
    assert sampling.max_new_tokens == 4096


def test_only_what_could_not_be_read_is_asked_again_with_the_reason():
    def answer(prompt, call):
        return "I would say: look." if "turn again" in prompt and call == 1 else GOOD

    steps = (Step(observation="", response="turn again"),)
    model = ScriptedModel(answer)
    episodes = [make_episode("a"), make_episode("b", steps=steps)]
    notes = ModelAnalyst(model).write(episodes, step=0)
    assert [n.attempts for n in notes] == [1, 2]
    assert [n.status for n in notes] == ["ok", "ok"]
    (again,) = model.calls[1]
    assert "could not be used: there is no JSON object" in again[-1].content
    assert "| I would say: look." in again[-1].content
    assert model.samplings[1].keys == ("analyst/0/b/2",)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_an_analyst_that_never_writes_json_is_invalid_after_its_attempts(attempts):
    model = ScriptedModel(lambda prompt, call: f"no {call}")
    (note,) = ModelAnalyst(model, AnalystOptions(attempts=attempts)).write([make_episode()], step=0)
    assert (note.status, note.attempts, note.raw) == ("invalid", attempts, f"no {attempts}")
    assert note.episode_skill == ""
    # A later question holds the first one once, not the questions in between.
    assert all(c[0][-1].content.count("You look back at") == 1 for c in model.calls)


def test_an_analyst_may_have_nothing_to_say_and_is_not_asked_again():
    model = ScriptedModel(lambda prompt, call: '{"episode_skill": ""}')
    (note,) = ModelAnalyst(model).write([make_episode()], step=0)
    assert (note.status, len(model.calls)) == ("empty", 1)


class Failing(ScriptedModel):
    def __init__(self, at, error=TeacherError):
        super().__init__(lambda prompt, call: "bad" if "| look" in prompt else GOOD)
        self.at, self.error = at, error

    def complete(self, prompts, n, sampling):
        replies = super().complete(prompts, n, sampling)
        if len(self.calls) == self.at:
            raise self.error("no answer within 5 s")
        return replies


def test_a_model_that_fails_leaves_failed_notes_and_the_night_goes_on():
    notes = ModelAnalyst(Failing(1)).write([make_episode("a"), make_episode("b")], step=0)
    assert {(n.status, n.reason, n.attempts) for n in notes} == {
        ("failed", "no answer within 5 s", 1)
    }


def test_a_model_that_fails_at_the_retry_keeps_the_notes_that_came():
    quiet = (Step(observation="", response="sit"),)
    episodes = [make_episode("a"), make_episode("b", steps=quiet)]
    notes = ModelAnalyst(Failing(2)).write(episodes, step=0)
    assert [(n.status, n.attempts) for n in notes] == [("failed", 2), ("ok", 1)]
    assert notes[0].raw == "bad"


def test_an_error_of_the_program_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        ModelAnalyst(Failing(1, ZeroDivisionError)).write([make_episode()], step=0)


def test_a_model_that_returns_another_number_of_texts_has_failed():
    model = ScriptedModel(lambda prompt, call: GOOD)
    model.complete = lambda prompts, n, sampling: [[GOOD, GOOD]]
    (note,) = ModelAnalyst(model).write([make_episode()], step=0)
    assert note.status == "failed"
    assert "one text for each of 1 prompts" in note.reason


def test_a_prompt_that_is_too_long_is_not_asked():
    model = ScriptedModel(lambda prompt, call: GOOD)
    options = AnalystOptions(max_prompt_tokens=400)
    episodes = [make_episode("a"), make_episode("b", ending="so " * 300)]
    analyst = ModelAnalyst(
        model, options, count_tokens=lambda messages: len(messages[-1].content.split())
    )
    notes = analyst.write(episodes, step=0)
    assert [n.status for n in notes] == ["ok", "failed"]
    assert "tokens, at most 400" in notes[1].reason
    assert len(model.calls[0]) == 1
    with pytest.raises(ConfigError, match="tokenizer"):
        ModelAnalyst(model, options)


def test_nobody_is_asked_without_episodes():
    model = ScriptedModel(lambda prompt, call: GOOD)
    assert ModelAnalyst(model).write([], step=0) == []
    assert model.calls == []


def test_a_small_world_is_asked_in_its_own_grammar_once():
    views = {"analyst": "K:={attempt}>{outcome}", "analyst_truth": "K:={attempt}>{outcome}{truth}>"}
    task = make_task(prompt="K:=", answer="dac", meta={"views": views, "lesson": "dac"})
    steps = (Step(observation="", response="d7"),)
    model = ScriptedModel(
        lambda prompt, call: {"K:=d7>+": "[dac]", "K:=d7>#": "[]", "K:=d7>#dac>": "[cad]"}[prompt]
    )
    rules = ReplyRules(format="slot", min_words=1, slot="[a-e]{3}")
    bare = AnalystOptions(rules=rules)
    shown = AnalystOptions(rules=rules, prompts=PromptOptions(truth="answer"))
    won, lost = (make_episode(o, o, task=task, steps=steps) for o in ("success", "failure"))
    notes = Checked(ModelAnalyst(model, bare)).write([won, lost], step=0)
    assert [(n.status, n.episode_skill, n.correct) for n in notes] == [
        ("ok", "dac", True),
        ("empty", "", None),
    ]
    notes = Checked(ModelAnalyst(model, shown)).write([won, lost], step=0)
    assert [(n.status, n.episode_skill, n.correct) for n in notes] == [
        ("ok", "dac", True),
        ("ok", "cad", False),
    ]
    broken = ScriptedModel(lambda prompt, call: "dac")
    (note,) = ModelAnalyst(broken, bare).write([won], step=0)
    assert (note.status, note.attempts, len(broken.calls)) == ("invalid", 1, 1)
    assert broken.calls == [[(Message(role="user", content="K:=d7>+"),)]]


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"max_tokens": 0}, {"max_prompt_tokens": -1}])
def test_options_that_make_no_sense_are_refused(fields):
    with pytest.raises(ConfigError):
        AnalystOptions(**fields)


# -- who gets a note -------------------------------------------------------------------------------

GROUP = [
    make_episode("f1", "failure"),
    make_episode("s1", "success"),
    make_episode("u1", "unknown"),
    make_episode("s2", "success"),
    make_episode("f2", "failure", group_id="h"),
    make_episode("s3", "success", group_id="i"),
]


@pytest.mark.parametrize(
    ("outcomes", "asked"),
    [
        ("all", ["f1", "s1", "u1", "s2", "f2", "s3"]),
        ("success", ["s1", "s2", "s3"]),
        ("failure", ["f1", "f2"]),
    ],
)
def test_only_episodes_of_the_chosen_outcome_are_asked_about(outcomes, asked):
    inner = Fixed()
    notes = Selected(inner, outcomes=outcomes).write(GROUP, step=0)
    assert inner.asked == [asked]
    assert [n.traj_id for n in notes] == [e.traj_id for e in GROUP]
    assert [n.traj_id for n in notes if n.status == "ok"] == asked
    assert {n.status for n in notes} <= {"ok", "skipped"}


def test_failures_borrow_the_skill_of_the_first_success_that_has_one():
    inner = Fixed(s1=make_note("s1", status="invalid", episode_skill=""))
    notes = {n.traj_id: n for n in Selected(inner, lend=True).write(GROUP, step=0)}
    assert inner.asked == [["s1", "u1", "s2", "s3"]]
    assert (notes["f1"].status, notes["f1"].episode_skill) == ("ok", "skill s2")
    assert (notes["f1"].outcome, notes["f1"].reason) == ("failure", "lent by s2")
    assert is_lent(notes["f1"])
    assert not is_lent(notes["s2"])
    assert notes["f2"].status == "skipped"
    assert notes["s1"].status == "invalid"


def test_lent_to_failures_alone_no_success_keeps_its_note_and_lonely_ones_are_not_asked():
    inner = Fixed(s1=make_note("s1", step_skills={1: SKILL}, attempts=2, raw="long"))
    notes = Selected(inner, outcomes="failure", lend=True).write(GROUP, step=0)
    assert inner.asked == [["s1", "s2"]]
    assert [n.status for n in notes] == ["ok", *["skipped"] * 5]
    assert notes[0].episode_skill == SKILL
    assert notes[0].step_skills == {}
    # What was copied has cost nothing.
    assert (notes[0].attempts, notes[0].raw) == (0, "")


def test_lending_without_a_borrower_is_refused():
    with pytest.raises(ConfigError, match="failures get notes"):
        Selected(Fixed(), outcomes="success", lend=True)
    with pytest.raises(ConfigError):
        Selected(Fixed(), outcomes="none")


def test_an_analyst_that_mixes_up_its_episodes_is_found_out():
    class Reversed(Fixed):
        def write(self, episodes, *, step):
            return super().write(episodes, step=step)[::-1]

    with pytest.raises(TeacherError, match="in their order"):
        written(Reversed(), GROUP, 0)
    with pytest.raises(TeacherError):
        Checked(Reversed()).write(GROUP, step=0)


# -- the rate --------------------------------------------------------------------------------------


def notes_of(**counts):
    return [
        make_note(f"{status}{i}", status=status, episode_skill="")
        for status, count in counts.items()
        for i in range(count)
    ]


def test_the_rate_counts_what_could_be_read_among_the_asked():
    rate = ValidRate(window=10).add(
        notes_of(skipped=5, ok=4, empty=1, leaked=1, invalid=3, failed=1)
    )
    assert rate.num_asked == 10
    assert rate.valid_rate == 0.6
    assert rate.shares()["invalid"] == 0.3
    assert sum(rate.shares().values()) == pytest.approx(1.0)
    assert rate.is_enough() is False
    assert rate.is_enough(0.6) is True
    assert "60 % of the first 10 notes could be read, 80 % are needed" in rate.verdict()
    assert "can be used" in rate.verdict(0.5)
    assert rate.metrics()["note/ok_share"] == 0.4


def test_only_the_first_window_decides():
    rate = ValidRate(window=4).add(notes_of(ok=4))
    later = rate.add(notes_of(invalid=100))
    assert later.valid_rate == 1.0
    assert later.metrics()["note/valid_rate"] == 4 / 104
    assert later.is_enough() is True


def test_a_window_that_is_not_full_gives_no_verdict():
    assert ValidRate().verdict() == "no trajectory was asked about"
    rate = ValidRate().add(notes_of(invalid=63))
    assert rate.is_enough() is None
    assert "64 are needed to judge" in rate.verdict()
    assert rate.add(notes_of(ok=1)).is_enough() is False
    assert ValidRate().metrics() == {"note/asked": 0.0}


def test_being_right_is_told_beside_being_readable():
    notes = [make_note(str(i), correct=c) for i, c in enumerate([True, False, False, False, None])]
    rate = ValidRate(window=5).add(notes)
    assert rate.correct_rate == 0.25
    assert rate.metrics()["note/correct_share"] == 0.25
    assert "100 % of the first 5 notes could be read" in rate.verdict()
    assert "25 % of 4 were right" in rate.verdict()


def test_the_rate_survives_a_checkpoint_and_goes_on_as_if_nothing_had_happened():
    notes = notes_of(ok=30, invalid=20, skipped=3, empty=30)
    whole = ValidRate().add(notes)
    half = ValidRate().add(notes[:41])
    back = ValidRate.from_table(json.loads(json.dumps(half.to_table())))
    assert back == half
    assert back.add(notes[41:]) == whole


@pytest.mark.parametrize(
    "table",
    [{"first": {"good": 1}}, {"first": {"ok": -1}}, {"total": {"ok": 1.5}}, {"x": 1}, {"first": 3}],
)
def test_foreign_counts_are_refused(table):
    with pytest.raises(DataError):
        ValidRate.from_table(table)


def test_the_statuses_are_those_of_a_note():
    assert STATUSES == ("ok", "skipped", "empty", "invalid", "leaked", "unsafe", "failed")
    with pytest.raises(ConfigError):
        ValidRate(window=0)
