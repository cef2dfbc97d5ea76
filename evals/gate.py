"""Promote, hold or reject: one pure decision from two evaluations of the same tasks.

Compared are the greedy outcomes, task by task. The candidate is

    promoted  when the overall gain is above `min_gain`, no domain got worse by `margin` or more,
              and few enough replies were cut off;
    rejected  when it is clearly worse overall, clearly worse than the margin in one domain, or
              cuts off too many replies;
    held      otherwise: the evidence does not carry a change.

"Clearly" means with the whole interval; every rule leaves a reason with its numbers.
"""

from __future__ import annotations

import hashlib

from distill.errors import EvalError
from distill.sections import GateSection
from distill.types import Decision, DomainResult, EvalReport, Reason, Verdict
from evals.metrics import detectable_difference, paired_bootstrap, sign_test


def decide(
    candidate: EvalReport,
    incumbent: EvalReport,
    rules: GateSection,
    teacher: EvalReport | None = None,
) -> Verdict:
    """Judge the candidate against the incumbent on the tasks that both answered.

    Raises EvalError when the reports belong to different suites or hold no task. The teacher is
    only reported, it never changes the decision.
    """
    _same_suite(candidate, incumbent, "incumbent")
    if teacher is not None:
        _same_suite(candidate, teacher, "teacher")
    ids = sorted(candidate.outcomes)
    by_domain: dict[str, list[str]] = {}
    for task_id in ids:
        by_domain.setdefault(candidate.outcomes[task_id].domain, []).append(task_id)

    def compare(name: str, chosen: list[str]) -> DomainResult:
        return _compare(name, chosen, (candidate, incumbent, teacher), rules)

    overall = compare("", ids)
    domains = {name: compare(name, chosen) for name, chosen in sorted(by_domain.items())}
    reasons = [_gain(overall, rules)]
    if rules.min_gain >= 0:
        reasons.append(_changed_tasks(candidate, incumbent, rules))
    reasons += [_no_worse(name, result, rules) for name, result in domains.items()]
    reasons.append(_truncation(candidate, rules))
    return Verdict(
        decision=_decision(overall, domains, reasons, rules),
        reasons=tuple(reasons),
        candidate=candidate.model,
        incumbent=incumbent.model,
        domains=domains,
        overall=overall,
        detectable=_detectable(candidate, incumbent, overall, rules),
    )


def _decision(
    overall: DomainResult,
    domains: dict[str, DomainResult],
    reasons: list[Reason],
    rules: GateSection,
) -> Decision:
    truncated = any(reason.rule == "truncation" and not reason.passed for reason in reasons)
    worse_domain = any(result.high < -rules.margin for result in domains.values())
    if truncated or worse_domain or overall.high < 0:
        return "reject"
    return "promote" if all(reason.passed for reason in reasons) else "hold"


def _same_suite(candidate: EvalReport, other: EvalReport, role: str) -> None:
    where = f"candidate {candidate.model!r} and {role} {other.model!r}"
    if candidate.suite_digest != other.suite_digest:
        raise EvalError(
            f"{where} were evaluated on different suites: {candidate.suite!r} "
            f"({candidate.suite_digest[:12]}) and {other.suite!r} ({other.suite_digest[:12]}); "
            "evaluate both on the same suite"
        )
    if candidate.outcomes.keys() != other.outcomes.keys():
        odd = sorted(candidate.outcomes.keys() ^ other.outcomes.keys())
        raise EvalError(
            f"{where} name the same suite {candidate.suite!r} but {len(odd)} tasks have an outcome "
            f"on one side only, the first is {odd[0]!r}; evaluate both again"
        )
    if not candidate.outcomes:
        raise EvalError(f"suite {candidate.suite!r} holds no outcome; evaluate at least one task")


def _compare(
    name: str,
    ids: list[str],
    reports: tuple[EvalReport, EvalReport, EvalReport | None],
    rules: GateSection,
) -> DomainResult:
    candidate, incumbent, teacher = reports
    before = [incumbent.outcomes[i].greedy for i in ids]
    after = [candidate.outcomes[i].greedy for i in ids]
    change = paired_bootstrap(
        before,
        after,
        resamples=rules.resamples,
        confidence=rules.confidence,
        seed=_seed(candidate.suite_digest, name),
    )
    reference = None
    if teacher is not None:
        reference = sum(teacher.outcomes[i].greedy for i in ids) / len(ids)
    return DomainResult(
        teacher=reference,
        before=sum(before) / len(ids),
        after=sum(after) / len(ids),
        difference=change.mean,
        low=change.low,
        high=change.high,
        n=len(ids),
    )


def _seed(suite_digest: str, domain: str) -> int:
    return int(hashlib.sha256(f"{suite_digest}/{domain}".encode()).hexdigest()[:12], 16)


def _gain(overall: DomainResult, rules: GateSection) -> Reason:
    passed = overall.low > rules.min_gain
    if overall.high < 0:
        meaning = "it is worse"
    elif passed:
        meaning = "it is a gain"
    else:
        meaning = "it is not clearly a gain"
    return Reason(
        rule="gain",
        observed=overall.low,
        bound=rules.min_gain,
        passed=passed,
        text=f"Overall accuracy changed by {_change(overall, rules)}: {meaning}; promotion needs "
        f"a lower bound above {100 * rules.min_gain:.1f} points.",
    )


def _changed_tasks(candidate: EvalReport, incumbent: EvalReport, rules: GateSection) -> Reason:
    """A bootstrap is too sure of a gain that rests on a handful of tasks; counting is not."""
    pairs = [
        (outcome.greedy, incumbent.outcomes[task_id].greedy)
        for task_id, outcome in candidate.outcomes.items()
    ]
    better = sum(new > old for new, old in pairs)
    worse = sum(new < old for new, old in pairs)
    chance = sign_test(better, worse)
    bound = 1 - rules.confidence
    return Reason(
        rule="changed tasks",
        observed=chance,
        bound=bound,
        passed=better > worse and chance < bound,
        text=f"{better} tasks got better and {worse} worse; luck alone would split them so "
        f"unevenly with probability {_chance(chance)}, promotion needs less than {bound:.2g}.",
    )


def _no_worse(name: str, result: DomainResult, rules: GateSection) -> Reason:
    passed = result.low > -rules.margin
    allowed = f"the allowed {100 * rules.margin:.1f} points"
    if result.low > 0:
        meaning = "it is better"
    elif passed:
        meaning = f"a loss of {allowed} or more is excluded"
    elif result.high < -rules.margin:
        meaning = f"the loss is larger than {allowed}"
    else:
        meaning = f"a loss of {allowed} or more is not excluded"
    return Reason(
        rule=f"no worse/{name}",
        observed=result.low,
        bound=-rules.margin,
        passed=passed,
        text=f"{name} changed by {_change(result, rules)}: {meaning}.",
    )


def _truncation(candidate: EvalReport, rules: GateSection) -> Reason:
    cut = sum(outcome.truncated for outcome in candidate.outcomes.values())
    share = cut / len(candidate.outcomes)
    return Reason(
        rule="truncation",
        observed=share,
        bound=rules.max_truncated,
        passed=share <= rules.max_truncated,
        text=f"{cut} of {len(candidate.outcomes)} replies ({100 * share:.1f} %) ended at the token "
        f"limit; at most {100 * rules.max_truncated:.1f} % may.",
    )


def _detectable(
    candidate: EvalReport, incumbent: EvalReport, overall: DomainResult, rules: GateSection
) -> float:
    squares = sum(
        (outcome.greedy - incumbent.outcomes[task_id].greedy) ** 2
        for task_id, outcome in candidate.outcomes.items()
    )
    # Two changed tasks are added (after Agresti and Coull): no observed change does not prove that
    # none is possible. The observed gain is taken out, it does not blur a comparison.
    spread = (squares + 2) / (overall.n + 4) - overall.difference**2
    return detectable_difference(
        overall.n, min(1.0, max(spread, 2 / (overall.n + 4))), confidence=rules.confidence
    )


def _chance(probability: float) -> str:
    return "below 0.0001" if probability < 1e-4 else f"{probability:.2g}"


def _change(result: DomainResult, rules: GateSection) -> str:
    return (
        f"{_points(result.difference)} points ({100 * rules.confidence:g} % interval "
        f"{_points(result.low)} to {_points(result.high)}, n = {result.n})"
    )


def _points(share: float) -> str:
    # Adding 0.0 turns a rounded -0.0 into 0.0, so that no change reads "+0.0".
    return f"{round(100 * share, 1) + 0.0:+.1f}"
