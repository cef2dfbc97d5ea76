"""Each method's main claim in miniature, on the generated world: `make replicate`.

    python benchmarks/replicate.py [--only bounded,beyond] [--home FOLDER] [--jobs 2]

A claim is a comparison (`claims/NAME.toml`, over the packaged comparison `compare`, or another
packaged one) whose settings are fixed before the run, and a rule here or in `skill_claims.py` that
reads the answer off the results. A claim that was interrupted continues; a finished one is read
from disk. What was found goes into `distill/objectives/replications.json` and from there into the
table of objectives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pvariance

from claims_found import Answer, Claim, Found, learned, percent, verdict
from skill_claims import SKILL_CLAIMS

from distill.errors import ConfigError
from distill.objectives.table import README, REPLICATIONS, render
from distill.rundir import atomic_write, read_jsonl
from evals.compare_page_facts import Results
from evals.metrics import paired_bootstrap
from flows.compare import run_comparison
from flows.compare_config import Comparison, choose, load_comparison
from flows.compare_places import Places
from flows.compare_suite import build_suite
from flows.progress import open_progress

CLAIMS = Path(__file__).parent / "claims"


def _to_level(found: Found, name: str, unit: str) -> list[float | None]:
    """Per seed, steps or tokens of the first point at the level."""
    level = found.results.level
    return [
        next(
            (float(getattr(p, unit)) for p in run.curve if (p.sampled or 0.0) >= level),
            None,
        )
        for run in found.runs(name)
    ]


def sooner(found: Found, slow: str, fast: str, unit: str) -> Answer:
    """Whether `fast` reaches the level earlier than `slow` in every seed."""
    ours, theirs = _to_level(found, fast, unit), _to_level(found, slow, unit)
    told = f"{fast} {_list(ours)}, {slow} {_list(theirs)} {unit}"
    if any(x is None for x in theirs):
        return Answer(result="no verdict", numbers=f"{told}: the baseline did not arrive")
    wins = [x is not None and y is not None and x < y for x, y in zip(ours, theirs, strict=True)]
    if all(wins):
        return Answer(result="reproduced", numbers=told)
    return Answer(result="no verdict" if any(wins) else "the opposite", numbers=told)


def _list(values: Sequence[float | None]) -> str:
    return " / ".join("never" if v is None else f"{v:,.0f}" for v in values)


def bounded(found: Found) -> Answer:
    plain, power = (found.series(n, "grad_norm") for n in ("opd", "power_opd"))
    means = [fmean(x) / fmean(y) for x, y in zip(power, plain, strict=True)]
    spreads = [pvariance(x) / pvariance(y) for x, y in zip(power, plain, strict=True)]
    accuracy = verdict(found.values("opd"), found.values("power_opd"))
    calm = all(ratio < 1.0 for ratio in (*means, *spreads))
    result = "reproduced" if calm else "not reproduced"
    if calm and accuracy.result != "reproduced":
        result = f"gradient: reproduced; accuracy: {accuracy.result}"
    return Answer(
        result=result,
        numbers=(
            f"gradient norm {fmean(means):.2f} and its variance {fmean(spreads):.3f} of OPD's; "
            f"accuracy {percent(found.values('power_opd'))} against "
            f"{percent(found.values('opd'))}: {accuracy.numbers}"
        ),
    )


def full(found: Found) -> Answer:
    steps = sooner(found, "opd", "gkd", "step")
    end = verdict(found.values("opd"), found.values("gkd"))
    return Answer(result=steps.result, numbers=f"{steps.numbers}; at the end {end.numbers}")


def beyond(found: Found) -> Answer:
    plain = verdict(found.values("opd"), found.values("exopd"))
    strong = verdict(found.values("opd"), found.values("exopd_1.5"))
    experts = fmean(
        fmean((own["expert_rule"]["rule"], own["expert_rule2"]["rule2"]))
        for own in found.results.teachers.values()
    )
    ends = {n: fmean(found.values(n)) for n in ("opd", "exopd", "exopd_1.5")}
    passes = ends["exopd"] > experts
    result = plain.result if passes or plain.result != "reproduced" else "passes OPD only"
    told = ", ".join(f"{n} {100 * v:.1f} %" for n, v in ends.items())
    return Answer(
        result=result,
        numbers=(
            f"experts on their own domains {100 * experts:.1f} %; {told}; 1.25 against OPD "
            f"{plain.numbers}; 1.5 against OPD {strong.numbers}"
        ),
    )


def irreducible(found: Found) -> Answer:
    gain = verdict(found.values("rlsd", "start"), found.values("rlsd"))
    loss = verdict(found.values("opsd"), found.values("opsd", "start"))
    marks = {
        name: max((max(s) for s in found.series(name, "leak/marked_share") if s), default=0.0)
        for name in ("opsd", "rlsd")
    }
    apart = verdict(found.values("opsd"), found.values("rlsd"))
    return Answer(
        result=f"gains: {gain.result}; above OPSD: {apart.result}; OPSD declines: {loss.result}",
        numbers=(
            f"RLSD gains {gain.numbers}; OPSD loses {loss.numbers}; RLSD against OPSD "
            f"{apart.numbers}; replies that show a mark of the hint, at most: OPSD "
            f"{100 * marks['opsd']:.2f} %, RLSD {100 * marks['rlsd']:.2f} %"
        ),
    )


def polarity(found: Found) -> Answer:
    if not learned(found, "grpo"):
        return Answer(result="no verdict", numbers="GRPO did not learn")
    gain = verdict(found.values("grpo"), found.values("anti_sd"))
    gate = verdict(found.values("anti_sd_0.5_no_gate"), found.values("anti_sd_0.5"))
    ends = {
        name: percent(found.values(name))
        for name in ("grpo", "anti_sd", "anti_sd_no_gate", "anti_sd_0.5", "anti_sd_0.5_no_gate")
    }
    told = ", ".join(f"{name} {value}" for name, value in ends.items())
    return Answer(
        result=f"above GRPO: {gain.result}; the gate saves: {gate.result}",
        numbers=f"{told}; 0.1 against GRPO {gain.numbers}; gate at 0.5 {gate.numbers}",
    )


def economy(found: Found) -> Answer:
    parts = {n: sooner(found, "grpo", n, "tokens") for n in ("opsd", "opsd_alone", "sdpo")}
    told = "; ".join(f"{name}: {part.result} ({part.numbers})" for name, part in parts.items())
    return Answer(
        result=f"OPSD: {parts['opsd_alone'].result}; SDPO: {parts['sdpo'].result}", numbers=told
    )


def forgetting(found: Found) -> Answer:
    if not learned_in(found, "sft", "rule2"):
        return Answer(result="no verdict", numbers="SFT did not learn the second task")
    reads = fmean(run.kept.start for run in found.results.runs if run.kept is not None)
    if reads < 0.9:
        told = f"the self-teacher solves only {100 * reads:.0f} % of hinted tasks"
        return Answer(result="no verdict", numbers=told)
    kept = verdict(found.values("sft", domain="rule"), found.values("sdft", domain="rule"))
    new = verdict(found.values("sft", domain="rule2"), found.values("sdft", domain="rule2"))
    old = percent(found.values("sft", "start", "rule"))
    return Answer(
        result=kept.result,
        numbers=(
            f"first task {old} before, {percent(found.values('sft', domain='rule'))} after SFT, "
            f"{percent(found.values('sdft', domain='rule'))} after SDFT: {kept.numbers}; second "
            f"task {percent(found.values('sft', domain='rule2'))} and "
            f"{percent(found.values('sdft', domain='rule2'))}: {new.numbers}"
        ),
    )


def learned_in(found: Found, name: str, domain: str) -> bool:
    before, after = (found.values(name, which, domain) for which in ("start", "end"))
    return bool(paired_bootstrap(before, after).low > 0)


def text(found: Found) -> Answer:
    gain = verdict(found.values("omni_opd", "start"), found.values("omni_opd"))
    apart = verdict(found.values("opd"), found.values("omni_opd"))
    return Answer(
        result=gain.result,
        numbers=f"gains {gain.numbers}; against OPD, which sees probabilities, {apart.numbers}",
    )


def guard(found: Found) -> Answer:
    told, good = [], []
    for name in ("opsa", "opsa_fixed"):
        for run, entropy in zip(found.runs(name), found.series(name, "entropy"), strict=True):
            share = entropy[-1] / entropy[0]
            good.append(run.stopped is not None and share < 1.0)
            told.append(f"{name} {run.seed}: {100 * share:.0f} % after {run.steps} steps")
    result = "reproduced" if all(good) else "not reproduced" if not any(good) else "in part"
    return Answer(result=result, numbers="entropy left, " + ", ".join(told))


ALL: dict[str, Claim] = {
    "bounded": Claim(
        method="power_opd",
        text="smaller and steadier gradients than log-ratio OPD, and more accurate",
        judge=bounded,
    ),
    "beyond": Claim(
        method="g_opd",
        text="ExOPD (1.25) merges two experts and passes OPD and the experts",
        judge=beyond,
    ),
    "irreducible": Claim(
        method="rlsd",
        text="keeps gaining where OPSD imitates a hint that cannot be learnt",
        judge=irreducible,
    ),
    "polarity": Claim(
        method="anti_sd",
        text="above GRPO where trying again pays; its gate saves it",
        judge=polarity,
    ),
    "economy": Claim(
        method="opsd, sdpo", text="fewer sampled tokens than GRPO to 50 %", judge=economy
    ),
    "forgetting": Claim(
        method="sdft", text="forgets less of a first task than SFT", judge=forgetting
    ),
    "text": Claim(method="omni_opd", text="learns from a teacher's words alone", judge=text),
    "guard": Claim(
        method="opsa", text="entropy falls until the guard stops the stage", judge=guard
    ),
    "full": Claim(
        method="gkd",
        text="the whole vocabulary needs fewer steps than the sampled token",
        judge=full,
    ),
    **SKILL_CLAIMS,
}


def comparison_of(name: str) -> Comparison:
    """The comparison that a claim is read off; its settings stand in a file."""
    claim = ALL[name]
    if not claim.comparison:
        return load_comparison(["compare", str(CLAIMS / f"{name}.toml")])
    return choose(load_comparison([claim.comparison]), num_seeds=claim.seeds)


def look(comparison: Comparison, places: Places, results: Results) -> Found:
    rows = {
        (run.contender, run.seed): read_jsonl(
            places.run(run.contender, run.seed).path / "steps.jsonl"
        )
        for run in results.runs
    }
    domains = {
        seed: [task.domain for task in build_suite(comparison, seed).tasks]
        for seed in comparison.settings.seeds
    }
    return Found(results=results, rows=rows, domains=domains)


def record(name: str, claim: Claim, found: Found, answer: Answer) -> None:
    """Put one answer into the table of objectives, in place of an earlier one."""
    results = found.results
    entry = {
        "name": name,
        "method": claim.method,
        "claim": claim.text,
        "result": answer.result,
        "numbers": f"{answer.numbers} ({len(results.seeds)} seeds x {results.num_tasks} tasks)",
    }
    known = {e["name"]: e for e in json.loads(REPLICATIONS.read_text(encoding="utf-8"))}
    known[name] = entry
    ordered = [known[key] for key in ALL if key in known]
    atomic_write(REPLICATIONS, json.dumps(ordered, indent=2, ensure_ascii=False) + "\n")
    atomic_write(README, render())


def main() -> int:
    parser = argparse.ArgumentParser(description="The claims of the methods, in miniature.")
    parser.add_argument("--only", default="", help=f"claims, joined by commas: {', '.join(ALL)}")
    parser.add_argument("--home", type=Path, default=Path("replications"))
    parser.add_argument("--jobs", type=int, default=2, help="contenders at the same time")
    args = parser.parse_args()
    names = [n for n in args.only.split(",") if n] or list(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise ConfigError(f"no claim is called {unknown[0]!r}; there are {', '.join(ALL)}")
    for name in names:
        began = time.monotonic()
        comparison = comparison_of(name)
        places = Places(out=args.home / (ALL[name].comparison or name), home=args.home)
        with open_progress() as progress:
            results = run_comparison(comparison, places=places, progress=progress, jobs=args.jobs)
        found = look(comparison, places, results)
        answer = ALL[name].judge(found)
        record(name, ALL[name], found, answer)
        seconds = time.monotonic() - began
        print(f"{name}: {answer.result}\n  {answer.numbers}\n  {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
