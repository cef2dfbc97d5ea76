"""What `distill forget` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.output import say
from flows.skills_tables import printable, short, show_table

if TYPE_CHECKING:
    from flows.forgetting import Found


def show_forgetting(found: Found, *, done: bool) -> None:
    """What was, or would be, erased; and whose weights saw it."""
    wanted = found.wanted
    whom = f"{wanted.kind} {printable(wanted.name)}"
    if found.is_empty:
        print(f"{whom}: nothing is left to erase")
    else:
        print(f"{whom}: {'erased' if done else 'to erase'}")
    for store in found.stores:
        if store.calls + store.others:
            more = f", and {store.others:,} of others in the same conversations"
            print(f"  log store {store.path}: {store.calls:,} calls{more if store.others else ''}")
    for one in found.curricula:
        print(f"  curriculum {one.path}: {len(one.ids):,} turns, {one.examples:,} of them examples")
    for stage in found.stages:
        state = "" if stage.reader.finished else "; unfinished, so start the run anew"
        name = f"{stage.reader.run}, stage {stage.reader.stage}"
        print(f"  rollouts of {printable(name)}: {stage.rows:,}{state}")
    for bank, skills in found.skills.items():
        for skill, title in skills:
            print(f"  skill {printable(skill)} of bank {printable(bank)}: {short(title, 60)}")
    _show_champions(found)
    files = sorted({path for one in found.stores for path in one.files})
    if files:
        print("The logs themselves are not changed; these sources were read from:")
        for path in files:
            print(f"  {printable(path)}")
    for run in found.unread:
        say(f"run {printable(run)}: its configuration cannot be read, so what it saw is not known")


def _show_champions(found: Found) -> None:
    if found.champions:
        print("Weights cannot forget. Champions that saw it:")
        rows = [
            {
                "model": c.model,
                "champion": c.digest[:12] + (" (current)" if c.is_current else ""),
                "run": c.run,
                "at": c.at,
                "because": c.because,
            }
            for c in found.champions
        ]
        show_table(rows, ["model", "champion", "run", "at", "because"])
    elif found.trained:
        runs = ", ".join(map(printable, found.trained))
        print(f"No champion saw it; runs that trained on it: {runs}")
    elif not found.is_empty:
        print("No champion saw it.")
