"""vLLM Semantic Router: records of its router replay.

`original_model` is what the client asked for, `decision` the rule that matched, `selected_model`
who answered. A record that is not completed raises RowError("not_completed"), unless the option
`failures` asks for the ones that failed or were aborted. A record without a known life cycle is
read. Any `*_truncated` flag marks the turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.endings import finish_of
from distill.curriculum.importers.layers import made, tier_of
from distill.curriculum.importers.messages import (
    Message,
    answer,
    conversation,
    plain,
    tool_call,
    tool_definitions,
    written,
)
from distill.curriculum.importers.values import (
    amount,
    as_flag,
    as_table,
    count,
    flag,
    ident,
    items,
    nothing,
    number,
    parsed,
    strings,
    table,
    text,
    when,
)
from distill.curriculum.importers.verdicts import scored
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    Served,
    Status,
    Verdict,
)

_ENDED: dict[str, Status] = {"completed": "success", "aborted": "aborted", "failed": "failure"}
_UNHAPPY = frozenset({"wrong_answer", "want_different", "dissatisfied", "negative"})
_SESSION = ("session_action", "hard_lock_reason", "proposal_model", "previous_model")


class VllmRouter:
    name = "vllm_router"

    def recognises(self, row: Row) -> bool:
        return "selected_model" in row and (
            "decision" in row or "lifecycle_state" in row or "original_model" in row
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """One turn."""
        state = text(row, "lifecycle_state") or "unknown"
        kept = ("completed", "unknown", "aborted", "failed")
        if state not in (kept if context.options.get("failures") else kept[:2]):
            raise RowError("not_completed", f"lifecycle_state is {state}")
        tags: list[str] = []
        read, said, cut = _conversation(row)
        diagnostics = table(row, "route_diagnostics")
        proposal = text(diagnostics, "proposal_model")
        model = text(row, "selected_model")
        tokens_in = count(row, "prompt_tokens")
        ts = when(row, "timestamp")
        turn = context.turn(
            row,
            source_id=ident(row, "id", "request_id") or digest_of(row),
            format=self.name,
            session_id=ident(row, "session_id", "conversation_id"),
            turn_index=count(row, "turn_index"),
            ts=ts,
            trace_id=ident(row, "request_id"),
            user=ident(row, "user", "user_id"),
            scene=text(row, "category"),
            request=Request(tokens_in=tokens_in),
            prediction=made(
                Prediction,
                tier=context.tiers.of_model(proposal),
                confidence=number(row, "confidence_score"),
                router=text(row, "selection_method"),
                router_version=text(row, "recipe"),
            ),
            decision=made(
                Decision,
                tier=tier_of(row.get("decision_tier"), "decision_tier", context.tiers, tags),
                policy=_policy(diagnostics),
                reason=text(row, "decision"),
                requested_model=text(row, "original_model"),
            ),
            served=made(
                Served,
                model=model,
                tier=context.tiers.of_model(model),
                cache_hit=flag(row, "from_cache"),
            ),
            outcome=_outcome(row, state, context.options),
            messages=(*read, *said) or None,
            num_prompt=len(read) if read or said else None,
            tools=_tools(row),
            truncated=cut or _truncated(row),
            tags=tuple(tags),
        )
        return [turn]


def _policy(diagnostics: Mapping[str, Any]) -> tuple[PolicyStep, ...]:
    detail = {name: diagnostics[name] for name in _SESSION if diagnostics.get(name)}
    action = text(diagnostics, "session_action")
    if action is None:
        return ()
    applied = action.lower() not in ("none", "noop")
    return (
        PolicyStep(stage="session", applied=applied, detail=plain(detail, "route_diagnostics")),
    )


def _outcome(row: Row, state: str, options: Mapping[str, Any]) -> Outcome | None:
    status = _ENDED.get(state)
    code = _code(row)
    if code is not None:
        status = "failure" if code >= 400 else status or "success"
    signals = table(row, "signals")
    return made(
        Outcome,
        status=status,
        finish_reason=finish_of(_body(row, "response_body")),
        error=text(row, "terminal_reason") if status in ("failure", "aborted") else None,
        verdicts=tuple(_verdicts(row, options)),
        complaint=_complaint(signals),
        reask=bool(items(signals, "reask")) if signals.get("reask") is not None else None,
        latency_ms=amount(row, "duration_ms"),
        tokens_out=count(row, "completion_tokens"),
        cost=amount(row, "actual_cost"),
        baseline_cost=amount(row, "baseline_cost"),
    )


def _code(row: Row) -> int | None:
    """HTTP status of the response, also from a status line such as `200 OK`."""
    code = text(row, "response_status") if isinstance(row.get("response_status"), str) else None
    if code is not None:
        return int(code[:3]) if code[:3].isascii() and code[:3].isdigit() else None
    return count(row, "response_status")


def _complaint(signals: Mapping[str, Any]) -> bool | None:
    if signals.get("user_feedback") is None:
        return None
    return any(word in _UNHAPPY for word in strings(signals, "user_feedback"))


def _verdicts(row: Row, options: Mapping[str, Any]) -> Iterable[Verdict]:
    """The outcomes of a record: a score whose scale is known counts before the verdict's word."""
    for index, entry in enumerate(items(row, "outcomes")):
        told = as_table(entry, f"outcomes[{index}]")
        name = text(told, "target") or "outcome"
        found = scored(
            name,
            told.get("score"),
            text(told, "verdict"),
            options,
            said=text(told, "source"),
            default="system",
            ts=when(told, "timestamp"),
        )
        yield found if found.label else replace(found, label=text(told, "reason"))


def _truncated(row: Row) -> bool:
    trace = table(row, "tool_trace")
    return bool(flag(trace, "steps_truncated")) or any(
        isinstance(name, str) and name.endswith("_truncated") and value is not None
        and bool(as_flag(value, name))
        for name, value in row.items()
    )  # fmt: skip


def _body(row: Row, name: str) -> Mapping[str, Any]:
    """A body as an object. One that was cut in the middle is no JSON and has nothing to read."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = parsed(value, name)
        except RowError:
            return {}
    return value if isinstance(value, Mapping) else {}


def _tools(row: Row) -> tuple[Mapping[str, Any], ...]:
    defined = row.get("tool_definitions") or _body(row, "request_body").get("tools")
    return tool_definitions(defined, "tool_definitions") if defined else ()


def _conversation(row: Row) -> tuple[list[Message], list[Message], bool]:
    """Request, answer, and whether part of the request is missing.

    Bodies come first, then the trace of the tools. The prompt alone is only what the user said
    last: later in a session the turns before it are missing.
    """
    request, response = _body(row, "request_body"), _body(row, "response_body")
    said = answer(response, "response_body")
    unread = any(
        not nothing(row.get(name)) and not _body(row, name)
        for name in ("request_body", "response_body")
    )
    if request:
        return conversation(request, "request_body"), said, unread
    steps = items(table(row, "tool_trace"), "steps")
    if steps:
        read = _steps(steps)
        if not said and read and read[-1]["role"] == "assistant":
            said = [read.pop()]
        return read, said, unread
    prompt = text(row, "prompt")
    if prompt is None:
        return [], said, unread or bool(said)
    later = bool(count(row, "turn_index")) or row.get("previous_response_id") not in (None, "")
    return [{"role": "user", "content": prompt}], said, unread or later


def _steps(steps: list[Any]) -> list[Message]:
    """Messages of a tool trace. Calls of one role in a row are calls of one message."""
    out: list[Message] = []
    for index, entry in enumerate(steps):
        name = f"tool_trace.steps[{index}]"
        step = as_table(entry, name)
        kind, role = text(step, "type") or "", text(step, "role")
        if "result" in kind or role == "tool":
            result: Message = {
                "role": "tool",
                "content": written(
                    step.get("raw_output") or step.get("text"), f"{name}.raw_output"
                ),
            }
            if (ref := ident(step, "tool_call_id")) is not None:
                result["tool_call_id"] = ref
            out.append(result)
        elif "call" in kind or step.get("tool_name"):
            call = tool_call(step, name)
            if out and out[-1]["role"] == "assistant" and "tool_calls" in out[-1]:
                out[-1]["tool_calls"].append(call)
            else:
                said = text(step, "text") or ""
                out.append({"role": "assistant", "content": said, "tool_calls": [call]})
        else:
            known = role if role in ("system", "user", "assistant") else None
            found = known or ("assistant" if "assistant" in kind else "user")
            out.append({"role": found, "content": text(step, "text") or ""})
    return out
