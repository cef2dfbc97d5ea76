"""What `distill curriculum` prints for people. What a log says is untrusted, see `logs_showing`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.curriculum_page_words import RUNGS
from flows.logs_showing import in_words, show_message, when
from flows.skills_tables import printable, short, show_table

if TYPE_CHECKING:
    from distill.curriculum.turns import UserTurn
    from flows.curricula_reading import Shown

THIRDS = ("easy", "middle", "hard")


def show_curriculum(summary: Mapping[str, Any]) -> None:
    """What a curriculum is made of, in a few lines; the page has the rest."""
    counts, outcomes = summary["counts"], summary["outcomes"]
    print(
        f"{counts['calls']:,} calls, {counts['turns']:,} turns of {counts['sessions']:,} sessions, "
        f"{counts['examples']:,} examples: {counts['sft']:,} with a worked answer, "
        f"{counts['contexts']:,} contexts"
    )
    print(
        f"outcomes: {outcomes['success']:,} successes, {outcomes['failure']:,} failures, "
        f"{outcomes['unknown']:,} unknown"
    )
    rows = [
        {
            "stage": stage["stage"],
            "examples": f"{stage['n']:,}",
            "mean score": None if stage["mean_score"] is None else f"{stage['mean_score']:.2f}",
            "easy": stage["thirds"][0],
            "middle": stage["thirds"][1],
            "hard": stage["thirds"][2],
        }
        for stage in summary["stages"]
        if len(stage["thirds"]) == len(THIRDS)
    ]
    if rows:
        show_table(rows, ["stage", "examples", "mean score", *THIRDS])
    left = summary["dropped"]["build"]
    for reason, count in sorted(left.items(), key=lambda pair: -pair[1]):
        print(f"left out, {in_words(reason)}: {count:,}")
    boundary = summary["boundary"]
    print(f"under-routed turns: {boundary['under']:,}, over-routed: {boundary['over']:,}")
    if summary["demand"]["note"]:
        print(f"demand: {short(summary['demand']['note'], 300)}")


def show_explained(
    folder: Path, row: Mapping[str, Any], turn: UserTurn | None, shown: Shown | None
) -> None:
    """Everything about one turn: fate, demand, outcome, quality, calls, and what is learnt."""
    print(f"turn {row['id']} in {folder}")
    if row["reason"] is None and row["stage"] is not None:
        print(f"in: stage {row['stage']}, number {row['position'] + 1:,} in training order")
    else:
        print(f"left out: {in_words(row['reason'] or 'superseded')} ({row['reason']})")
    print(f"source {printable(row['source'])}, session {printable(str(row['session_id']))}")
    print(f"time: {when(row['ts']) or 'not logged'}")
    print(f"scene: {printable(row['scene']) or 'none named'} ({printable(str(row['scene_by']))})")
    probs = ", ".join(f"{p:.2f}" for p in row["probs"] or ())
    print(f"demand: score {row['score']:.2f}, band {row['band']}, by {row['demand_by']}; [{probs}]")
    tiers = (
        ("predicted", row["predicted"]),
        ("decided", row["decided"]),
        ("served", row["served"]),
    )
    told = ", ".join(f"{name} {'unknown' if tier is None else tier}" for name, tier in tiers)
    routed = [word for word in ("under", "over") if row[word]]
    print(f"tier: {told}{''.join(f'; {word}-routed' for word in routed)}")
    rung = RUNGS.get(row["rung"], row["rung"])
    checked = "" if row["verifiable"] else "; too weak for the boundary table"
    print(f"outcome: {row['result']}, {rung}{checked}")
    if row["evidence"]:
        print(f"  {short(row['evidence'], 300)}")
    _show_profile(row)
    if row["label"] is not None:
        print(f"aligned label: tier {row['label']} ({printable(str(row['label_reason']))})")
    _show_calls(turn)
    if shown is not None:
        print()
        show_example(shown)


def _show_profile(row: Mapping[str, Any]) -> None:
    from distill.curriculum.profile import DIMENSIONS

    pairs = zip(DIMENSIONS, row["profile"] or (), strict=False)
    graded = [f"{name.replace('_', ' ')} {grade}" for name, grade in pairs]
    print(f"profile: {', '.join(graded) or 'not looked at'}")


def _show_calls(turn: UserTurn | None) -> None:
    if turn is None:
        print("calls: in no log store of this folder any more")
        return
    rows = [
        {
            "call": short(call.source_id, 24),
            "time": when(call.ts),
            "predicted": None if call.prediction is None else call.prediction.tier,
            "decided": None if call.decision is None else call.decision.tier,
            "served": None if call.served is None else call.served.tier,
            "model": None if call.served is None else short(str(call.served.model), 24),
            "outcome": None if call.outcome is None else call.outcome.status,
            "note": note,
        }
        for calls, note in ((turn.attempts, "replaced"), (turn.calls, ""))
        for call in calls
    ]
    columns = ["call", "time", "predicted", "decided", "served", "model", "outcome", "note"]
    show_table(rows, columns)


def show_example(shown: Shown) -> None:
    """An example as the student reads it, with what of it is learnt."""
    from flows.curricula_reading import messages_of

    example = shown.example
    scene = f", {printable(example.scene)}" if example.scene else ""
    head = f"stage {shown.stage}, number {shown.position + 1:,}, score {shown.score:.2f}{scene}"
    print(f"== {head}, turn {printable(example.id)}")
    names = [str(_tool_name(tool)) for tool in example.tools]
    if names:
        print(f"tools: {short(', '.join(names), 200)}")
    for message, mark in messages_of(shown):
        show_message(message, f"<- {mark}" if mark else "")
    print()


def _tool_name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")
