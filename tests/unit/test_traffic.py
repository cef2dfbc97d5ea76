"""The router of a served workload and its log: chances, choices, days and rows of the gateway."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from distill.curriculum.importers import IMPORTERS, Context, detect
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    RoutingTurn,
    Served,
    Verdict,
)
from distill.curriculum.tiers import Tiers
from distill.curriculum.turns import split
from distill.errors import ConfigError
from distill.types import Message, StopReason, Task, task_id
from evals.traffic import (
    FIRST_DAY,
    PRICE,
    STRONG,
    WEAK,
    Answered,
    Choice,
    Router,
    plan,
    spend_row,
)
from flows.serving import _by_tier, summarise
from helpers import make_rollout

ROUTER = Router(explore=0.3, typical=12.0, spread=3.0)
DAY = timedelta(days=1)


def task(text: str, domain: str = "d") -> Task:
    prompt = (Message(role="user", content=text),)
    name = task_id("e", prompt)
    return Task(id=name, env="e", domain=domain, split="train", prompt=prompt, answer="a")


TASKS = [task("x" * n) for n in range(1, 40)]


def answered(**changes: Any) -> Answered:
    (request,) = plan([TASKS[11]], day=2, session=4, key="k")
    choice = Choice(
        probs=(0.1, 0.2, 0.3, 0.4), predicted=3, tier=STRONG, propensity=0.85, explored=False
    )
    values: dict[str, Any] = {
        "request": request, "choice": choice, "model": "teacher", "reply": "five",
        "correct": True, "tokens_in": 7, "tokens_out": 5,
    }  # fmt: skip
    return Answered(**(values | changes))


def imported(row: dict[str, Any]) -> RoutingTurn:
    tiers = Tiers(models={"student": WEAK, "teacher": STRONG})
    assert detect(row) == "litellm"
    (turn,) = IMPORTERS["litellm"].read(row, Context(source="s", tiers=tiers))
    assert isinstance(turn, RoutingTurn)
    return turn


def test_the_chances_of_the_four_classes_add_up_to_one() -> None:
    for one in (*TASKS, task("y" * 100_000)):
        probs = ROUTER.probs(one)
        assert len(probs) == 4
        assert min(probs) >= 0
        assert math.fsum(probs) == pytest.approx(1.0, abs=3e-6)  # four roundings to 6 digits
    assert ROUTER.probs(task("y" * 100_000))[3] == 1.0


def test_long_requests_are_thought_to_be_harder() -> None:
    calm = replace(ROUTER, noise=0.0)
    means = [sum(k * p for k, p in enumerate(calm.probs(one))) for one in TASKS]
    assert all(low < high for low, high in itertools.pairwise(means))


def test_a_choice_depends_on_the_task_and_the_key_alone() -> None:
    there = [ROUTER.choose(one, "k") for one in TASKS]
    back = [replace(ROUTER).choose(one, "k") for one in reversed(TASKS)]
    assert there == back[::-1]
    others = [ROUTER.choose(one, "other") for one in TASKS]
    assert there != others
    assert [c.probs for c in there] == [c.probs for c in others]
    same = replace(TASKS[0], meta={"n": 1}, answer=None)
    assert ROUTER.choose(same, "k") == there[0]


def test_propensities_are_how_often_a_tier_is_taken() -> None:
    draws = 2000
    for one in (TASKS[2], TASKS[30]):
        found = [ROUTER.choose(one, str(n)) for n in range(draws)]
        taken = Counter(choice.tier for choice in found)
        assert set(taken) == {WEAK, STRONG}
        said = {choice.tier: choice.propensity for choice in found}
        assert said[WEAK] + said[STRONG] == pytest.approx(1.0)
        for tier in (WEAK, STRONG):
            error = 4 * math.sqrt(said[tier] * (1 - said[tier]) / draws)
            assert taken[tier] / draws == pytest.approx(said[tier], abs=error)
        assert {c.propensity for c in found if c.tier == WEAK} == {said[WEAK]}
        tried = sum(choice.explored for choice in found) / draws
        assert tried == pytest.approx(ROUTER.explore, abs=0.045)


def test_the_weak_share_is_the_mean_of_the_choices() -> None:
    for one in (TASKS[2], TASKS[11], TASKS[30]):
        mean = sum(ROUTER.choose(one, str(n)).tier == WEAK for n in range(2000)) / 2000
        assert mean == pytest.approx(ROUTER.weak_share(one), abs=0.045)
    certain = replace(ROUTER, explore=0.0)
    for one in TASKS:
        choice = certain.choose(one, "k")
        assert (choice.propensity, choice.explored) == (1.0, False)
        assert certain.weak_share(one) == float(choice.tier == WEAK)
    with pytest.raises(ConfigError, match=r"traffic\.explore"):
        Router(explore=1.5)


def test_a_small_plan_has_one_session_after_the_other() -> None:
    found = plan(TASKS, day=3, session=4, key="k")
    assert [r.at - FIRST_DAY - 3 * DAY for r in found] == [
        timedelta(milliseconds=2500 * n) for n in range(len(TASKS))
    ]
    assert [r.number for r in found] == list(range(len(TASKS)))
    sizes = Counter(r.session for r in found)
    assert list(sizes.values()) == [4] * 9 + [3]
    assert found == plan(TASKS, day=3, session=4, key="k")
    assert {r.session for r in found}.isdisjoint(r.session for r in plan(TASKS, day=3, session=4,
                                                                         key="other"))  # fmt: skip


@pytest.mark.parametrize("session", [1, 3, 1000])
def test_all_requests_of_a_day_are_before_the_first_one_of_the_next(session: int) -> None:
    many = 36_000  # at 2.5 s each these would take 25 hours
    found = plan([TASKS[0]] * many, day=0, session=session, key="k")
    last = max(request.at for request in found)
    (after,) = plan(TASKS[:1], day=1, session=session, key="k")
    assert after.at - last > timedelta(minutes=45)  # for the answer, and for asking again
    assert after.at - FIRST_DAY == DAY
    steps = {b.at - a.at for a, b in itertools.pairwise(found) if a.session == b.session}
    assert steps == (set() if session == 1 else {timedelta(milliseconds=2500)})
    begun = [request.at for request in found[::session]]
    assert begun == sorted(begun)


def test_a_row_of_the_log_is_read_with_all_its_layers() -> None:
    turn = imported(spend_row(answered(), key="k"))
    row = spend_row(answered(), key="k")
    ts = round((FIRST_DAY + 2 * DAY).timestamp() * 1000)
    assert turn == RoutingTurn(
        source="s",
        source_id=row["request_id"],
        format="litellm",
        session_id=row["session_id"],
        user=row["end_user"],
        ts=ts,
        scene="d",
        tags=("scene:d",),
        request=Request(tokens_in=7),
        prediction=Prediction(tier=3, probs=(0.1, 0.2, 0.3, 0.4), router="length-v1"),
        decision=Decision(
            tier=STRONG,
            requested_model="auto",
            propensity=0.85,
            policy=(PolicyStep(stage="explore", applied=False, detail={}),),
        ),
        served=Served(model="teacher", provider="local", tier=STRONG, cache_hit=False),
        outcome=Outcome(
            status="success",
            finish_reason="stop",
            verdicts=(Verdict(source="program", name="graded", value=1.0),),
            complaint=False,
            latency_ms=70.0,
            tokens_out=5,
            cost=pytest.approx(12 * PRICE[STRONG]),
        ),
        messages=(
            {"role": "user", "content": "x" * 12},
            {"role": "assistant", "content": "five"},
        ),
        num_prompt=1,
    )


def test_a_request_that_is_asked_again_is_marked_and_comes_before_the_next_one() -> None:
    requests = plan(TASKS[:3], day=0, session=3, key="k")
    calls = [answered(request=request, correct=False) for request in requests]
    again = replace(calls[0], complaint=True)
    turns = [imported(spend_row(call, key="k")) for call in (calls[0], again, *calls[1:])]
    assert [turn.outcome.complaint for turn in turns] == [False, True, False, False]
    assert [s.stage for s in turns[1].decision.policy if s.applied] == ["complaint_upgrade"]
    assert len({turn.source_id for turn in turns}) == 4
    times = [turn.ts for turn in turns]
    assert times == sorted(times)
    assert [turn.outcome.verdicts[0].value for turn in turns] == [0.0] * 4
    assert len({turn.session_id for turn in turns}) == 1
    assert len(split(turns)) == 4


def test_a_reply_that_was_cut_or_failed_says_so() -> None:
    cut = imported(spend_row(answered(stop=StopReason.LENGTH), key="k"))
    assert (cut.outcome.status, cut.outcome.finish_reason) == ("success", "length")
    broken = imported(spend_row(answered(stop=StopReason.ERROR, reply=""), key="k"))
    assert (broken.outcome.status, broken.outcome.finish_reason) == ("failure", "error")


def test_the_stage_passes_on_why_a_reply_ended() -> None:
    requests = plan(TASKS[:2], day=0, session=1, key="k")
    asked = [(request, ROUTER.choose(request.task, "k")) for request in requests]
    stops = {requests[0].task.id: StopReason.LENGTH, requests[1].task.id: StopReason.STOP}

    def answer(tasks: Any, key: str) -> list[Any]:
        return [make_rollout([1, 2], [3], name=t.id, stop=stops[t.id], reward=1.0) for t in tasks]

    student: Any = SimpleNamespace(chat=SimpleNamespace(decode=lambda ids: f"{len(ids)} tokens"))
    calls = _by_tier(asked, {WEAK: answer, STRONG: answer}, student, "k")
    assert [call.stop for call in calls] == [StopReason.LENGTH, StopReason.STOP]
    rows = [json.loads(spend_row(call, key="k")["response"]) for call in calls]
    assert [row["choices"][0]["finish_reason"] for row in rows] == ["length", "stop"]
    assert summarise(calls)["solved"] == 2
    assert json.loads(spend_row(calls[0], key="k")["request_tags"]) == ["scene:d"]
