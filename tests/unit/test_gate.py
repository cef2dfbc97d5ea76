from __future__ import annotations

from dataclasses import replace

import pytest

from distill.errors import EvalError
from distill.sections import GateSection
from distill.types import EvalReport, Outcome
from evals.gate import decide

DOMAINS = ("copy", "sort")


def report(
    solved: dict[str, range],
    *,
    n: int = 200,
    truncated: int = 0,
    model: str = "model",
    digest: str = "d" * 64,
) -> EvalReport:
    """A report in which the tasks with these numbers are solved in each domain."""
    outcomes = {
        f"{domain}-{i:04d}": Outcome(
            domain=domain, greedy=float(i in solved[domain]), truncated=i < truncated
        )
        for domain in DOMAINS
        for i in range(n)
    }
    return EvalReport(
        suite="gate",
        suite_digest=digest,
        model=model,
        num_tasks=len(outcomes),
        samples_per_task=0,
        metrics={},
        outcomes=outcomes,
    )


def both(start: int, stop: int) -> dict[str, range]:
    return {domain: range(start, stop) for domain in DOMAINS}


@pytest.mark.parametrize(
    ("before", "after", "truncated", "decision"),
    [
        pytest.param(both(0, 60), both(0, 140), 0, "promote", id="clear gain everywhere"),
        pytest.param(both(0, 100), both(0, 100), 0, "hold", id="the same outcomes"),
        pytest.param(both(0, 100), both(2, 103), 0, "hold", id="a gain within noise"),
        pytest.param(both(0, 0), both(0, 0), 0, "hold", id="nothing solved on either side"),
        pytest.param(both(0, 200), both(0, 200), 0, "hold", id="everything solved already"),
        pytest.param(both(0, 140), both(0, 60), 0, "reject", id="clear loss"),
        pytest.param(
            both(0, 100),
            {"copy": range(0, 200), "sort": range(0, 60)},
            0,
            "reject",
            id="overall gain bought with a loss in one domain",
        ),
        pytest.param(
            both(0, 100),
            {"copy": range(0, 200), "sort": range(2, 100)},
            0,
            "hold",
            id="overall gain with a doubtful domain",
        ),
        pytest.param(
            both(0, 100),
            {"copy": range(0, 160), "sort": range(0, 100)},
            0,
            "promote",
            id="gain in one domain, no change in the other",
        ),
        pytest.param(both(0, 60), both(0, 140), 20, "promote", id="cut off at the limit exactly"),
        pytest.param(both(0, 60), both(0, 140), 21, "reject", id="cut off too often"),
    ],
)
def test_the_gate_decides_as_its_rules_say(
    before: dict[str, range], after: dict[str, range], truncated: int, decision: str
) -> None:
    verdict = decide(report(after, truncated=truncated), report(before), GateSection())
    assert verdict.decision == decision
    assert all(reason.passed for reason in verdict.reasons) == (decision == "promote")


def test_a_model_against_itself_is_held() -> None:
    same = report(both(20, 150))
    verdict = decide(same, same, GateSection())
    assert verdict.decision == "hold"
    assert (verdict.overall.low, verdict.overall.high) == (0.0, 0.0)
    assert 0 < verdict.detectable < 0.05


def test_a_gain_on_a_handful_of_tasks_is_held_although_its_bootstrap_excludes_zero() -> None:
    verdict = decide(report(both(0, 2), n=6), report(both(0, 0), n=6), GateSection())
    assert verdict.overall.low > 0
    assert verdict.decision == "hold"
    assert [reason.rule for reason in verdict.reasons if not reason.passed] == ["changed tasks"]


def test_every_rule_leaves_a_reason_with_its_numbers() -> None:
    verdict = decide(report(both(0, 140)), report(both(0, 60)), GateSection())
    rules = [reason.rule for reason in verdict.reasons]
    assert rules == ["gain", "changed tasks", "no worse/copy", "no worse/sort", "truncation"]
    gain = verdict.reasons[0]
    assert gain.observed == verdict.overall.low
    assert gain.bound == 0.0
    assert "+40.0 points" in gain.text
    assert "n = 400" in gain.text


def test_the_verdict_carries_both_names_and_the_teacher_without_being_moved_by_it() -> None:
    candidate, incumbent = report(both(0, 140), model="new"), report(both(0, 60), model="old")
    teacher = report(both(0, 190), model="teacher")
    alone = decide(candidate, incumbent, GateSection())
    taught = decide(candidate, incumbent, GateSection(), teacher)
    assert (taught.candidate, taught.incumbent) == ("new", "old")
    assert taught.domains["sort"].teacher == pytest.approx(0.95)
    assert taught.domains["sort"].before == pytest.approx(0.3)
    assert taught.domains["sort"].after == pytest.approx(0.7)
    assert alone.overall.teacher is None
    assert alone.reasons == taught.reasons


def test_the_decision_is_deterministic() -> None:
    pair = report(both(3, 130)), report(both(0, 110))
    assert decide(*pair, GateSection()) == decide(*pair, GateSection())


def test_the_order_of_the_outcomes_does_not_matter() -> None:
    candidate, incumbent = report(both(3, 130)), report(both(0, 110))
    turned = replace(candidate, outcomes=dict(reversed(list(candidate.outcomes.items()))))
    assert decide(turned, incumbent, GateSection()) == decide(candidate, incumbent, GateSection())


def test_min_gain_asks_for_more_than_a_gain() -> None:
    pair = report(both(0, 120)), report(both(0, 100))
    assert decide(*pair, GateSection()).decision == "promote"
    assert decide(*pair, GateSection(min_gain=0.15)).decision == "hold"


def test_a_negative_min_gain_promotes_what_is_no_worse() -> None:
    pair = report(both(0, 100)), report(both(0, 100))
    assert decide(*pair, GateSection(min_gain=-0.02)).decision == "promote"


def test_different_suites_are_refused() -> None:
    with pytest.raises(EvalError, match="different suites"):
        decide(report(both(0, 9)), report(both(0, 9), digest="e" * 64), GateSection())
    same = report(both(0, 9))
    with pytest.raises(EvalError, match=r"teacher .* different suites"):
        decide(same, same, GateSection(), report(both(0, 9), digest="e" * 64, model="teacher"))


def test_missing_outcomes_and_empty_suites_are_refused() -> None:
    with pytest.raises(EvalError, match="10 tasks have an outcome on one side only"):
        decide(report(both(0, 9), n=20), report(both(0, 9), n=15), GateSection())
    with pytest.raises(EvalError, match="holds no outcome"):
        decide(report(both(0, 0), n=0), report(both(0, 0), n=0), GateSection())
