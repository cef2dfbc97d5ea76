"""OpenRouter: generation stats, bare or inside `data`. They hold no text and no prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.layers import made
from distill.curriculum.importers.values import amount, count, flag, ident, items, text, when
from distill.curriculum.records import Decision, Outcome, Request, Served, Status

_KEYS = ("tokens_prompt", "native_tokens_prompt")


class OpenRouter:
    name = "openrouter"

    def recognises(self, row: Row) -> bool:
        inner = row.get("data")
        if isinstance(inner, Mapping):
            row = inner
        return any(key in row for key in _KEYS)

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """One turn. The provider's own token counts come before the normalised ones."""
        inner = row.get("data")
        if isinstance(inner, Mapping):
            row = inner
        model, asked = text(row, "model"), text(row, "router")
        latency, ttft = _times(row)
        answers = items(row, "provider_responses")
        turn = context.turn(
            row,
            source_id=ident(row, "id") or digest_of(row),
            format=self.name,
            session_id=ident(row, "session_id"),
            ts=when(row, "created_at"),
            user=ident(row, "external_user"),
            request=Request(tokens_in=count(row, "native_tokens_prompt", "tokens_prompt")),
            decision=made(Decision, tier=context.tiers.of_model(asked), requested_model=asked),
            served=made(
                Served,
                model=model,
                provider=text(row, "provider_name"),
                tier=context.tiers.of_model(model),
                fallback_hops=len(answers) - 1 if answers else None,
            ),
            outcome=made(
                Outcome,
                status=_status(row),
                finish_reason=text(row, "finish_reason", "native_finish_reason"),
                latency_ms=latency,
                ttft_ms=ttft,
                tokens_out=count(row, "native_tokens_completion", "tokens_completion"),
                reasoning_tokens=count(row, "native_tokens_reasoning"),
                cost=amount(row, "total_cost"),
            ),
        )
        return [turn]


def _status(row: Row) -> Status | None:
    if flag(row, "cancelled"):
        return "aborted"
    reason = text(row, "finish_reason")
    if reason is None:
        return None
    return "failure" if reason == "error" else "success"


def _times(row: Row) -> tuple[float | None, float | None]:
    """Time to the end and to the first token. `latency` is documented as the whole time, yet rows
    have more `generation_time` than it: there it is the wait before the first token."""
    latency, writing = amount(row, "latency"), amount(row, "generation_time")
    if latency is None or writing is None or latency >= writing:
        return latency, None
    return latency + writing, latency
