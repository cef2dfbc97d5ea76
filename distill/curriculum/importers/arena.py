"""Chatbot Arena: people's votes between two answers, in the shapes of the 55k, 100k and 140k sets.

Both answers become turns, arms of one question as in `tables`. The vote is a rating of the user:
the winner 1, the loser 0, both of a tie 0.5. "Both bad" is kept apart from a tie: both failed, 0.
Frequent prompts that the set's own deduplication did not sample raise RowError("duplicate"). Win
rates of routers in further columns, as in RouteLLM's calibration table, are predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.messages import Message, answer, conversation
from distill.curriculum.importers.tables import win_rates
from distill.curriculum.importers.values import (
    as_items,
    as_text,
    flag,
    ident,
    required,
    table,
    text,
    when,
    wrong,
)
from distill.curriculum.records import Outcome, Served, Verdict

_VOTES: dict[str, tuple[tuple[float, str], tuple[float, str]]] = {
    "model_a": ((1.0, "win"), (0.0, "loss")),
    "model_b": ((0.0, "loss"), (1.0, "win")),
    "tie": ((0.5, "tie"), (0.5, "tie")),
    "both_bad": ((0.0, "both_bad"), (0.0, "both_bad")),
}
_BOTH_BAD = frozenset({"tie (bothbad)", "bothbad", "both_bad", "both bad", "tie (both bad)"})


class Arena:
    name = "arena"

    def recognises(self, row: Row) -> bool:
        return (
            "model_a" in row and "model_b" in row and ("winner" in row or "winner_model_a" in row)
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """Two turns."""
        dedup = table(row, "dedup_tag")
        if flag(dedup, "high_freq") and flag(dedup, "sampled") is False:
            raise RowError("duplicate", "dedup_tag: a frequent prompt that is not in the sample")
        key = ident(row, "question_id", "id") or digest_of(row)
        votes = _VOTES[_winner(row)]
        prediction, tags = win_rates(row, context.options)
        ts = when(row, "tstamp", "timestamp")
        found = []
        for side, (value, label) in zip("ab", votes, strict=True):
            model = required(row, f"model_{side}")
            messages = _conversation(row, side)
            ended = bool(messages) and messages[-1]["role"] == "assistant"
            verdict = Verdict(source="user", name="vote", value=value, label=label, ts=ts)
            found.append(
                context.turn(
                    row,
                    # A model may meet itself.
                    source_id=f"{key}/{side}/{model}",
                    parent_id=key,
                    format=self.name,
                    ts=ts,
                    user=ident(row, "judge_hash", "judge"),
                    scene=_scene(row),
                    tags=(*_tags(row), *tags),
                    prediction=prediction,
                    served=Served(model=model, tier=context.tiers.of_model(model)),
                    outcome=Outcome(verdicts=(verdict,)),
                    messages=tuple(messages) or None,
                    num_prompt=len(messages) - ended if messages else None,
                )
            )
        return found


def _winner(row: Row) -> str:
    word = text(row, "winner")
    if word is not None:
        low = word.strip().lower()
        found = "both_bad" if low in _BOTH_BAD else low
        if found not in _VOTES:
            raise wrong("winner", "model_a, model_b, tie or both_bad", word)
        return found
    sides = {"model_a": "winner_model_a", "model_b": "winner_model_b", "tie": "winner_tie"}
    won = [side for side, column in sides.items() if flag(row, column)]
    if len(won) != 1:
        raise wrong("winner_model_a, winner_model_b, winner_tie", "one of them to be 1", won)
    return won[0]


def _conversation(row: Row, side: str) -> list[Message]:
    """The whole conversation with one model; of the 55k set, prompts and answers interleaved."""
    name = f"conversation_{side}"
    if row.get(name) is not None:
        return conversation(row[name], name)
    prompts, answers = _turns(row, "prompt"), _turns(row, f"response_{side}")
    out: list[Message] = []
    for index, asked in enumerate(prompts):
        out += conversation([{"role": "user", "content": asked}], "prompt")
        if index < len(answers) and answers[index]:
            out += answer([{"role": "assistant", "content": answers[index]}], f"response_{side}")
    return out


def _turns(row: Row, name: str) -> list[str]:
    """Texts of a JSON list; an answer that failed is null in it. Plain text is one turn."""
    value = row.get(name)
    if value is None or value == "":
        return []
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [as_text(value, name)]
    return ["" if entry is None else as_text(entry, name) for entry in as_items(value, name)]


def _scene(row: Row) -> str | None:
    """Kind of task where the set names one: code, or mathematics."""
    if flag(row, "is_code"):
        return "code"
    for name, inner in table(row, "category_tag").items():
        if "math" in str(name) and isinstance(inner, Mapping) and inner.get("math") is True:
            return "math"
    return None


def _tags(row: Row) -> Iterable[str]:
    language = text(row, "language")
    if language is not None:
        yield f"language:{language}"
    if flag(row, "is_refusal"):
        yield "refusal"
