"""The claims about skills and step credit, read off the packaged comparisons `skills` and `credit`.

Every seed has a base, tasks and draws of its own: a base matters more than a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev

from claims_found import Answer, Claim, Found, learned, percent, verdict
from numpy import interp

from evals.metrics import paired_bootstrap
from flows.compare_table import detectable

SEEDS = {"skills": 6, "credit": 4}


def strict(found: Found, base: str, name: str) -> Answer:
    """`verdict`, and the spread over seeds beside it: tasks are many, bases few. What is less than
    two standard errors over the seeds decides nothing."""
    answer = verdict(found.values(base), found.values(name))
    theirs = {run.seed: fmean(run.end) for run in found.runs(base)}
    gaps = [fmean(run.end) - theirs[run.seed] for run in found.runs(name)]
    error = stdev(gaps) / len(gaps) ** 0.5
    told = replace(answer, numbers=f"{answer.numbers}, standard error over seeds {100 * error:.1f}")
    return told if abs(fmean(gaps)) > 2 * error else replace(told, result="no verdict")


def per_rollout(found: Found, base: str, name: str) -> str:
    """The end of a contender against the base after as many rollouts: the base's curve between its
    two nearest points. A contender that writes hindsight has spent its tokens earlier."""
    curves = {run.seed: run.curve for run in found.runs(base)}
    gaps = []
    for run in found.runs(name):
        end, curve = run.curve[-1], curves[run.seed]
        steps = [point.step for point in curve]
        gaps.append((end.sampled or 0.0) - interp(end.step, steps, [p.sampled for p in curve]))
    error = stdev(gaps) / len(gaps) ** 0.5
    return f"for as many rollouts {100 * fmean(gaps):+.1f} (standard error {100 * error:.1f})"


def _against_grpo(found: Found, *names: str) -> Answer:
    """Whether each of these ends above GRPO, which must have learnt."""
    if not learned(found, "grpo"):
        return Answer(result="no verdict", numbers="GRPO did not learn")
    answers = {n: strict(found, "grpo", n) for n in names}
    told = [f"{n} {percent(found.values(n))}, {a.numbers}" for n, a in answers.items()]
    told += [f"{n} {per_rollout(found, 'grpo', n)}" for n in names if n.endswith("_self")]
    return Answer(
        result="; ".join(f"{n}: {a.result}" for n, a in answers.items()),
        numbers=f"GRPO {percent(found.values('grpo'))}; " + "; ".join(told),
    )


def seed(found: Found) -> Answer:
    return _against_grpo(found, "seed_oracle", "seed_self")


def opid(found: Found) -> Answer:
    return _against_grpo(found, "opid_oracle", "opid_self", "surprise")


def words(found: Found) -> Answer:
    """The same term with the order of another tag: what is left is not what the words say."""
    answers = {name: strict(found, f"{name}_random", f"{name}_oracle") for name in ("seed", "opid")}
    return Answer(
        result="; ".join(f"{n}: {a.result}" for n, a in answers.items()),
        numbers="; ".join(
            f"{n} right {percent(found.values(f'{n}_oracle'))}, of another tag "
            f"{percent(found.values(f'{n}_random'))}, {a.numbers}"
            for n, a in answers.items()
        ),
    )


def bank(found: Found) -> Answer:
    helps = strict(found, "grpo", "skillrl_fixed")
    wrong = strict(found, "grpo", "skillrl_wrong")
    without = fmean(run.withheld or 0.0 for run in found.runs("skillrl_fixed"))
    return Answer(
        result=helps.result,
        numbers=(
            f"GRPO {percent(found.values('grpo'))}; half a right bank "
            f"{percent(found.values('skillrl_fixed'))}, {helps.numbers}; withheld at the end "
            f"{100 * without:.1f} %; the same half wrong "
            f"{percent(found.values('skillrl_wrong'))}, {wrong.numbers}"
        ),
    )


def evolution(found: Found) -> Answer:
    grown = strict(found, "skillrl_fixed", "skillrl")
    without = fmean(run.withheld or 0.0 for run in found.runs("skillrl"))
    added = fmean(run.skills_added for run in found.runs("skillrl"))
    return Answer(
        result=grown.result,
        numbers=(
            f"fixed {percent(found.values('skillrl_fixed'))}, growing "
            f"{percent(found.values('skillrl'))}, {grown.numbers}; {added:.1f} skills added; "
            f"withheld at the end {100 * without:.1f} %"
        ),
    )


def turns(found: Found) -> Answer:
    """Fewer turns of the greedy attempt than GRPO, on the same tasks."""
    results, told = [], []
    for name in ("gigpo", "g2po"):
        ours, theirs = (
            [turns for run in found.runs(n) for turns in run.end_turns] for n in (name, "grpo")
        )
        change = paired_bootstrap(theirs, ours)
        seen = detectable(theirs, ours)
        success = strict(found, "grpo", name)
        if change.high < 0:
            result = "reproduced"
        elif change.low > 0:
            result = "the opposite"
        else:
            result = "no verdict" if seen > abs(change.mean) else "not reproduced"
        results.append(f"{name}: {result}")
        told.append(
            f"{name} {fmean(ours):.2f} turns against {fmean(theirs):.2f}: {change.mean:+.2f} "
            f"[{change.low:+.2f}, {change.high:+.2f}], detectable {seen:.2f}; success "
            f"{percent(found.values(name))}, {success.numbers}"
        )
    return Answer(result="; ".join(results), numbers="; ".join(told))


def _claim(
    method: str, text: str, judge: Callable[[Found], Answer], comparison: str = "skills"
) -> Claim:
    return Claim(
        method=method, text=text, judge=judge, comparison=comparison, seeds=SEEDS[comparison]
    )


SKILL_CLAIMS: dict[str, Claim] = {
    "seed": _claim("seed", "more success than GRPO for the same tokens, no skill shown", seed),
    "opid": _claim("opid", "more success than GRPO for the same tokens, no skill shown", opid),
    "words": _claim("seed, opid", "what the skill says matters, not only that there is one", words),
    "bank": _claim("grpo", "a bank in the prompt helps (SkillRL)", bank),
    "evolution": _claim("grpo", "a bank that grows from failures helps more (SkillRL)", evolution),
    "turns": _claim("grpo", "step credit saves turns (GiGPO, G2PO)", turns, "credit"),
}
