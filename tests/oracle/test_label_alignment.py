"""The published cases of label alignment and of the weights of labels."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distill.curriculum.labels import Routed, Seen, align, frequencies, weight


def session(*turns: str) -> list[Routed]:
    """Turns such as `1>2*`: predicted 1, decided 2, complains about the turn before."""
    return [Routed(raw=int(t[0]), final=int(t[2]), complaint=t.endswith("*")) for t in turns]


def first(turns: list[Routed], **changes: object) -> tuple[int | None, str, bool]:
    turns[0] = replace(turns[0], **changes)  # type: ignore[arg-type]
    found = align(turns)[0]
    return found.label, found.reason, found.confirmed


def test_a_complaint_of_the_next_turn_raises_the_label_to_the_tier_that_resolved_it():
    assert first(session("0>0", "1>2*", "1>1")) == (2, "retrospective", True)


def test_a_label_rises_by_two_at_most_and_waits_for_a_calm_turn():
    assert first(session("0>0", "2>3*")) == (2, "retrospective", False)


def test_a_second_complaint_is_noise():
    assert first(session("1>1", "2>3*", "3>3*"))[:2] == (1, "normal")


def test_a_turn_predicted_high_is_not_corrected():
    assert first(session("2>2", "2>3*", "1>1"))[:2] == (2, "normal")


def test_a_down_vote_raises_by_one_and_a_calm_turn_confirms_it():
    assert first(session("0>0", "1>1"), vote="down") == (1, "explicit_downvote", True)
    assert first(session("0>0"), vote="down") == (1, "explicit_downvote", False)
    assert first(session("0>0", "0>0*"), vote="down") == (1, "explicit_downvote", False)


def test_a_down_vote_of_a_high_tier_or_of_an_ensemble_leaves_the_turn_out():
    high = align([Routed(raw=0, final=2, vote="down")])[0]
    assert (high.label, high.reason, high.weight) == (None, "downvote_high_tier", 0.0)
    several = align([Routed(raw=0, final=0, vote="down", ensemble=True)])[0]
    assert (several.label, several.reason) == (None, "downvote_ensemble")


def test_a_down_vote_keeps_a_label_that_was_already_raised():
    assert first(session("0>0", "1>2*", "1>1"), vote="down") == (2, "explicit_downvote", True)
    own = align([Routed(raw=0, final=2, complaint=True, vote="down")])[0]
    assert (own.label, own.reason) == (2, "explicit_downvote")


def test_a_turn_that_complains_itself_keeps_what_was_decided():
    found = align(session("0>0", "1>2*", "2>3*"))
    assert [(one.label, one.reason) for one in found[1:]] == [
        (2, "immediate_complaint"),
        (3, "immediate_complaint"),
    ]


def test_reasons_of_turns_that_nobody_complains_about():
    turns = [
        Routed(raw=2, final=1, gated=True),
        Routed(raw=1, final=1, vote="up", gated=True),
        Routed(raw=1, final=2, vote="up", ensemble=True),
        Routed(raw=None, final=1),
        Routed(raw=1, final=None),
    ]
    assert [(one.label, one.reason) for one in align(turns)] == [
        (1, "confidence_backoff"),
        (1, "explicit_upvote"),
        (2, "ensemble_upvote"),
        (None, "no_tier"),
        (None, "no_tier"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("retrospective", True), 1.000000),
        (("retrospective", False), 0.500000),
        (("normal", True, 9, 1), 0.100000),
        (("explicit_downvote", True, 1, 5), 1.920000),
        (("explicit_downvote", False, 1, 3), 0.780000),
        (("explicit_upvote", True, 4, 2), 0.345000),
        (("confidence_backoff", True, 2, 2), 0.406586),
        (("explicit_downvote", True, 5, 5), 1.920000),
        (("immediate_complaint", True, 7, 1), 0.900000),
        (("ensemble_upvote", True, 1, 1), 0.300000),
        (("explicit_downvote", True, 1, 99), 1.920000),
    ],
)
def test_weights(arguments: tuple[object, ...], expected: float) -> None:
    assert weight(*arguments) == pytest.approx(expected, abs=1e-6)  # type: ignore[arg-type]


def test_the_same_request_seen_often_counts_less_whatever_session_it_is_in():
    one = [Routed(raw=1, final=1, features="same", day=day) for day in (1, 1, 1, 2)]
    other = [Routed(raw=0, final=0, features="else"), Routed(raw=0, final=0)]
    seen = frequencies([one, other])
    assert seen == {"same": Seen(4, 2), "else": Seen(1, 1)}
    assert align(one, seen)[0].weight == pytest.approx(0.3 / 2 * 1.15)
    assert [found.weight for found in align(other, seen)] == [0.3, 0.3]


def test_labels_of_random_sessions_keep_their_bounds():
    rng = random.Random(5)
    raised = 0
    for _ in range(3000):
        turns = [
            Routed(
                raw=rng.randrange(4),
                final=rng.randrange(4),
                complaint=rng.random() < 0.4,
                vote=rng.choice((None, None, "up", "down")),
                gated=rng.random() < 0.2,
                ensemble=rng.random() < 0.1,
            )
            for _ in range(rng.randint(1, 5))
        ]
        for i, (turn, found) in enumerate(zip(turns, align(turns), strict=True)):
            after = turns[i + 1] if i + 1 < len(turns) else None
            assert 0.0 <= found.weight <= 2.0
            if found.reason == "retrospective":
                raised += 1
                assert found.label in (turn.raw + 1, turn.raw + 2)
                assert after is not None
                assert after.complaint
                assert not turn.complaint
                assert found.label <= max(after.final, turn.raw + 1)
                assert found.confirmed == (i + 2 < len(turns))
            elif found.label is not None and found.reason != "explicit_downvote":
                assert found.label == turn.final
            if found.label is None:
                assert found.weight == 0.0
                assert turn.vote == "down"
    assert raised > 100


def test_a_complaint_never_changes_the_label_of_its_own_turn():
    """Only the turn before it: neither label nor correction of the complaining turn depends on it
    beyond its reason."""
    rng = random.Random(6)
    for _ in range(1000):
        turns = session(*(f"{rng.randrange(4)}>{rng.randrange(4)}" for _ in range(4)))
        marked = [*turns[:3], replace(turns[3], complaint=True)]
        assert align(marked)[3].label == align(turns)[3].label
        assert align(marked)[0] == align(turns)[0]
