"""Why a row of a log did not become training data: one literal table, counted and never silent."""

from __future__ import annotations

from distill.errors import DataError

REASONS: dict[str, str] = {
    # While reading a file.
    "bad_json": "not valid JSON",
    "bad_encoding": "not valid UTF-8",
    "huge_row": "longer than the allowed size of a row",
    "not_an_object": "a JSON value, but not an object with named fields",
    "truncated_file": "the file ends in the middle of its data; the rest can follow later",
    "unreadable_file": "the file could not be opened or is not what its name says",
    # While making a turn out of a row.
    "unknown_format": "no importer recognises the row",
    "no_call": "a record of something else than a model call",
    "missing_field": "a field that the format requires is missing",
    "wrong_type": "a field has a value of another type or outside its range",
    "bad_time": "a time that cannot be read",
    "future": "a time that lies in the future",
    "redaction_failed": "personal data could not be removed, so nothing was stored",
    # While storing.
    "duplicate": "read before: the same id and content, or the same content",
    "conflicting_id": "the id was read before with other content; the first row stays",
    "not_completed": "the call was not finished when it was logged; it is read when it is",
    "no_consent": "the source has no consent, so nothing of it is stored",
    "forgotten": "removed on request, and not brought back",
    # While building a curriculum.
    "repeated": "the same request and answer as an earlier turn",
    "near_duplicate": "nearly the same text as an earlier turn of its session family",
    "contaminated": "overlaps with a prompt of an evaluation suite",
    "quarantined": "the structure of the conversation is broken",
    "no_messages": "the log has no text of the conversation",
    "no_response": "the conversation has no answer",
    "truncated_text": "the log cut the text, so nothing may be learnt from it",
    "cached": "answered from a cache, which says nothing about a model",
    "superseded": "a retry or fallback replaced it; only the last attempt counts",
    "failed_outcome": "the turn failed; it marks a weak region and is not imitated",
    "unknown_outcome": "nothing says how the turn went",
    "too_long": "longer than the student's limit",
    "unwritable": "the student's chat template cannot write it",
    "not_picked": "its cell gave other turns to a curriculum of limited size",
    "bad_profile": "a check of the answer's quality failed",
}
"""Every reason for which a row can be dropped, and what it means."""


class RowError(DataError):
    """One row cannot be used. `reason` is a key of REASONS, `detail` names the field and value."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in REASONS:
            raise KeyError(f"{reason!r} is not a known reason; known are {', '.join(REASONS)}")
        super().__init__(f"{REASONS[reason]}: {detail}" if detail else REASONS[reason])
        self.reason = reason
        self.detail = detail
