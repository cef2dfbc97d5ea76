"""OpenSquilla: rows of the SQLite table `router_decisions`, and lines of `decisions-YYYYMMDD`.

The table has the tier that the classifier proposed, the trail of policy steps and the tier that was
decided. The lines have tokens, costs and digests of the same calls. A line names its row as the
call that it happened inside of, so that the row's decision and the line's outcome belong together
where both are imported. Neither holds text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.layers import made, probs_of, steps_of, tier_of
from distill.curriculum.importers.values import (
    amount,
    count,
    ident,
    number,
    share,
    strings,
    table,
    text,
    when,
)
from distill.curriculum.importers.verdicts import rating
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    Served,
    Verdict,
)

_RATINGS = ("rating", "user_rating", "vote", "feedback")


class OpenSquilla:
    name = "opensquilla"

    def recognises(self, row: Row) -> bool:
        return "session_key" in row and ("decision_id" in row or "turn_id" in row)

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """One turn."""
        line = "turn_id" in row or "pipeline_steps" in row
        return [_of_line(row, context) if line else _of_row(row, context)]


def _of_row(row: Row, context: Context) -> Found:
    tags = list(strings(row, "flags"))
    reason = text(row, "fallback_reason")
    if reason is not None:
        tags.append(f"fallback:{reason}")
    policy = steps_of(row.get("trail"), "trail")
    model = text(row, "executed_model", "model")
    return context.turn(
        row,
        source_id=ident(row, "decision_id") or digest_of(row),
        format=OpenSquilla.name,
        session_id=ident(row, "session_key"),
        turn_index=count(row, "turn_index"),
        ts=when(row, "ts_ms", unit="ms"),
        prediction=made(
            Prediction,
            tier=tier_of(row.get("proposed_tier"), "proposed_tier", context.tiers, tags),
            probs=probs_of(row.get("probs"), "probs", context.tiers),
            confidence=share(row, "confidence"),
            router=text(row, "classifier"),
            router_version=ident(row, "classifier_version"),
        ),
        decision=made(
            Decision,
            tier=tier_of(row.get("final_tier"), "final_tier", context.tiers, tags),
            policy=policy,
            reason=text(row, "source"),
            requested_model=text(row, "requested_model"),
        ),
        served=made(
            Served,
            model=model,
            provider=text(row, "executed_provider", "provider"),
            tier=context.tiers.of_model(model),
            kind=_kind(row),
            fallback_hops=count(row, "fallback_hops"),
        ),
        outcome=made(
            Outcome,
            verdicts=_ratings(row, context.options),
            complaint=_complained(policy),
        ),
        tags=tuple(tags),
    )


def _of_line(row: Row, context: Context) -> Found:
    tags = [f"skill:{name}" for name in strings(row, "skills_invoked")]
    policy = steps_of(row.get("pipeline_steps"), "pipeline_steps", name="step_name")
    routed = [step for step in policy if step.applied and step.detail.get("routed_tier")]
    savings = table(row, "savings")
    model = text(row, "model")
    last = routed[-1].detail if routed else {}
    return context.turn(
        row,
        source_id=ident(row, "turn_id") or digest_of(row),
        format=OpenSquilla.name,
        session_id=ident(row, "session_key", "session_id"),
        turn_index=count(row, "turn_index"),
        ts=when(row, "ts", "ts_ms"),
        trace_id=ident(row, "trace_id"),
        parent_id=ident(row, "decision_id"),
        request=Request(
            prompt_sha256=text(row, "prompt_hash"),
            tools_sha256=text(row, "tool_list_hash"),
            tokens_in=count(row, "tokens_input"),
        ),
        prediction=made(Prediction, confidence=share(savings, "routing_confidence")),
        decision=made(
            Decision,
            tier=tier_of(last.get("routed_tier"), "routed_tier", context.tiers, tags),
            policy=policy,
            reason=text(last, "routing_source"),
            requested_model=text(savings, "routed_model"),
        ),
        served=made(
            Served,
            model=model,
            provider=text(row, "provider"),
            tier=context.tiers.of_model(model),
        ),
        outcome=made(
            Outcome,
            verdicts=_ratings(row, context.options),
            complaint=_complained(policy),
            latency_ms=amount(row, "latency_ms"),
            tokens_out=count(row, "tokens_output"),
            cost=number(savings, "cost_usd"),
        ),
        tags=tuple(tags),
    )


def _kind(row: Row) -> str | None:
    """None for a kind that is not known."""
    kind = text(row, "executed_kind")
    return kind if kind in ("single", "ensemble") else None


def _complained(policy: Iterable[PolicyStep]) -> bool | None:
    """Whether the user's message complained; None where that step did not run."""
    for step in policy:
        if step.stage == "complaint_upgrade":
            return step.applied
    return None


def _ratings(row: Row, options: Mapping[str, Any]) -> tuple[Verdict, ...]:
    return tuple(
        rating(row[name], name, options) for name in _RATINGS if row.get(name) not in (None, "")
    )
