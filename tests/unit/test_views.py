"""What the teacher reads: which text each view shows, and that the response stays verbatim."""

from __future__ import annotations

from dataclasses import fields

import pytest

from distill.config import Config
from distill.errors import ConfigError, DataError
from distill.sections import Named
from distill.types import Message
from flows.naming import INJECTED, options_of
from helpers import make_chat, make_rollout
from teachers.sight import counts, fill
from teachers.views import (
    VIEWS,
    Plain,
    Shuffled,
    WithAnswer,
    WithContext,
    WithDemonstration,
    WithFeedback,
    WithPeerSuccess,
    WithSolution,
    WithVerdict,
)
from viewing import group_of, make_task, make_view, read, wide_chat

ROLES = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


# One task's own texts


TASK_VIEWS = [
    (WithAnswer, "ba", {}),
    (WithSolution, "so", {"solution": "so"}),
    (WithDemonstration, "de", {"demonstration": "de", "solution": "so"}),
    (WithDemonstration, "so", {"solution": "so"}),
    (WithContext, "le", {"lesson": "le"}),
]


@pytest.mark.parametrize(("cls", "shown", "meta"), TASK_VIEWS)
def test_a_view_appends_its_text_to_the_last_user_message(cls, shown, meta):
    chat, task = wide_chat(), make_task(**meta)
    view = make_view(cls, task, chat)
    (text,) = read(view, chat, group_of(chat, task, ("xy", 0.0)))
    name = cls.kind.removeprefix("with_")
    assert text == "ab=" + view.template.replace(f"{{{name}}}", shown)
    assert shown in text


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (WithAnswer, "answer"),
        (WithSolution, "solution"),
        (WithDemonstration, "demonstration"),
        (WithContext, "lesson"),
    ],
)
def test_a_prompt_that_the_task_brings_along_wins_and_is_used_as_it_is(cls, name):
    chat = wide_chat()
    task = make_task(views={name: "K1{answer}ab="}, solution="so", lesson="le")
    view = make_view(cls, task, chat)
    assert read(view, chat, group_of(chat, task, ("xy", 0.0))) == ["K1{answer}ab="]
    (sight,) = view.look(group_of(chat, task, ("xy", 0.0)), {})
    assert sight.source == "task"


def test_another_own_prompt_can_be_named():
    chat, task = make_chat(), make_task(views={"hint": "a:b="})
    view = make_view(WithAnswer, task, chat, view="hint")
    assert read(view, chat, group_of(chat, task, ("x", 0.0))) == ["a:b="]


@pytest.mark.parametrize(
    ("cls", "word"),
    [(WithAnswer, "answer"), (WithSolution, "solution"), (WithDemonstration, "demonstration")],
)
def test_a_task_without_the_text_is_an_error_that_names_the_task_and_the_column(cls, word):
    chat, task = make_chat(), make_task(answer=None)
    with pytest.raises(DataError, match=rf"t0 of d has no {word}"):
        make_view(cls, task, chat).build(group_of(chat, task, ("x", 0.0)), {})


def test_a_text_that_is_no_text_is_an_error():
    chat, task = make_chat(), make_task(solution=["a", "b"])
    with pytest.raises(DataError, match=r"'solution' must be text.*\['a', 'b'\]"):
        make_view(WithSolution, task, chat).build(group_of(chat, task, ("x", 0.0)), {})


def test_only_the_last_user_message_changes():
    chat = wide_chat(ROLES)
    system = Message(role="system", content="sys")
    shot = (Message(role="user", content="q"), Message(role="assistant", content="r"))
    started = Message(role="assistant", content="so")
    task = make_task(before=(system, *shot), after=(started,))
    view = make_view(WithAnswer, task, chat, template=" ({answer})")
    assert read(view, chat, group_of(chat, task, ("x", 0.0))) == [
        "<system>sys<user>q<assistant>r<user>ab= (ba)<assistant>so<assistant>"
    ]


def test_braces_in_a_template_and_in_the_data_stay_as_they_are():
    assert fill(r"\boxed{} {a}{b}{c}", {"a": "{b}", "b": "2"}) == r"\boxed{} {b}2{c}"


@pytest.mark.parametrize(
    ("cls", "option", "missing"),
    [
        (WithAnswer, "template", "answer"),
        (WithSolution, "template", "solution"),
        (WithDemonstration, "template", "demonstration"),
        (WithFeedback, "template", "feedback"),
        (WithContext, "template", "context"),
        (WithPeerSuccess, "template", "attempt"),
        (WithPeerSuccess, "feedback_template", "feedback"),
        (WithVerdict, "template", "attempt"),
        (WithVerdict, "partial", "passed"),
        (WithVerdict, "share", "percent"),
    ],
)
def test_a_template_without_its_placeholder_is_refused(cls, option, missing):
    with pytest.raises(ConfigError, match=rf"view\.{option} must contain \{{{missing}\}}"):
        make_view(cls, make_task(), make_chat(), **{option: "nothing"})


def test_a_verdict_template_needs_both_of_its_placeholders():
    with pytest.raises(ConfigError, match=r"must contain \{verdict\}"):
        make_view(WithVerdict, make_task(), make_chat(), template="{attempt}")


# Texts that are handed over


def context_of(contexts, **meta):
    chat, task = make_chat(), make_task(**meta)
    view = make_view(WithContext, task, chat, context="skill", template=":{context}")
    return read(view, chat, group_of(chat, task, ("x", 0.0)), contexts)


def test_a_context_comes_from_the_task_s_own_key_then_the_common_one_then_the_metadata():
    assert context_of({"skill/t0": "s0", "skill": "s"}, skill="m") == ["ab=:s0"]
    assert context_of({"skill/t1": "s1", "skill": "s"}, skill="m") == ["ab=:s"]
    assert context_of({"skill/t1": "s1"}, skill="m") == ["ab=:m"]
    assert context_of({"skill": "s"}, views={"skill": "a:b="}) == ["ab=:s"]


def test_a_row_without_a_context_has_no_view():
    assert context_of({"skill/t1": "s1"}) == [None]


def test_an_empty_context_for_a_task_is_not_replaced_by_the_common_one():
    assert context_of({"skill/t0": "", "skill": "s"}, skill="m") == [None]


def test_an_own_prompt_with_a_place_for_the_context_is_filled_in():
    views = {"skill": "k1:{context}=ab="}
    assert context_of({"skill": "s"}, views=views) == ["k1:s=ab="]
    assert context_of({}, views=views, skill="m") == ["k1:m=ab="]
    assert context_of({}, views=views) == [None]


# What all views promise


def test_a_hint_of_three_times_the_student_s_limit_is_seen_whole_or_dropped():
    chat = make_chat()  # the student reads at most 64 tokens
    task = make_task(solution="s" * 192)
    rows = group_of(chat, task, ("xy", 0.0))
    length = 3 + 192 + 3
    fits = make_view(WithSolution, task, chat, template="{solution}", max_length=length)
    assert read(fits, chat, rows) == ["ab=" + "s" * 192]
    short = make_view(WithSolution, task, chat, template="{solution}", max_length=length - 1)
    built, found = short.build_counted(rows, {})
    assert built == [None]
    assert found == {"view/built": 0.0, "view/too_long": 1.0, "view/without_context": 0.0}


def test_rows_without_trained_tokens_have_no_view_and_are_not_counted():
    chat, task = make_chat(), make_task()
    rows = [*group_of(chat, task, ("x", 0.0)), make_rollout([5, 6, 7], [], name="t0")]
    view = make_view(WithAnswer, task, chat, template=":{answer}")
    sights = view.look(rows, {})
    assert [s.outcome for s in sights] == ["built", "untrained"]
    assert counts(sights)["view/built"] == 1.0
    assert sum(counts(sights)[f"view/{n}"] for n in ("too_long", "without_context")) == 0.0


@pytest.mark.parametrize("cls", [Plain, WithAnswer])
def test_observations_between_two_replies_stay_where_they_are(cls):
    chat, task = make_chat(), make_task()
    prompt = chat.prompt(task.prompt)
    mask = (False,) * len(prompt) + (True, True, False, False, True)
    row = make_rollout(prompt, [5, 1, 8, 9, 6], completion_mask=mask)
    options = {"template": ":{answer}"} if cls is WithAnswer else {}
    view = make_view(cls, task, chat, **options) if options else Plain()
    (built,) = view.build([row], {})
    start = built.positions[0]
    assert built.token_ids[start:] == (5, 1, 8, 9, 6)
    assert [p - start for p in built.positions] == [0, 1, 4]


def test_rows_keep_their_order_over_several_tasks_and_the_acting_prompt_never_changes():
    chat = make_chat()
    tasks = {n: make_task(f"{n}=", answer=n[::-1], number=n) for n in ("ab", "cd")}
    rows = [
        group_of(chat, tasks[n], (r, 0.0))[0]
        for n, r in zip(("ab", "cd", "ab"), "xyz", strict=True)
    ]
    before = [r.token_ids for r in rows]
    view = WithAnswer(chat=chat, task_of=tasks.__getitem__, template=":{answer}")
    assert read(view, chat, rows) == ["ab=:ba", "cd=:dc", "ab=:ba"]
    assert [r.token_ids for r in rows] == before
    assert all(chat.decode(r.token_ids[:3]) == f"{r.task_id}=" for r in rows)


def test_equal_views_have_equal_ids_and_different_ones_do_not():
    chat, task = make_chat(), make_task(solution="so")
    rows = group_of(chat, task, ("x", 0.0), ("x", 0.0), ("y", 0.0))
    view = make_view(WithSolution, task, chat, template=":{solution}")
    first, second, third = (v.id for v in view.build(rows, {}))
    assert first == second != third


def test_the_shuffled_view_never_shows_a_repeated_task_its_own_prompt():
    rows = [
        make_rollout([5, 6], [9], name="t0", group_id="g0"),
        make_rollout([5, 6], [9], name="t0", group_id="g1"),
        make_rollout([7, 8], [9], name="t1", group_id="g2"),
        make_rollout([7, 8, 9], [], name="t1", group_id="g2"),
    ]
    shown = [v and v.token_ids for v in Shuffled().build(rows, {})]
    assert shown == [(7, 8, 9), (7, 8, 9), (5, 6, 9), None]


def test_every_view_of_the_table_is_listed_under_its_kind():
    assert {cls.kind: cls for cls in VIEWS.values()} == VIEWS
    for cls in (c for c in VIEWS.values() if c.kind not in ("plain", "shuffled")):
        assert {f.name for f in fields(cls)} > INJECTED


@pytest.mark.parametrize("cls", VIEWS.values(), ids=VIEWS.keys())
def test_every_option_of_a_view_can_be_set_in_a_configuration(cls):
    defaults = {f.name: f.default for f in fields(cls) if f.name not in INJECTED}
    named = Named(name=cls.kind, options=defaults)
    assert options_of(cls, named, "view", Config()) == defaults
