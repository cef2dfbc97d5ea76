"""Watches every step of a stage for the ways in which training collapses.

Ten measures, each against a limit for a warning and one that ends the stage (`[monitor]`). All are
read from the step's row of metrics, so watching costs nothing; a measure that a step does not have
is not judged. What is remembered between steps is JSON and part of every checkpoint: a resumed
stage warns and ends at the same step as an unbroken one.

What step s shows was made by the weights after step s - 1. When a limit is first passed at step s,
the last weights that were seen healthy are those after step s - 2: a stage that ends here goes back
to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from distill.sections import LENIENT, STRICT, MonitorSection

State = Mapping[str, Any]
Side = Literal["below", "above"]

WARN_AFTER = 3
"""Steps in a row past a limit before a warning: one odd batch is none."""
RISE = 0.1
"""Replies that are cut from the start on are a setting; only this much more is a collapse."""
TINY_START = 1e-3
"""A start below it says nothing as a unit of comparison."""
NORMS = 50
"""Gradient norms behind the running median; it is used from `MIN_NORMS` on."""
MIN_NORMS = 10
SMALL_NORM = 1.0
"""A jump to at most this norm is harmless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    text: str
    side: Side = "above"
    """Where trouble lies."""
    relative: bool = False
    """The value is a share of the start."""
    warn_after: int = WARN_AFTER


MEASURES: dict[str, Measure] = {
    "entropy": Measure(text="entropy, as a share of its start,", side="below", relative=True),
    "distinct": Measure(
        text="share of distinct replies, as a share of its start,", side="below", relative=True
    ),
    "truncated": Measure(text="share of replies cut at the token limit"),
    "repeated": Measure(text="share of replies caught in a loop"),
    "length": Measure(text="mean reply length, as a factor of its start,", relative=True),
    "grad_norm": Measure(text="gradient norm"),
    "grad_jump": Measure(text="gradient norm, as a multiple of its median,", warn_after=1),
    "advantage": Measure(text="size of the outer advantages"),
    "mass": Measure(text="student's probability on the support", side="below"),
    "negative": Measure(text="share of negative divergences"),
}
"""Every measure; its name is the key in [monitor.warn] and [monitor.abort]."""
DETERMINISM = ("entropy", "distinct")
"""Also what a student that has learnt its task looks like: the reward tells the two apart."""
_RELATIVE = tuple(name for name, measure in MEASURES.items() if measure.relative)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collapse:
    """Why a stage ended before its last step, and where it goes back to."""

    stage: str
    step: int
    """The step at which patience ended."""
    since: int
    """The first step of the row of steps past the limit."""
    measure: str
    value: float
    limit: float
    text: str
    """The same in words."""
    action: Literal["fail", "stop"]
    warnings: tuple[str, ...] = ()

    @property
    def healthy_step(self) -> int:
        """The last step after which the weights were seen to be healthy; 0 is the very start."""
        return max(0, self.since - 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one step adds."""

    state: State
    warnings: tuple[str, ...] = ()
    """Each measure's first warning of the stage."""
    collapse: Collapse | None = None

    @property
    def is_suspect(self) -> bool:
        """A limit that may end the stage is passed right now: keep the older checkpoints."""
        return bool(self.state.get("past"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Monitor:
    """The rules of one stage. `guarded`: its objective ends in a collapse by nature."""

    options: MonitorSection
    stage: str
    guarded: bool = False

    @property
    def mode(self) -> str:
        if self.options.mode != "auto":
            return self.options.mode
        return "strict" if self.guarded else "lenient"

    @property
    def patience(self) -> int:
        return self.options.patience or (5 if self.mode == "strict" else 10)

    @property
    def action(self) -> Literal["fail", "stop"]:
        if self.options.on_abort == "auto":
            return "stop" if self.guarded else "fail"
        return self.options.on_abort

    @property
    def can_abort(self) -> bool:
        return bool(self._rules())

    def watch(self, step: int, row: Mapping[str, float], state: State) -> Finding:
        """Judge the metrics of step 1, 2, ...; `state` is what the step before returned."""
        if self.mode == "off":
            return Finding(state=state)
        raw = _read(row)
        start, norms = state.get("start", {}), state.get("norms", [])
        seen = _compare(raw, start, norms)
        better = raw.get("reward", 0.0) > _mean(start, "reward", math.inf)
        warned, texts = self._warn(step, seen, better, state.get("warned", {}))
        if seen.get("truncated", 0.0) <= _mean(start, "truncated", math.inf) + RISE:
            seen.pop("truncated", None)  # worth a warning at most
        past = self._past(step, seen, better, state.get("past", {}))
        if not past:  # else a collapse in the first steps would become what it is measured by
            start = self._extended(start, raw)
        norms = [*norms, *([raw["grad_norm"]] if "grad_norm" in raw else [])][-NORMS:]
        new = {"start": start, "norms": norms, "warned": warned, "past": past}
        return Finding(state=new, warnings=texts, collapse=self._collapse(step, seen, new))

    def warnings(self, state: State, num_steps: int) -> tuple[str, ...]:
        """Every measure that was warned of, and in how many steps it was past its limit."""
        return tuple(
            f"{found['text']}; past it in {found['count']} of {num_steps} steps, "
            f"at worst {found['worst']:.3g}"
            for found in state.get("warned", {}).values()
            if found["text"]
        )

    # -- the parts of `watch` ----------------------------------------------------------------

    def _extended(
        self, start: Mapping[str, list[float]], raw: Mapping[str, float]
    ) -> dict[str, list[float]]:
        """[sum, count] of the first steps, this one included while they are few."""
        out = {name: list(known) for name, known in start.items()}
        for name in (*_RELATIVE, "truncated", "reward"):
            total, count = out.get(name, (0.0, 0))
            if name in raw and count < self.options.start_steps:
                out[name] = [total + raw[name], count + 1]
        return out

    def _warn(
        self, step: int, seen: Mapping[str, float], better: bool, before: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        warned: dict[str, Any] = {name: dict(found) for name, found in before.items()}
        texts = []
        for name, limit in asdict(self.options.warn).items():
            learnt = better and name in DETERMINISM
            if learnt or not _is_past(name, seen.get(name), limit):
                if name in warned:
                    warned[name]["row"] = 0
                continue
            value, worse = seen[name], min if MEASURES[name].side == "below" else max
            found = warned.setdefault(name, {"row": 0, "count": 0, "worst": value, "text": ""})
            found["row"] += 1
            found["count"] += 1
            found["worst"] = worse(found["worst"], value)
            if not found["text"] and found["row"] >= MEASURES[name].warn_after:
                found["text"] = f"stage {self.stage}, step {step}: {_said(name, value, limit)}"
                texts.append(found["text"])
        return warned, tuple(texts)

    def _rules(self) -> dict[str, dict[str, float]]:
        """Limits that end the stage: a rule fires when all its measures are past theirs."""
        if self.mode in ("off", "warn"):
            return {}
        limits: dict[str, float] = dict(STRICT if self.mode == "strict" else LENIENT)
        limits |= {n: v for n, v in asdict(self.options.abort).items() if v is not None}
        limits = {name: limit for name, limit in limits.items() if limit > 0}
        if self.mode == "lenient" and all(name in limits for name in DETERMINISM):
            together = {name: limits.pop(name) for name in DETERMINISM}
            return {"entropy": together, **{n: {n: v} for n, v in limits.items()}}
        return {name: {name: limit} for name, limit in limits.items()}

    def _past(
        self, step: int, seen: Mapping[str, float], better: bool, before: Mapping[str, int]
    ) -> dict[str, int]:
        """Rule -> first step of the row of steps that are past it, this one included."""
        forgiven = LENIENT if better and self.mode == "lenient" else {}
        return {
            name: before.get(name, step)
            for name, rule in self._rules().items()
            if name not in forgiven
            and all(_is_past(n, seen.get(n), limit) for n, limit in rule.items())
        }

    def _collapse(self, step: int, seen: Mapping[str, float], state: State) -> Collapse | None:
        for name, since in state["past"].items():
            if step - since + 1 < self.patience:
                continue
            rule = self._rules()[name]
            what = " and the ".join(_said(n, seen[n], limit) for n, limit in rule.items())
            return Collapse(
                stage=self.stage,
                step=step,
                since=since,
                measure=name,
                value=seen[name],
                limit=rule[name],
                text=f"stage {self.stage} collapsed: at step {step} the {what}, "
                f"and so in every step since {since}",
                action=self.action,
                warnings=self.warnings(state, step),
            )
        return None


def _read(row: Mapping[str, float]) -> dict[str, float]:
    """The raw numbers of a step that measures are made of."""

    def of(ending: str) -> list[float]:
        return [value for key, value in row.items() if key.endswith(ending)]

    outer = [abs(v) for q in ("p5", "p95") for v in of(f"/advantage_at/{q}")]
    found = {
        "entropy": row.get("entropy", row.get("rollout/surprise")),
        "distinct": row.get("rollout/distinct_share"),
        "truncated": row.get("rollout/truncated_share"),
        "repeated": row.get("rollout/repeat_share"),
        "length": row.get("rollout/tokens_mean"),
        "grad_norm": row.get("grad_norm"),
        "reward": row.get("reward/mean"),
        "advantage": max(outer, default=None),
        "mass": min(of("/student_mass"), default=None),
        "negative": max(of("/negative_share"), default=None),
    }
    return {n: float(v) for n, v in found.items() if v is not None and math.isfinite(v)}


def _compare(
    raw: Mapping[str, float], start: Mapping[str, list[float]], norms: Sequence[float]
) -> dict[str, float]:
    """Values as they are judged: compared with the start, or with the usual gradient norm."""
    seen = {n: v for n, v in raw.items() if n in MEASURES and not MEASURES[n].relative}
    for name in _RELATIVE:
        usual = _mean(start, name, 0.0)
        if name in raw and usual > TINY_START:
            seen[name] = raw[name] / usual
    if seen.get("length", 0.0) > 0.0:
        seen["length"] = max(seen["length"], 1.0 / seen["length"])
    usual = median(norms) if len(norms) >= MIN_NORMS else 0.0
    if usual > 0.0 and raw.get("grad_norm", 0.0) > SMALL_NORM:
        seen["grad_jump"] = raw["grad_norm"] / usual
    return seen


def _is_past(name: str, value: float | None, limit: float) -> bool:
    if value is None or limit <= 0:
        return False
    return value < limit if MEASURES[name].side == "below" else value > limit


def _said(name: str, value: float, limit: float) -> str:
    measure = MEASURES[name]
    return f"{measure.text} is {value:.3g}, {measure.side} {limit:g}"


def _mean(start: Mapping[str, list[float]], name: str, default: float) -> float:
    total, count = start.get(name, (0.0, 0))
    return total / count if count else default
