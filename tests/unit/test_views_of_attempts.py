"""Views of attempts: successes of the group, feedback and verdicts."""

from __future__ import annotations

import pytest

from distill.errors import ConfigError
from helpers import make_chat, make_rollout
from teachers.views import WithFeedback, WithPeerSuccess, WithVerdict
from viewing import group_of, ids_of, make_task, make_view, read, wide_chat

# Feedback


def test_feedback_is_about_the_row_itself_and_empty_feedback_is_none():
    chat, task = make_chat(), make_task()
    view = make_view(WithFeedback, task, chat, template=":{feedback}")
    rows = group_of(
        chat,
        task,
        ("x", 0.0, {"feedback": "no"}),
        ("y", 0.0, {"feedback": "  \n"}),
        ("z", 0.0),
        ("w", 1.0, {"feedback": "yes"}),
    )
    assert read(view, chat, rows) == ["ab=:no", None, None, "ab=:yes"]


def test_the_task_s_own_feedback_prompt_is_filled_in():
    chat, task = make_chat(), make_task(views={"feedback": "a:{feedback}="})
    rows = group_of(chat, task, ("x", 0.0, {"feedback": "no"}))
    assert read(make_view(WithFeedback, task, chat), chat, rows) == ["a:no="]


# Successes of the group


def peer_view(task, chat, **options):
    values = {"template": ":{attempt}", "feedback_template": ":f{feedback}", "closing": ""}
    return make_view(WithPeerSuccess, task, chat, **(values | options))


def test_every_row_reads_the_first_success_that_is_not_its_own():
    chat, task = make_chat(), make_task()
    rows = group_of(chat, task, ("x", 0.0), ("y", 1.0), ("z", 1.0))
    assert read(peer_view(task, chat), chat, rows) == ["ab=:y", "ab=:z", "ab=:y"]
    same = peer_view(task, chat, exclude_self=False)
    assert read(same, chat, rows) == ["ab=:y", "ab=:y", "ab=:y"]


def test_a_lone_success_has_no_view_of_itself():
    chat, task = make_chat(), make_task()
    rows = group_of(chat, task, ("x", 0.0), ("y", 1.0))
    assert read(peer_view(task, chat), chat, rows) == ["ab=:y", None]


def test_the_threshold_is_reached_by_equality():
    chat, task = make_chat(), make_task()
    rows = group_of(chat, task, ("x", 0.4), ("y", 0.5), ("z", 1.0))
    assert read(peer_view(task, chat, threshold=0.5), chat, rows) == ["ab=:y", "ab=:z", "ab=:y"]


def test_a_success_of_another_group_or_without_a_reward_is_never_shown():
    chat, task = make_chat(), make_task()
    (mine,) = group_of(chat, task, ("x", 0.0))
    (other,) = group_of(chat, task, ("y", 1.0, {"group_id": "again"}))
    (worked,) = group_of(chat, task, ("z", None))
    assert read(peer_view(task, chat), chat, [mine, other, worked]) == [None, None, None]


def test_without_a_success_the_solution_is_shown_where_that_is_asked_for():
    chat, task = make_chat(), make_task(solution="so")
    rows = group_of(chat, task, ("x", 0.0), ("y", 1.0))
    view = peer_view(task, chat, fallback="solution")
    assert read(view, chat, rows) == ["ab=:y", "ab=:so"]
    bare = make_task()
    assert read(peer_view(bare, chat, fallback="solution"), chat, rows) == ["ab=:y", None]


def feedback_rows(chat, task):
    return group_of(
        chat, task, ("x", 0.0, {"feedback": "no"}), ("y", 1.0, {"feedback": "yes"}), ("z", 0.0)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["ab=:y", "ab=:fyes", "ab=:y"]),
        ({"feedback": False}, ["ab=:y", None, "ab=:y"]),
        ({"feedback_with_success": True}, ["ab=:y:fno", "ab=:fyes", "ab=:y"]),
        ({"fallback": "solution"}, ["ab=:y", "ab=:so", "ab=:y"]),
    ],
)
def test_feedback_is_shown_without_a_success_or_beside_one_as_asked(options, expected):
    chat, task = make_chat(), make_task(solution="so")
    assert read(peer_view(task, chat, **options), chat, feedback_rows(chat, task)) == expected


def test_neither_success_nor_feedback_is_no_view_and_says_so():
    chat, task = make_chat(), make_task()
    view = peer_view(task, chat)
    built, found = view.build_counted(group_of(chat, task, ("x", 0.0), ("y", 0.0)), {})
    assert built == [None, None]
    assert found == {"view/built": 0.0, "view/too_long": 0.0, "view/without_context": 2.0}


def test_the_sources_of_what_was_shown_are_counted():
    chat, task = make_chat(), make_task()
    view = peer_view(task, chat, feedback_with_success=True)
    _, found = view.build_counted(feedback_rows(chat, task), {})
    assert found["view/built"] == 3.0
    sources = {name: n for name, n in found.items() if name.startswith("view/from_")}
    assert sources == {
        "view/from_feedback": 1.0,
        "view/from_peer": 1.0,
        "view/from_peer_and_feedback": 1.0,
    }


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ("<think>a</think>y", "y"),
        ("<think>a\nb</think>\n\ny<think>c</think>z", "yz"),
        ("a</think>y", "y"),
        ("y<think>never ends", "y"),
        ("y", "y"),
    ],
)
def test_the_thinking_of_the_shown_attempt_is_left_out(reply, shown):
    chat, task = wide_chat(), make_task()
    rows = group_of(chat, task, ("x", 0.0), (reply, 1.0))
    assert read(peer_view(task, chat), chat, rows)[0] == f"ab=:{shown}"
    kept = peer_view(task, chat, strip_think=False)
    assert read(kept, chat, rows)[0] == f"ab=:{reply}"


def test_a_success_that_only_thinks_is_passed_over():
    chat, task = wide_chat(), make_task()
    rows = group_of(chat, task, ("x", 0.0), ("<think>a</think>", 1.0), ("y", 1.0))
    assert read(peer_view(task, chat), chat, rows)[0] == "ab=:y"


def test_the_task_s_own_peer_prompt_is_filled_in():
    chat, task = make_chat(), make_task(views={"peer": "k:{attempt}:{feedback}="})
    rows = group_of(chat, task, ("x", 0.0, {"feedback": "no"}), ("y", 1.0))
    view = peer_view(task, chat, feedback_with_success=True)
    assert read(view, chat, rows) == ["k:y:no=", None]


def test_an_attempt_of_several_turns_is_shown_in_the_student_s_words_alone():
    chat, task = wide_chat(), make_task()
    first = group_of(chat, task, ("x", 0.0))[0]
    said = [*ids_of(chat, "y"), *chat.tokenizer("obs")["input_ids"], *ids_of(chat, "z")]
    prompt = chat.prompt(task.prompt)
    mask = (False,) * len(prompt) + (True, True, False, False, False, True, True)
    peer = make_rollout(prompt, said, completion_mask=mask, reward=1.0, traj_id="t0/1")
    assert read(peer_view(task, chat), chat, [first, peer]) == ["ab=:y\nz", None]


# Verdicts


def verdict_view(task, chat, **options):
    return make_view(WithVerdict, task, chat, **({"template": ":{attempt}:{verdict}"} | options))


def test_a_verdict_says_whether_the_row_is_right_beside_a_correct_attempt():
    chat, task = make_chat(), make_task(solution="so")
    rows = group_of(chat, task, ("x", 0.0), ("y", 1.0), ("z", -1.0))
    assert read(verdict_view(task, chat), chat, rows) == [
        "ab=:y:incorrect",
        "ab=:so:correct",
        "ab=:y:incorrect",
    ]


def test_a_verdict_falls_back_from_peer_to_solution_to_answer_to_none():
    chat = make_chat()
    for task, expected in (
        (make_task(solution="so"), ["ab=:so:incorrect"]),
        (make_task(), ["ab=:ba:incorrect"]),
        (make_task(answer=None), [None]),
    ):
        rows = group_of(chat, task, ("x", 0.0))
        assert read(verdict_view(task, chat), chat, rows) == expected


def test_a_row_without_a_reward_gets_no_verdict():
    chat, task = make_chat(), make_task()
    assert read(verdict_view(task, chat), chat, group_of(chat, task, ("x", None))) == [None]


@pytest.mark.parametrize(
    ("reward", "parts", "verdict"),
    [
        (1.0, {"passed": 5.0, "total": 5.0}, "correct"),
        (0.6, {"passed": 3.0, "total": 5.0}, "passes 3 of 5"),
        (0.6, {}, "earns 60 of 100"),
        (0.0, {"passed": 0.0, "total": 5.0}, "incorrect"),
    ],
)
def test_a_fractional_reward_is_spelt_out(reward, parts, verdict):
    chat, task = wide_chat(), make_task()
    rows = group_of(chat, task, ("x", reward, {"reward_parts": parts}))
    assert read(verdict_view(task, chat), chat, rows) == [f"ab=:ba:{verdict}"]


def test_the_task_s_own_verdict_prompt_is_filled_in():
    chat, task = make_chat(), make_task(views={"verdict": "k:{attempt}:{verdict}="})
    rows = group_of(chat, task, ("x", 0.0))
    view = verdict_view(task, chat, incorrect="no")
    assert read(view, chat, rows) == ["k:ba:no="]


def test_a_threshold_that_zero_would_reach_is_refused_for_verdicts():
    with pytest.raises(ConfigError, match="must be positive, got 0"):
        make_view(WithVerdict, make_task(), make_chat(), threshold=0.0)
