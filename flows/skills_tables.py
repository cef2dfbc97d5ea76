"""What `distill skills` prints: tables in a terminal, aligned text elsewhere.

The text of a skill comes from untrusted trajectories. Characters that would steer a terminal or
hide something are shown as escapes.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flows.output import print_table, say

if TYPE_CHECKING:
    from skills.diffs import Diff
    from skills.intake import Outcome
    from skills.items import SkillItem
    from skills.ops import Op

NUMBERS = frozenset({"utility", "uses", "gain", "score", "skills", "seq"})
COLOURS = {"active": "green", "candidate": "yellow", "quarantined": "red", "retired": "dim"}
WRAPPED = ("title", "reason", "principle")
"""Columns whose text may go on in the next line, down to a width of ..."""
NARROW = 20
LESS_TELLING = ("kind", "uses", "category", "utility")
"""What a narrow terminal leaves out, in this order."""
WIDTH = 60
"""Characters of a text in a column."""


def printable(text: str) -> str:
    """The text with everything invisible or steering as an escape; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or not _is_unseen(c) else ascii(c)[1:-1] for c in text)


def short(text: str, width: int = WIDTH) -> str:
    """One printable line of at most `width` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 3].rstrip() + "..."


def show_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Rows on stdout; in a terminal as a table with colours."""
    rows = [{key: _plain(value) for key, value in row.items()} for row in rows]
    if not sys.stdout.isatty():
        print_table(rows, columns)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    shown, fits = _fitting(rows, columns, console.width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in shown:
        table.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=fits and name not in WRAPPED,
            overflow="fold",
        )
    for row in rows:
        cells = [Text("-" if row.get(n) in (None, "") else str(row.get(n))) for n in shown]
        for name, cell in zip(shown, cells, strict=True):
            if name == "status":
                cell.stylize(COLOURS.get(cell.plain, ""))
        table.add_row(*cells)
    console.print(table)
    if len(shown) < len(columns):
        say(f"no room for {', '.join(n for n in columns if n not in shown)}; see --json")


def _fitting(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], width: int
) -> tuple[list[str], bool]:
    """The columns that a terminal has room for, and whether they fit; the less telling go first."""
    from rich.cells import cell_len

    def needed(names: Sequence[str]) -> int:
        widths = [max([len(n), *(cell_len(str(row.get(n) or "-")) for row in rows)]) for n in names]
        pairs = zip(names, widths, strict=True)
        return sum(min(w, NARROW) if n in WRAPPED else w for n, w in pairs) + 2 * (len(names) - 1)

    shown = list(columns)
    for name in LESS_TELLING:
        if name in shown and needed(shown) > width:
            shown.remove(name)
    return shown, needed(shown) <= width


def skill_row(item: SkillItem, **more: Any) -> dict[str, Any]:
    """A skill as one line of a list."""
    return {
        **more,
        "id": item.id,
        "status": item.status + (", pinned" if item.pinned else ""),
        "category": short(item.category, 20),
        "kind": item.kind,
        "utility": f"{item.credit.utility:.2f}",
        "uses": item.credit.num_used,
        "title": short(item.title, 40),
    }


def show_skill(item: SkillItem) -> None:
    """Everything about one skill."""
    credit, safety = item.credit, item.safety
    print(f"{printable(item.id)}: {printable(item.title)}")
    print(f"status: {item.status}{', pinned' if item.pinned else ''}")
    print(f"kind: {item.kind}, level: {item.level}, category: {printable(item.category)}")
    for name in ("principle", "when_to_apply", "body", "avoid"):
        text = getattr(item, name)
        if text:
            print(f"{name.replace('_', ' ')}:{_indented(text)}")
    scope = [item.scope.env, *item.scope.tools, *item.scope.models]
    if any(scope):
        print(f"only for: {printable(', '.join(filter(None, scope)))}")
    print(f"utility: {credit.utility:.3f}; {credit.num_used} uses, {credit.num_success} successes")
    if credit.num_without:
        without = f"{credit.num_success_without} of {credit.num_without}"
        print(f"matched rollouts without it: {without} succeeded; gain {_gain(item)}")
    print(f"risk: {safety.risk} of 5, {safety.num_harm} harm events")
    for reason in safety.reasons:
        print(f"  {printable(reason)}")
    outcomes = [f"{e.traj_id}{'' if e.step is None else f':{e.step}'}" for e in item.evidence]
    if outcomes:
        listed = ", ".join(outcomes[:8]) + (", ..." if len(outcomes) > 8 else "")
        print(f"evidence: {len(outcomes)} trajectories: {printable(listed)}")
    lineage = item.lineage
    author = lineage.author or "unknown"
    print(f"lineage: {lineage.op} by {printable(author)}, {len(lineage.parents)} parents")
    print(f"text: {item.sha256[:12]}")


def show_outcomes(outcomes: Iterable[Outcome]) -> None:
    """What became of skills that were offered."""
    rows = [
        {"given": o.given, "result": o.result, "id": o.id, "reason": short(o.reason, 90)}
        for o in outcomes
    ]
    show_table(rows, ["given", "result", "id", "reason"])


def show_diff(diff: Diff) -> None:
    for item in diff.added:
        print(f"+ {printable(item.id)}: {short(item.title)} ({item.status})")
    for item in diff.removed:
        print(f"- {printable(item.id)}: {short(item.title)} ({item.status})")
    for changed in diff.changed:
        show_field_changes(changed.before, changed.after)
    print(f"{len(diff.added)} added, {len(diff.removed)} removed, {len(diff.changed)} changed")


def show_field_changes(before: SkillItem, after: SkillItem) -> None:
    from skills.diffs import field_diff

    print(f"~ {printable(after.id)}: {short(after.title)}")
    for name, (old, new) in field_diff(before, after).items():
        print(f"    {name}: {_value(old)} -> {_value(new)}")


def show_history(ops: Sequence[Op]) -> None:
    rows = [
        {
            "seq": op.seq,
            "at": op.at,
            "actor": short(op.actor, 20),
            "op": op.op,
            "skill": op.item or (op.version or "")[:12],
            "reason": short(op.reason, 60),
        }
        for op in ops
    ]
    show_table(rows, ["seq", "at", "actor", "op", "skill", "reason"])


def _gain(item: SkillItem) -> str:
    from skills.lifecycle import gain

    found, credit = gain(item.credit), item.credit
    text = "unknown" if found is None else f"{found:+.3f}"
    if credit.gain_low is not None and credit.gain_high is not None:
        text += f", interval {credit.gain_low:+.3f} to {credit.gain_high:+.3f}"
    return text


def _value(value: Any) -> str:
    return short(value, 50) if isinstance(value, str) else short(repr(value), 50)


def _indented(text: str) -> str:
    lines = printable(text).splitlines()
    return f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}".rstrip() for line in lines)


def _plain(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _is_unseen(char: str) -> bool:
    # Zs but the plain space looks like one; Cn and Co have no picture that all terminals share.
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
