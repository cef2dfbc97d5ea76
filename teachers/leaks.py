"""Does the student repeat what only its teacher was told?

Two meters per reply: the share of its token n-grams that stand in the privileged prompt and not in
what the student itself had read, and how often it uses phrases that speak of a hint. Both are
diagnostics. A student that solves a task in the words of the shown solution also scores on the
first one, so a rise beside a flat reward is the sign to look for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from distill.errors import ConfigError
from distill.tokens import Chat
from distill.types import Rollout, TeacherView
from teachers.sight import runs

Gram = tuple[int, ...]

PHRASES = (
    "the reference solution",
    "the provided solution",
    "the worked solution",
    "the given solution",
    "the reference answer",
    "the provided answer",
    "the given answer",
    "the example response",
    "the previous attempt",
    "the feedback",
    "the hint",
    "as given above",
)
"""Words that make no sense to somebody who read the question alone."""
WORLD_PHRASES = ("[", "]", "{", "}")
"""The marks around hints and answers in the generated world."""


def grams(token_ids: Sequence[int], n: int) -> Iterator[Gram]:
    """The n-grams of a run of tokens [T], T - n + 1 of them, repeated ones included."""
    if n < 1:
        raise ConfigError(f"an n-gram needs n of at least 1, got {n}")
    return (tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1))


def ngram_share(
    replies: Iterable[Sequence[int]],
    privileged: Sequence[int],
    own: Iterable[Sequence[int]],
    *,
    n: int = 8,
) -> float | None:
    """Share, 0 to 1, of the replies' n-grams that stand in `privileged` and nowhere in `own`.

    Every argument holds token ids; no n-gram reaches over the border of a run. A repeated n-gram
    counts as often as it is said. None when the replies are all shorter than n.
    """
    said = [gram for run in replies for gram in grams(run, n)]
    if not said:
        return None
    secret = set(grams(privileged, n)).difference(*(grams(run, n) for run in own))
    return sum(gram in secret for gram in said) / len(said)


def row_shares(
    rollouts: Sequence[Rollout],
    views: Sequence[TeacherView | None],
    *,
    n: int = 8,
    stop_token_ids: Collection[int] = (),
) -> list[float | None]:
    """`ngram_share` of each row [B], given one view per row.

    The privileged text is what a view holds before the first trained token; the student's own text
    is everything in its row that it did not sample. A token of `stop_token_ids` that ends a reply
    is left out. None for a row without a view or without an n-gram.
    """
    out: list[float | None] = []
    for rollout, view in zip(rollouts, views, strict=True):
        if view is None or not view.positions:
            out.append(None)
            continue
        replies = [_unclosed(run, stop_token_ids) for run in runs(rollout, trained=True)]
        privileged = view.token_ids[: view.positions[0]]
        out.append(ngram_share(replies, privileged, runs(rollout, trained=False), n=n))
    return out


def count_phrases(text: str, phrases: Sequence[str], *, own: str = "") -> int:
    """How often a text uses the phrases, whatever their case; those in `own` are not counted."""
    text, own = text.casefold(), own.casefold()
    known = {phrase.casefold() for phrase in phrases}
    return sum(text.count(phrase) for phrase in known if phrase not in own)


def row_marks(
    rollouts: Sequence[Rollout], chat: Chat, *, phrases: Sequence[str] = PHRASES
) -> list[float]:
    """`count_phrases` of the student's words of each row [B]; 0.0 for a row that says nothing."""
    if not all(phrases):
        raise ConfigError(f"a phrase to look for must not be empty, got {list(phrases)!r}")
    out = []
    for rollout in rollouts:
        said = "\n".join(chat.decode(run) for run in runs(rollout, trained=True))
        own = "\n".join(chat.decode(run) for run in runs(rollout, trained=False))
        out.append(float(count_phrases(said, phrases, own=own)))
    return out


def summarise(shares: Sequence[float | None], marks: Sequence[float]) -> dict[str, float]:
    """Means of a step.

    `leak/ngram_share`: mean over the rows that have a share, 0 to 1; left out when none has.
    `leak/marked_share`: share of the rows of `marks` with at least one phrase, 0 to 1; left out
    without rows.
    """
    known = [share for share in shares if share is not None]
    out = {"leak/ngram_share": sum(known) / len(known)} if known else {}
    if marks:
        out["leak/marked_share"] = sum(mark > 0 for mark in marks) / len(marks)
    return out


def measure(
    rollouts: Sequence[Rollout],
    views: Sequence[TeacherView | None],
    chat: Chat,
    *,
    n: int = 8,
    phrases: Sequence[str] = PHRASES,
) -> dict[str, float]:
    """Both meters of a step, one view per row; rows without trained tokens are left out."""
    pairs = [(r, v) for r, v in zip(rollouts, views, strict=True) if r.num_trained]
    rows = [rollout for rollout, _ in pairs]
    shares = row_shares(rows, [v for _, v in pairs], n=n, stop_token_ids=chat.stop_token_ids)
    return summarise(shares, row_marks(rows, chat, phrases=phrases))


def _unclosed(run: Gram, stop_token_ids: Collection[int]) -> Gram:
    return run[:-1] if run and run[-1] in stop_token_ids else run
