"""What an importer is, and the one place where its turns are completed and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from distill.curriculum.clock import shorten
from distill.curriculum.drops import RowError
from distill.curriculum.importers.endings import ended
from distill.curriculum.importers.fields import overlay
from distill.curriculum.records import Evidence, RoutingTurn, Verdict
from distill.curriculum.tiers import Tiers

DAY_MS = 86_400_000
Row = Mapping[str, Any]
Found = RoutingTurn | Evidence
Result = Found | RowError
"""What an importer may yield."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What an importer knows beside the row. Options that every importer reads:

    fields    field of a turn -> path in the row, for what the format itself has no place for; see
              `fields.TARGETS`
    origins   name of a score -> program, user, tool, judge or system
    scales    name of a score -> [bad, good]
    sample_rate  share of all calls that the log keeps, where the rows do not say it
    """

    source: str
    tiers: Tiers = field(default_factory=Tiers)
    consent: bool = True
    raw_sha256: str = ""
    now_ms: int = 0
    """Present time; 0 where it is unknown, and then nothing lies in the future."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def turn(self, row: Row, **values: Any) -> RoutingTurn:
        """A turn of this source with the values of a row, and those that the user mapped on top.

        Whatever word a log has for an answer that was cut at its limit of tokens becomes `length`.
        RowError("future") when it began later than a day from now.
        """
        if "sample_rate" not in values and "sample_rate" in self.options:
            values["sample_rate"] = self.options["sample_rate"]
        turn = RoutingTurn(source=self.source, raw_sha256=self.raw_sha256, **values)
        if "fields" in self.options:
            turn = overlay(turn, row, self.tiers, self.options)
        outcome = turn.outcome
        if outcome is not None and outcome.finish_reason is not None:
            reason = ended(outcome.finish_reason)
            if reason != outcome.finish_reason:
                turn = replace(turn, outcome=replace(outcome, finish_reason=reason))
        if not self.consent and turn.consent:
            turn = replace(turn, consent=False)
        if turn.ts is not None:
            self._check_time(turn.ts)
        return turn

    def evidence(self, ref: str, verdict: Verdict) -> Evidence:
        """A statement about a turn of another row; times are checked like those of turns."""
        if verdict.ts is not None:
            self._check_time(verdict.ts)
        return Evidence(source=self.source, ref=ref, verdict=verdict, raw_sha256=self.raw_sha256)

    def _check_time(self, ts: int) -> None:
        if self.now_ms and ts > self.now_ms + DAY_MS:
            days = (ts - self.now_ms) / DAY_MS
            raise RowError(
                "future", f"{days:.1f} days ahead; expected at most one: look at clocks and units"
            )


@runtime_checkable
class Importer(Protocol):
    """Reads one format. Pure: a row gives the same turns every time."""

    name: str

    def recognises(self, row: Row) -> bool:
        """Cheap: looks at keys, and never raises."""
        ...

    def read(self, row: Row, context: Context) -> Iterable[Result]:
        """The turns and the evidence of a row.

        Raises RowError, and nothing else, for a row that cannot be used; RowError("no_call") for
        one that is about something else than a model call. A row that holds several records, such
        as a batch of spans, also yields a RowError for each of them that cannot be used, so that
        the others are not lost; each is counted.
        """
        ...


def digest_of(value: Any) -> str:
    """An id made of the content, equal in every import: for rows without one of their own."""
    try:
        if isinstance(value, Mapping):
            value = {str(key): entry for key, entry in value.items()}
        content = json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError("wrong_type", f"not plain data: {shorten(error)}") from None
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()[:32]
