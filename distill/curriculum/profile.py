"""Six judgements of a user turn, each with the messages that they rest on.

A dimension is PASS, WARN, FAIL or NOT_EVALUATED, with the share of it that was looked at. Rules
that cannot be argued with come first: what is missing, malformed or cut off, what a tool said,
whether a requested format was kept. A judge may fill in what they leave open and lower what they
pass; it never lifts anything. Nothing that failed or was not looked at becomes a PASS, and the six
are never made into one number. Source: NeoHorse-1, arXiv 2609.08183.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from distill.curriculum.formats import broken_formats, is_refusal
from distill.curriculum.messages import message_text, tool_calls
from distill.curriculum.outcomes import Judged, changes_something
from distill.curriculum.toolchecks import ToolUse, claims_success, tool_uses
from distill.curriculum.turns import UserTurn

if TYPE_CHECKING:
    from distill.curriculum.structure import Structure

Grade = Literal["PASS", "WARN", "FAIL", "NOT_EVALUATED"]
Dimension = Literal[
    "goal_attainment",
    "instruction_adherence",
    "tool_use",
    "evidence_consistency",
    "error_recovery",
    "termination",
]
DIMENSIONS: tuple[Dimension, ...] = (
    "goal_attainment",
    "instruction_adherence",
    "tool_use",
    "evidence_consistency",
    "error_recovery",
    "termination",
)
_WORST_FIRST: tuple[Grade, ...] = ("FAIL", "WARN", "NOT_EVALUATED", "PASS")
_STOPPED = frozenset(("stop", "end_turn", "eos", "stop_sequence", "complete", "completed", "end"))
_CUT = frozenset(("length", "max_tokens", "max_output_tokens", "model_length"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One dimension of a turn."""

    grade: Grade = "NOT_EVALUATED"
    coverage: float = 0.0
    """Share of what the dimension asks that was looked at, 0 to 1."""
    evidence: tuple[int, ...] = ()
    """Where in the messages of the turn it can be seen."""
    reason: str = ""
    by: Literal["rules", "judge"] = "rules"


NOTHING = Finding()
Profile = Mapping[Dimension, Finding]
"""A finding for every dimension."""


def check(turn: UserTurn, judged: Judged, structure: Structure | None = None) -> Profile:
    """What rules can say about a turn; what they cannot decide is NOT_EVALUATED."""
    if not turn.messages or turn.start < 0 or turn.truncated:
        why = "the log cut the text" if turn.truncated else "the log has no text of the turn"
        none = {name: Finding(reason=why) for name in DIMENSIONS}
        return none | {"goal_attainment": _goal(turn, judged)}
    uses = tool_uses(turn)
    broken = structure is not None and structure.verdict == "quarantined"
    problems = ", ".join(structure.problems) if structure is not None else ""
    here = (len(turn.messages) - 1,)
    found = {
        "goal_attainment": _goal(turn, judged),
        "instruction_adherence": _instructions(turn),
        "tool_use": _tools(uses),
        "evidence_consistency": _claims(turn, uses),
        "error_recovery": _recovery(turn, uses),
        "termination": _ending(turn, structure),
    }
    if broken:
        fault = Finding(grade="FAIL", coverage=1.0, evidence=here, reason=f"structure: {problems}")
        found |= {"tool_use": fault, "termination": fault}
    return {name: found[name] for name in DIMENSIONS}


def merge(profile: Profile, opinion: Profile) -> Profile:
    """The profile after a judge: it fills in what was not evaluated and may lower the rest.

    Of two grades the worse stays, with its evidence. An opinion without evidence counts for
    nothing.
    """
    out: dict[Dimension, Finding] = {}
    for name in DIMENSIONS:
        ours, theirs = profile.get(name, NOTHING), opinion.get(name, NOTHING)
        useless = theirs.grade == "NOT_EVALUATED" or not theirs.evidence
        if useless:
            out[name] = ours
        elif ours.grade == "NOT_EVALUATED":
            out[name] = replace(theirs, by="judge")
        else:
            lower = _WORST_FIRST.index(theirs.grade) < _WORST_FIRST.index(ours.grade)
            out[name] = replace(theirs, by="judge") if lower else ours
    return out


def combine(segments: Sequence[Profile]) -> Profile:
    """One profile of the parts of a turn: of each dimension the worst, where a part that was not
    evaluated is better than a warning and worse than a pass. Evidence adds up; coverage is the
    mean."""
    out: dict[Dimension, Finding] = {}
    for name in DIMENSIONS:
        parts = [segment.get(name, NOTHING) for segment in segments]
        if not parts:
            out[name] = NOTHING
            continue
        worst = min(parts, key=lambda part: _WORST_FIRST.index(part.grade))
        same = [part for part in parts if part.grade == worst.grade]
        out[name] = replace(
            worst,
            coverage=sum(part.coverage for part in parts) / len(parts),
            evidence=tuple(sorted({i for part in same for i in part.evidence})),
        )
    return out


def admissible(profile: Profile, judged: Judged) -> tuple[bool, str | None]:
    """Whether a turn may be imitated, else the reason as a key of the table of dropped rows.

    It must have succeeded, and no dimension may have failed.
    """
    if judged.result != "success":
        return False, "failed_outcome" if judged.result == "failure" else "unknown_outcome"
    if any(profile.get(name, NOTHING).grade == "FAIL" for name in DIMENSIONS):
        return False, "bad_profile"
    return True, None


def _goal(turn: UserTurn, judged: Judged) -> Finding:
    last = len(turn.messages or ()) - 1
    here = (last,) if last >= 0 else ()
    by: Literal["rules", "judge"] = "judge" if judged.rung == "judge" else "rules"
    if judged.result != "unknown":
        grade: Grade = "PASS" if judged.result == "success" else "FAIL"
        return Finding(
            grade=grade, coverage=1.0, evidence=here, reason=f"outcome: {judged.evidence}", by=by
        )
    if here and is_refusal(_final_answer(turn)[1]):
        return Finding(grade="WARN", coverage=0.5, evidence=here, reason="the answer declines")
    return Finding(reason="nothing says how it went")


def _final_answer(turn: UserTurn) -> tuple[int, str]:
    """Index and text of the last message, if an assistant wrote it."""
    messages = turn.messages or ()
    last = len(messages) - 1
    if last <= turn.start or messages[last].get("role") != "assistant":
        return last, ""
    return last, message_text(messages[last])


def _instructions(turn: UserTurn) -> Finding:
    """Requested formats that can be decided. The rest of the request counts as one more thing that
    was not looked at."""
    last, answer = _final_answer(turn)
    if not answer.strip():
        return Finding(reason="there is no final answer")
    checked, broken = broken_formats(turn.request_text, answer)
    if not checked:
        return Finding(reason="no request that rules could decide")
    return Finding(
        grade="FAIL" if broken else "PASS",
        coverage=len(checked) / (len(checked) + 1),
        evidence=(turn.start, last),
        reason=f"not as asked: {', '.join(broken)}"
        if broken
        else f"as asked: {', '.join(checked)}",
    )


def _tools(uses: Sequence[ToolUse]) -> Finding:
    if not uses:
        return Finding(reason="no tool was called")
    evidence = tuple(dict.fromkeys(use.at for use in uses))
    wrong = [use for use in uses if use.fault]
    share = sum(use.result is not None for use in uses) / len(uses)
    if wrong:
        mended = all(use is not uses[-1] and use.fault != "no result" for use in wrong)
        where = tuple(dict.fromkeys(use.at for use in wrong))
        reason = "; ".join(dict.fromkeys(use.fault for use in wrong))
        grade: Grade = "WARN" if mended and not uses[-1].fault else "FAIL"
        return Finding(grade=grade, coverage=share, evidence=where, reason=reason)
    if any(use.good is False for use in uses):
        where = tuple(use.result for use in uses if use.good is False and use.result is not None)
        return Finding(grade="WARN", coverage=share, evidence=where, reason="a tool failed")
    return Finding(grade="PASS", coverage=share, evidence=evidence, reason="every call is in order")


def _claims(turn: UserTurn, uses: Sequence[ToolUse]) -> Finding:
    """What rules can see: the last change failed, but the answer says that it worked."""
    effects = [use for use in uses if changes_something(use.name) and use.good is not None]
    last, answer = _final_answer(turn)
    if effects and effects[-1].good is False and claims_success(answer):
        where = tuple(i for i in (effects[-1].result, last) if i is not None)
        reason = f"{effects[-1].name} failed, but the answer says that it worked"
        return Finding(grade="FAIL", coverage=0.5, evidence=where, reason=reason)
    return Finding(reason="nothing that rules could compare")


def _recovery(turn: UserTurn, uses: Sequence[ToolUse]) -> Finding:
    failed = [use for use in uses if use.good is False]
    if not failed:
        return Finding(reason="no error occurred")
    first = tuple(use.result for use in failed if use.result is not None)
    later = uses[max(i for i, use in enumerate(uses) if use.good is False) + 1 :]
    fixed = [use for use in later if use.result is not None and not use.fault]
    same = [use for use in fixed if use.name == failed[-1].name]
    where = (*first, *(use.result for use in (same or fixed)[:1] if use.result is not None))
    if same:
        return Finding(grade="PASS", coverage=1.0, evidence=where, reason="a later call worked")
    if fixed:
        return Finding(grade="WARN", coverage=1.0, evidence=where, reason="another tool was used")
    last, answer = _final_answer(turn)
    if answer.strip():
        reason = "answered without what the tool should have said"
        return Finding(grade="WARN", coverage=1.0, evidence=(*first, last), reason=reason)
    return Finding(grade="FAIL", coverage=1.0, evidence=first, reason="it ended with the error")


def _ending(turn: UserTurn, structure: Structure | None) -> Finding:
    messages = turn.messages or ()
    last, answer = _final_answer(turn)
    end = messages[last]
    outcome = turn.calls[-1].outcome
    reason = ((outcome.finish_reason if outcome is not None else None) or "").lower()
    fault = ""
    if last <= turn.start:
        fault = "there is no answer"
    elif end.get("role") != "assistant":
        fault = "it ends before an answer"
    elif tool_calls(end):
        fault = "it ends with a tool call"
    elif not answer.strip():
        fault = "the last answer is empty"
    elif outcome is not None and outcome.status in ("failure", "aborted"):
        fault = f"the last call ended in {outcome.status}"
    elif reason in _CUT:
        fault = "the answer was cut at its limit of tokens"
    elif structure is not None and structure.keep < len(messages):
        fault = f"only {structure.keep} of {len(messages)} messages hang together"
    if fault:
        return Finding(grade="FAIL", coverage=1.0, evidence=(last,), reason=fault)
    if reason in _STOPPED:
        return Finding(grade="PASS", coverage=1.0, evidence=(last,), reason="it ended by itself")
    return Finding(coverage=0.5, evidence=(last,), reason="the log does not say why it ended")
