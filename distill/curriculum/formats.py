"""Formats that a request asks for and that can be decided by looking at the answer."""

from __future__ import annotations

import json
import re

from distill.curriculum.messages import without_fence

ENDS = 2000
"""Characters at the beginning and at the end of a request that are searched."""
_ASKS = r"(?:^|[.!?:;\n]\s{0,3}|\bplease |\bonly )(?:answer|respond|reply|output)\b[^.!?\n]{0,40}?"
_JSON = re.compile(rf"{_ASKS}\b(?:in|as|with|using|only)\b[^.!?\n]{{0,25}}\bjson\b", re.IGNORECASE)
_NO_JSON = re.compile(r"\b(?:not|without|instead of|no) (?:\w+ )?json\b", re.IGNORECASE)
_YES_NO = re.compile(
    rf"{_ASKS}\bonly\b[^.!?\n]{{0,20}}\b(?:yes|no)\b[^.!?\n]{{0,5}}\bor\b[^.!?\n]{{0,5}}\b(?:yes|no)\b|"
    rf"{_ASKS}\bwith (?:just |a single )?[\"']?yes[\"']? or [\"']?no[\"']? only\b",
    re.IGNORECASE,
)
_MAX_WORDS = re.compile(
    rf"{_ASKS}\b(?:in|with|using)? ?(?:at most|no more than|up to|under|fewer than|less than|"
    r"max(?:imum)?(?: of)?) (\d{1,4}) words\b",
    re.IGNORECASE,
)
_ONE_WORD = re.compile(
    rf"{_ASKS}\b(?:in|with) (?:only |just |exactly )?(?:one|a single) word\b", re.IGNORECASE
)
_REFUSAL = re.compile(
    r"\W{0,3}(?:(?:i'?m|i am|we are) (?:very |so )?sorry,? (?:but )?)?(?:(?:unfortunately|sorry),? "
    r"(?:but )?)?(?:i|we) (?:can'?t|cannot|can not|won'?t|will not|am unable to|am not able to|'m "
    r"(?:unable|not able) to) (?:help(?! but\b)|assist|comply|provide|do that|fulfil|answer|"
    r"support|create|generate|discuss|engage)|\W{0,3}as an ai (?:language )?model,? i (?:can'?t|"
    r"cannot)|"
    r"(?:es )?tut mir leid,? (?:aber )?(?:ich kann|dabei)|(?:ich kann (?:ihnen|dir) (?:dabei|"
    r"damit) nicht)|je (?:suis désolé|ne peux pas vous aider)|lo siento,? (?:pero )?no puedo|"
    r"(?:抱歉|对不起)\W我(?:不能|无法)|申し訳(?:ありません|ございません)が",
    re.IGNORECASE,
)


def broken_formats(request: str, answer: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Formats that the request asks for, and those of them that the answer does not keep.

    Reads plain wishes only, such as "answer in JSON", "reply with only yes or no", "answer in at
    most 20 words", "answer in one word", near either end of a request.
    """
    checked: list[str] = []
    broken: list[str] = []

    def note(name: str, kept: bool) -> None:
        checked.append(name)
        if not kept:
            broken.append(name)

    if len(request) > 2 * ENDS:  # such wishes stand at one of the ends
        request = f"{request[:ENDS]}\n{request[-ENDS:]}"
    lower = request.lower()
    if not any(verb in lower for verb in ("answer", "respond", "reply", "output")):
        return (), ()
    if "json" in lower and _JSON.search(request) and not _NO_JSON.search(request):
        note("JSON", _is_json(answer))
    words = answer.split()
    if "yes" in lower and _YES_NO.search(request):
        note("yes or no", answer.strip(" \t\r\n.!\"'*`").lower() in ("yes", "no"))
    if "word" in lower:
        limit = _MAX_WORDS.search(request)
        if limit is not None:
            strict = re.search(r"\b(?:under|fewer than|less than)\b", limit[0], re.I) is not None
            name = f"{'under' if strict else 'at most'} {limit[1]} words"
            note(name, len(words) + strict <= int(limit[1]))
        if _ONE_WORD.search(request):
            note("one word", len(words) == 1)
    return tuple(checked), tuple(broken)


def is_refusal(answer: str) -> bool:
    """Whether an answer opens by declining the request."""
    head = answer[:200].replace("\u2019", "'")
    return _REFUSAL.match(head) is not None


def _is_json(answer: str) -> bool:
    try:
        json.loads(without_fence(answer))
    except (ValueError, RecursionError):
        return False
    return True
