"""What `distill logs` prints for people.

Everything that a log says is untrusted: characters that would steer a terminal or hide something
are shown as escapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.curriculum.drops import REASONS
from flows.output import say
from flows.skills_tables import printable, short, show_table

if TYPE_CHECKING:
    from distill.curriculum.ingest import IngestReport
    from distill.curriculum.records import RoutingTurn
    from distill.curriculum.state import Drop
    from distill.curriculum.store import Coverage

LONGEST_TEXT = 4000
"""Characters of one message that are shown; what is left out is said."""


def when(ms: int | None) -> str | None:
    """A time in milliseconds since 1970 as UTC, to the second."""
    if ms is None:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def in_words(reason: str) -> str:
    return REASONS.get(reason, reason)


# -- imports --------------------------------------------------------------------------------------


def show_import(report: IngestReport, firsts: Mapping[tuple[str, str], Drop], store: Path) -> None:
    """What an import did, per source: counts, dropped rows by reason, files, where it stopped."""
    rows = [
        {
            "source": s.source,
            "read": f"{s.read:,}",
            "stored": f"{s.stored:,}",
            "evidence": f"{s.evidence:,}" if s.evidence else None,
            "dropped": f"{sum(s.dropped.values()):,}",
            "files": s.files,
            "unchanged": s.skipped,
            "format": ", ".join(s.formats) or None,
        }
        for s in report.sources
    ]
    columns = ["source", "read", "stored", "evidence", "dropped", "files", "unchanged", "format"]
    show_table(rows, [c for c in columns if c == "source" or any(r[c] is not None for r in rows)])
    dropped = [
        _dropped_row(source.source, reason, count, firsts.get((source.source, reason)))
        for source in report.sources
        for reason, count in source.dropped.most_common()
    ]
    if dropped:
        print()
        show_table(dropped, ["source", "rows", "reason", "first"])
    for source in report.sources:
        if source.again:
            print(f"{printable(source.source)}: {source.again:,} rows were there already")
        if source.schema_changes:
            changes = f"{source.schema_changes:,} rows have another format than their file's first"
            print(f"{printable(source.source)}: {changes}")
        for place in source.resumed_from:
            print(f"read on from {printable(str(place))}")
        for stop in source.stopped:
            why = f"{in_words(stop.reason)} ({short(stop.detail, 90)})"
            print(f"stopped at {printable(str(stop.place))}: {why}; the next import goes on there")
        for file in source.unreadable:
            print(f"not read: {printable(file.path)}: {short(file.why, 90)}")
    total, seconds = report.total("read"), report.seconds
    speed = f", {total / seconds:,.0f} rows/s" if seconds > 0 and total else ""
    print(f"store {printable(str(store))}: {total:,} rows read in {seconds:.1f} s{speed}")


def _dropped_row(source: str, reason: str, count: int, first: Drop | None) -> dict[str, Any]:
    place = None
    if first is not None:
        place = f"{Path(first.file).name}, row {first.number}"
        place = f"{place}: {first.detail}" if first.detail else place
    return {
        "source": source,
        "rows": f"{count:,}",
        "reason": in_words(reason),
        "first": None if place is None else short(place, 80),
    }


# -- a store --------------------------------------------------------------------------------------


def show_store(facts: Mapping[str, Any], newest: Sequence[RoutingTurn]) -> None:
    """Counts, sources, the time they span, and the newest calls of a store."""
    print(
        f"{facts['turns']:,} calls in {facts['sessions']:,} sessions of {printable(facts['path'])}"
    )
    rows = [
        {
            "source": name,
            "calls": f"{source['turns']:,}",
            "sessions": f"{source['sessions']:,}",
            "first": when(source["first"]),
            "last": when(source["last"]),
            "formats": ", ".join(source["formats"]),
        }
        for name, source in facts["sources"].items()
    ]
    show_table(rows, ["source", "calls", "sessions", "first", "last", "formats"])
    if newest:
        print()
        show_table([_call_row(turn) for turn in newest], _CALL_COLUMNS)


_CALL_COLUMNS = ["turn", "time", "source", "model", "tier", "outcome", "request"]


def _call_row(turn: RoutingTurn) -> dict[str, Any]:
    from distill.curriculum.turns import turn_id

    served = turn.served
    return {
        "turn": turn_id(turn),
        "time": when(turn.ts),
        "source": short(turn.source, 20),
        "model": None if served is None or served.model is None else short(served.model, 24),
        "tier": None if served is None else served.tier,
        "outcome": None if turn.outcome is None else turn.outcome.status,
        "request": short(last_request(turn), 44),
    }


def last_request(turn: RoutingTurn) -> str:
    """The newest user message that the model read."""
    read = (turn.messages or ())[: turn.num_prompt]
    texts = [message_text(m) for m in read if m.get("role") == "user"]
    return texts[-1] if texts else ""


def message_text(message: Mapping[str, Any]) -> str:
    """The visible text of a message; parts of other kinds are named in brackets."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, Sequence):
        return str(content)
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
        parts.append(text if isinstance(text, str) else f"[{kind}]")
    return "".join(parts)


def show_call(turn: RoutingTurn, evidence: Sequence[Any]) -> None:
    """One call in its four layers, and its conversation."""
    from distill.rundir import to_json

    names = ("source", "source_id", "format", "session_id", "user", "scene", "trace_id")
    for name in names:
        value = getattr(turn, name)
        if value is not None:
            print(f"{name.replace('_', ' ')}: {printable(str(value))}")
    print(f"time: {when(turn.ts) or 'not logged'}")
    for layer in ("prediction", "decision", "served", "outcome"):
        value = getattr(turn, layer)
        if value is None:
            print(f"{layer}: not logged")
            continue
        table = {k: v for k, v in to_json(value).items() if v not in (None, [], {})}
        told = "; ".join(f"{key.replace('_', ' ')} {_flat(v)}" for key, v in table.items())
        print(f"{layer}: {short(told, 600) or 'empty'}")
    for one in evidence:
        verdict = one.verdict
        said = verdict.label if verdict.value is None else f"{verdict.value:g}"
        print(f"evidence: {short(f'{verdict.name} {said} by {verdict.source}', 120)}")
    for number, message in enumerate(turn.messages or ()):
        mark = "answer" if turn.num_prompt is not None and number >= turn.num_prompt else "read"
        print()
        show_message(message, mark)
    if turn.messages is None:
        print("text: not logged")


def _flat(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def show_message(message: Mapping[str, Any], mark: str) -> None:
    """A message with its role, and what of it is learnt in `mark`."""
    print(f"[{printable(str(message.get('role')))}] {mark}".rstrip())
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        print(f"  (thinks) {clipped(reasoning)}")
    text = message_text(message)
    if text:
        print("\n".join(f"  {line}".rstrip() for line in clipped(text).splitlines()))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        written = f"{function.get('name')}({function.get('arguments')})"
        print(f"  (calls) {short(written, 400)}")


def clipped(text: str) -> str:
    """A printable text of bounded length that says how much of it is left out."""
    shown = printable(text[:LONGEST_TEXT])
    rest = len(text) - LONGEST_TEXT
    return shown if rest <= 0 else f"{shown}\n... {rest:,} more characters; see --json"


def show_coverage(sources: Mapping[str, Coverage], unknown: Mapping[str, Any]) -> None:
    """Share of the calls of each source that have each layer, and tiers and models."""
    rows = []
    for name, found in sources.items():
        layers = {k: share(n, found.turns) for k, n in found.layers.items()}
        row = {"source": name, "calls": f"{found.turns:,}", "sessions": f"{found.sessions:,}"}
        rows.append({**row, **layers, "text": share(found.messages, found.turns)})
    names = ("prediction", "decision", "served", "outcome")
    show_table(rows, ["source", "calls", "sessions", *names, "text"])
    print()
    tiers = [
        {
            "source": name,
            "layer": layer,
            **{f"tier {tier}": f"{counts.get(tier, 0):,}" for tier in range(4)},
            "no tier": f"{found.layers.get(layer, 0) - sum(counts.values()):,}",
        }
        for name, found in sources.items()
        for layer, counts in found.tiers.items()
        if found.layers.get(layer, 0)
    ]
    show_table(tiers, ["source", "layer", *(f"tier {t}" for t in range(4)), "no tier"])
    for name, models in unknown.items():
        listed = ", ".join(f"{short(m, 40)} ({n:,})" for m, n in list(models.items())[:8])
        rest = f" and {len(models) - 8} more" if len(models) > 8 else ""
        example = short(next(iter(models)), 40)
        print(
            f"{printable(name)}: no tier is known for {listed}{rest}; name them in a new import: "
            f"--tier {example}=0"
        )


def show_drops(drops: Sequence[Drop], total: Mapping[str, int], limit: int) -> None:
    """Dropped rows with their place, and how many there are of each reason."""
    rows = [
        {
            "source": short(d.source, 20),
            "file": short(Path(d.file).name, 40),
            "row": d.number,
            "position": d.position,
            "reason": in_words(d.reason),
            "detail": short(d.detail, 60),
        }
        for d in drops
    ]
    show_table(rows, ["source", "file", "row", "position", "reason", "detail"])
    every = sum(total.values())
    if every > len(drops):
        say(f"{len(drops)} of {every:,} shown; more with -n, all with -n 0 (now {limit})")
    for reason, count in sorted(total.items(), key=lambda pair: -pair[1]):
        print(f"{count:,}: {in_words(reason)} ({reason})")


def show_redaction(
    counts: Counter[str], rows: int, touched: int, examples: Mapping[str, Sequence[str]]
) -> None:
    """What the rules take out of a file: kinds, how often, and masked examples."""
    from distill.curriculum.pii_rules import KINDS

    print(f"{rows:,} rows, {touched:,} of them with something to take out")
    table = [
        {
            "kind": kind,
            "what": KINDS.get(kind, "found by the named-entity redactor"),
            "found": f"{n:,}",
            "such as": ", ".join(map(short, examples.get(kind, ()))),
        }
        for kind, n in counts.most_common()
    ]
    if table:
        show_table(table, ["kind", "what", "found", "such as"])
