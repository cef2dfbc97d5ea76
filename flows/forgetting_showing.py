"""What `distill forget` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.output import say
from flows.skills_tables import printable, short, show_table

if TYPE_CHECKING:
    from flows.forgetting import Found, InStore


def show_forgetting(found: Found, *, done: bool) -> None:
    """What was, or would be, erased; and whose weights saw it."""
    wanted = found.wanted
    whom = f"{wanted.kind} {printable(wanted.name)}"
    if wanted.source:
        whom += f" of source {printable(wanted.source)}"
    if found.is_empty:
        print(f"{whom}: nothing is left to erase")
    else:
        print(f"{whom}: {'erased' if done else 'to erase'}")
    for store in found.stores:
        if store.calls + store.others + store.evidence:
            print(f"  log store {store.path}: {_calls(store)}")
            if wanted.kind == "session" and not wanted.source:
                where = ", ".join(map(printable, store.sources)) or "none"
                print(f"    a session of that name in every source, here: {where}")
        elif store.strangers:
            print(f"  log store {store.path}: {store.strangers:,} files of a killed import")
    for one in found.curricula:
        print(f"  curriculum {one.path}: {len(one.ids):,} turns, {one.examples:,} of them examples")
    for entry in found.leftovers:
        print(f"  what a killed build left: {printable(str(entry))}")
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
    for place, why in found.unreached:
        say(f"{printable(str(place))} {why}; it could not be looked into and may hold some of it")
    for run in found.unread:
        say(f"run {printable(run)}: its configuration cannot be read, so what it saw is not known")


def _calls(store: InStore) -> str:
    text = f"{store.calls:,} calls"
    if store.others:
        text += f", and {store.others:,} of others in the same conversations"
    if store.evidence:
        text += f"; {store.evidence:,} statements about them"
    return text


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
