"""How a turn went: the ladder of evidence, and what a user's words give away."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distill.curriculum.complaints import complains, reasks
from distill.curriculum.labels import align, from_turns
from distill.curriculum.messages import tool_succeeded
from distill.curriculum.outcomes import Judged, changes_something, is_good, judge
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    RoutingTurn,
    Verdict,
)
from distill.curriculum.turns import UserTurn, split


def verdict(source: Any, good: bool, name: str = "v", ts: int | None = None) -> Verdict:
    return Verdict(source=source, name=name, value=float(good), ts=ts)


def turns_of(*rows: tuple[str, str, dict[str, Any]], **more: Any) -> list[UserTurn]:
    """A session from request, answer and outcome of each turn."""
    told: list[dict[str, Any]] = []
    calls = []
    for i, (request, answer, outcome) in enumerate(rows):
        told += [{"role": "user", "content": request}]
        calls.append(
            RoutingTurn(
                source="log", format="plain", source_id=str(i), session_id="s", ts=i,
                messages=(*told, {"role": "assistant", "content": answer}),
                num_prompt=len(told), outcome=Outcome(**outcome), **more,
            )
        )  # fmt: skip
        told += [{"role": "assistant", "content": answer}]
    return split(calls)


def judged(*rows: tuple[str, str, dict[str, Any]]) -> Judged:
    first, *later = turns_of(*rows)
    return judge(first, later)


def tool_turn(name: str, result: str, answer: str = "Done.") -> UserTurn:
    call = {"id": "c", "function": {"name": name, "arguments": "{}"}}
    messages = (
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
        {"role": "assistant", "content": answer},
    )
    row = RoutingTurn(source="log", format="plain", source_id="1", messages=messages, num_prompt=3)
    return split([row])[0]


def test_a_call_that_came_back_and_a_user_who_does_not_complain_say_nothing():
    calm = ("what now?", "rest", {"status": "success", "complaint": False, "reask": False})
    found = judged(("hello there", "hi", {"status": "success", "finish_reason": "stop"}), calm)
    assert (found.result, found.rung, found.verifiable) == ("unknown", "none", False)
    assert judged(("a", "b", {"complaint": True})).result == "unknown", (
        "it is about the turn before"
    )


LADDER = [
    ("program", True, {"verdicts": ("program", True)}),
    ("rating", True, {"verdicts": ("user", False)}),
    ("tool", True, {"verdicts": ("tool", True)}),
    ("next_turn", False, {"complaint": True}),
    ("system", False, {"status": "failure"}),
    ("judge", False, {"verdicts": ("judge", True)}),
]


def test_the_strongest_evidence_at_hand_decides():
    """Every subset of the six rungs: the first present one is the answer."""
    for mask in range(1 << len(LADDER)):
        here = [rung for i, rung in enumerate(LADDER) if mask >> i & 1]
        outcome: dict[str, Any] = {"status": "success", "verdicts": ()}
        after: dict[str, Any] = {}
        for name, _, change in here:
            if "verdicts" in change:
                outcome["verdicts"] += (verdict(*change["verdicts"], name=name),)
            elif name == "next_turn":
                after = change
            else:
                outcome |= change
        found = judged(("question", "answer", outcome), ("and then?", "x", after))
        assert found.rung == (here[0][0] if here else "none")
        assert found.verifiable == (bool(here) and here[0][1])
        good = {"program": "success", "tool": "success", "judge": "success"}
        assert found.result == (good.get(found.rung, "failure") if here else "unknown")


def test_of_equal_names_the_latest_counts_and_of_different_names_one_bad_one_is_enough():
    def of(*verdicts: Verdict) -> str:
        return judged(("a", "b", {"verdicts": verdicts})).result

    early, late = verdict("user", False, "thumb", 1), verdict("user", True, "thumb", 2)
    assert of(early, late) == of(late, early) == "success"
    assert of(verdict("user", True, "t", 5), verdict("user", False, "t", 5)) == "failure"
    assert of(verdict("program", True, "a", 9), verdict("program", False, "b", 1)) == "failure"
    assert of(verdict("program", True, "a"), verdict("program", True, "b")) == "success"


@pytest.mark.parametrize(
    ("value", "label", "expected"),
    [
        (1.0, None, True), (0.51, None, True), (0.5, "good", None), (0.49, None, False),
        (float("nan"), None, None), (None, "Thumbs up", True), (None, "tie", None),
        (None, "both bad", False), (None, None, None), (0.0, "good", False),
    ],
)  # fmt: skip
def test_what_a_statement_says(value: float | None, label: str | None, expected: bool | None):
    assert is_good(Verdict(source="user", name="n", value=value, label=label)) is expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ('{"success": true}', "success"), ('{"ok": false}', "failure"),
        ('{"status": "error", "success": true}', "failure"), ("Exit code: 0", "success"),
        ("exit code 1\nboom", "failure"), ("Traceback (most recent call last):\n", "failure"),
        ("ValueError: no", "failure"), ("Error: nope", "failure"), ("Room 12", "unknown"),
        ('{"rooms": 3}', "unknown"), ("{broken", "unknown"), ("x" * 30_000, "unknown"),
    ],
)  # fmt: skip
def test_the_last_tool_that_changes_something_decides(result: str, expected: str) -> None:
    assert judge(tool_turn("book_room", result)).result == expected
    assert judge(tool_turn("search_rooms", result)).result == "unknown"


def test_a_tool_is_told_by_the_first_verb_in_its_name():
    names = ("create_event", "fileWrite", "run_tests", "SendMail", "get_order", "list_updates", "x")
    assert [changes_something(n) for n in names] == [True, True, True, True, False, False, False]
    assert tool_succeeded({"role": "tool", "content": "fine", "is_error": True}) is False


def test_a_failed_call_and_a_blocked_answer_are_failures_of_the_service():
    for outcome in ({"status": "failure"}, {"status": "aborted"}, {"error": "boom"}):
        assert judged(("a", "", outcome)).rung == "system"
    assert judged(("a", "b", {"finish_reason": "content_filter"})).result == "failure"
    assert judged(("a", "b", {"finish_reason": "length"})).result == "unknown"


def test_a_fallback_that_led_to_an_answer_says_nothing_of_the_answer():
    prompt = {"role": "user", "content": "sum them"}
    rows = [
        RoutingTurn(source="l", format="p", source_id=str(i), session_id="s", ts=i, trace_id="t",
                    messages=(prompt,), num_prompt=1, outcome=Outcome(status=status))
        for i, status in enumerate(("failure", "success"))
    ]  # fmt: skip
    (turn,) = split(rows)
    assert turn.fallback_hops == 1
    assert judge(turn).result == "unknown"


COMPLAINTS = """That's wrong, the capital is Canberra.
No, that is not what I asked.
still doesn't work
It doesn't work
You forgot the second part.
Sorry but you misunderstood me
Wrong. Try again.
You didn't answer my question
I already told you the file is in src
Hmm. This is incorrect
This isn\N{RIGHT SINGLE QUOTATION MARK}t right
Das stimmt nicht
Es funktioniert immer noch nicht
Ce n'est pas ce que j'ai demandé
Eso no es correcto
Isso está errado
Non è corretto
Dat klopt niet
Это неверно
不对,应该是四
違います
틀렸어요""".splitlines()
HARMLESS = """My code doesn't work, can you fix it?
No problem, thanks!
No thanks
What is wrong with this sentence: 'He go'?
That's not wrong, but can you go on?
Explain why the earth is not flat
Is it true that that's wrong?
Say "that's wrong" in French
You are given a list of wrong answers
Write a story in which a man says: you forgot me.
Why is this incorrect proof accepted?
It works now, thanks
This is a broken toaster. How to repair?
我错了
no
continue
It is not what I'd call easy; translate it
Das ist nicht schlecht, weiter so
C'est pas mal, continue
It is wrong to lie. Discuss.
> that's wrong
I said hello to her. Translate to German.""".splitlines()


@pytest.mark.parametrize("text", COMPLAINTS)
def test_a_complaint_is_heard(text: str) -> None:
    assert complains(text)


@pytest.mark.parametrize("text", ["", *HARMLESS])
def test_what_only_sounds_like_a_complaint_is_none(text: str) -> None:
    assert not complains(text)


ASKED = "Please write a sorting function in Rust"


@pytest.mark.parametrize(
    ("previous", "text", "expected"),
    [
        (ASKED, ASKED, True),
        (ASKED, "write a sorting function in Rust, again please!", True),
        (ASKED, "Write a sorting fucntion in Rust", True),
        (ASKED, "Write a sorting function in Ruby", False),
        (ASKED, "Please write a searching function in Rust", False),
        ("What is the capital of Australia?", "What is the capital of Austria?", False),
        ("What is 13*7 plus 2?", "What is 13*8 plus 2?", False),
        ("convert a to b in python", "convert b to a in python", False),
        ("is x > y always", "is x < y always", False),
        ("continue", "continue", False),
        ("法国的首都是哪里", "法国的首都是哪里？", True),  # noqa: RUF001
        ("", "", False),
        ("w " * 20_000, "w " * 20_000, True),
        ("w " * 20_000 + "x", "w " * 20_000 + "y", False),
    ],
)
def test_a_request_is_repeated_only_in_the_same_words(previous, text, expected):
    assert reasks(previous, text) is expected
    assert reasks(text, previous) is expected


def test_what_the_log_flags_wins_over_the_words():
    plain = ("count the words in it", "12", {})
    assert judged(plain, ("That's wrong.", "13", {})).evidence == "the next turn complains"
    assert judged(plain, ("That's wrong.", "13", {"complaint": False})).result == "unknown"
    assert judged(plain, ("count the words in it", "13", {})).evidence == "the next turn asks again"
    assert judged(plain, ("count the words in it", "13", {"reask": False})).result == "unknown"
    assert judged(plain, ("how nice", "13", {"reask": True})).result == "failure"


def test_only_the_very_next_turn_of_the_same_session_speaks_about_a_turn():
    calm, angry = ("go on please", "x", {}), ("That's wrong.", "y", {})
    first, second, third = turns_of(("count the words", "12", {}), calm, angry)
    assert judge(first, [second, third]).result == "unknown"
    assert judge(second, [third]).result == "failure"
    (other,) = split([RoutingTurn(source="log", format="p", source_id="z", session_id="other",
                                  outcome=Outcome(complaint=True))])  # fmt: skip
    assert judge(first, [other]).result == "unknown"
    arms = [
        RoutingTurn(source="table", format="p", source_id=m, parent_id="r",
                    messages=({"role": "user", "content": "add two and two and three"},))
        for m in ("a", "b")
    ]  # fmt: skip
    one, two = (split([arm])[0] for arm in arms)
    assert judge(one, [two]).result == "unknown"


def test_without_evidence_the_outcome_of_any_session_is_unknown():
    rng = random.Random(1)
    texts = ["plan the trip", "add three and four", "thanks", "next one", "go on", *HARMLESS]
    for _ in range(300):
        rows = [
            (f"{text} {i}", "fine", {"status": rng.choice((None, "success"))})
            for i, text in enumerate(rng.sample(texts, rng.randint(1, 5)))
        ]
        turns = turns_of(*rows)
        for i, turn in enumerate(turns):
            assert judge(turn, turns[i + 1 :]) == Judged(evidence="nothing says how it went")


def test_a_complaint_marks_the_turn_before_it_and_never_its_own():
    rng = random.Random(2)
    for _ in range(300):
        angry = [False] + [rng.random() < 0.4 for _ in range(rng.randint(1, 5))]
        rows = [(f"request {i}", "x", {"complaint": flag}) for i, flag in enumerate(angry)]
        turns = turns_of(*rows)
        failed = [judge(t, turns[i + 1 :]).result == "failure" for i, t in enumerate(turns)]
        assert failed == [*angry[1:], False]


def test_labels_are_made_of_turns():
    gate = PolicyStep(stage="confidence_gate", applied=True)
    first = turns_of(
        ("please sum them", "9", {}), prediction=Prediction(tier=0),
        decision=Decision(tier=1, policy=(gate,)),
    )[0]  # fmt: skip
    second = turns_of(
        ("No, that's wrong.", "8", {"verdicts": (verdict("user", True),)}),
        prediction=Prediction(tier=1), decision=Decision(tier=2),
    )[0]  # fmt: skip
    routed = from_turns([first, second])
    assert [(r.raw, r.final, r.complaint, r.vote, r.gated) for r in routed] == [
        (0, 1, False, None, True),
        (1, 2, True, "up", False),
    ]
    assert routed[0].features != routed[1].features
    found = align(routed)
    assert [(one.label, one.reason) for one in found] == [
        (2, "retrospective"),
        (2, "immediate_complaint"),
    ]
