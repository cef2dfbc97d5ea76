"""Doctor: do student, teacher and training see the same tokens? Template, specials, stop set.

Everything is compared as token ids; a difference is shown with its position and its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.errors import DataError
from distill.types import Message
from flows.doctor_checks import Finding, Loaded, Subject, fail, ok, warn

if TYPE_CHECKING:
    from distill.tokens import Chat

THOUGHT, REPLY = "qzx", "zqj"
"""Stand for what an assistant thinks and says; no template writes them by itself."""
FLAGS = ("enable_thinking", "thinking", "reasoning_effort")
"""Template variables that turn thinking on and off."""
_MARKER = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>|</?think>")
WIDTH = 70


class Difference(NamedTuple):
    """The first place at which two id sequences differ."""

    position: int
    ours: str
    theirs: str


def first_difference(
    ours: Sequence[int], theirs: Sequence[int], tokenizer: Any
) -> Difference | None:
    """Where two renderings part, with the text from there on; None for equal ones."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    if shared == len(ours) == len(theirs):
        return None

    def text(ids: Sequence[int]) -> str:
        return repr(str(tokenizer.decode(list(ids[shared : shared + 12]))))

    return Difference(shared, text(ours), text(theirs))


def parting(chat: Chat, ours: str, theirs: str) -> Difference | None:
    """The same for two texts, in the tokens of one tokenizer."""
    left, right = chat.encode([ours, theirs])
    return first_difference(left, right, chat.tokenizer)


def check_template(subject: Subject) -> list[Finding]:
    """How the student's prompts are written: markers, BOS, the beginning of a reply, growth."""
    chat, tokenizer = subject.chat, subject.loaded.tokenizer
    asked = [Message(role="user", content="Hello")]
    if not tokenizer.chat_template:
        return [
            warn(
                "no chat template: messages are joined as they are",
                "fine for a base model; a chat model needs its template in the tokenizer's folder",
            )
        ]
    text = chat.render(asked)
    found = [ok(f"chat template: {short(text)}")]
    found += _markers(chat, text)
    found += _bos(chat, subject)
    found += _flags(subject)
    if not is_plain(tokenizer):
        found += _beginning(chat, subject)
        found += _growth(chat)
    return found


def is_plain(tokenizer: Any) -> bool:
    from distill.tokens import PLAIN_TEMPLATE

    return tokenizer.chat_template in (None, "", PLAIN_TEMPLATE)


def short(text: str) -> str:
    """A text as it is written in code, cut in its middle."""
    shown = repr(text)
    return shown if len(shown) <= WIDTH * 2 else f"{shown[:WIDTH]} ... {shown[-WIDTH:]}"


def _markers(chat: Chat, text: str) -> Iterator[Finding]:
    """A marker that ends a turn must be one token, or no reply can stop at it. Roles and thoughts
    may be plain words where the model was trained with them so."""
    ids, end = chat.encode([text])[0], end_marker(chat)
    stops = set(chat.encode([_behind_reply(chat)])[0]) & {*chat.stop_token_ids}
    for marker in dict.fromkeys([*_MARKER.findall(text), *filter(None, [end])]):
        own = chat.encode([marker])[0]
        if len(own) != 1:
            pieces = chat.tokenizer.convert_ids_to_tokens(own)
            where = f"at character {text.index(marker)}" if marker in text else "behind a reply"
            note = (
                f"the template writes {marker!r} {where}, which this tokenizer cuts into "
                f"{len(own)} tokens: {' '.join(map(repr, pieces[:8]))}"
            )
            advice = "use the tokenizer that the template was written for, with its special tokens"
            if marker == end and not stops:
                yield fail(f"{note}; a reply should stop there", advice)
            else:
                yield warn(
                    note, f"fine if the model was trained with it as plain text; else {advice}"
                )
        elif ids.count(own[0]) < text.count(marker):
            yield fail(
                f"{marker!r} stands {text.count(marker)} times in a prompt, but its token "
                f"{own[0]} only {ids.count(own[0])} times",
                "mark it as a special token of the tokenizer, so that it is never merged",
            )


def _bos(chat: Chat, subject: Subject) -> list[Finding]:
    """Exactly one beginning-of-sequence token, or none where the tokenizer adds none either."""
    tokenizer = chat.tokenizer
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    text = chat.render(subject.prompts[0])
    ids = chat.encode([text])[0]
    count = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    added = list(tokenizer(text)["input_ids"])[:1] == [bos] and tokenizer(text)["input_ids"] != ids
    name = repr(str(tokenizer.convert_ids_to_tokens(bos)))
    if count > 1:
        return [
            fail(
                f"a double BOS: a prompt begins with {count} times {name} (id {bos}), at "
                f"positions 0 and 1: {short(text[:WIDTH])}",
                "remove it from the template or from the messages; models read exactly one",
            )
        ]
    if count == 1 and added:
        return [
            warn(
                f"the template writes {name} and the tokenizer would add another: a double BOS for "
                "every server that gets text; token ids, as scored here, hold exactly one",
                "send ids, or turn the tokenizer's own BOS off (add_bos_token = false)",
            )
        ]
    if count == 0 and added:
        return [
            warn(
                f"the tokenizer puts {name} before plain texts, but the template writes none: "
                "prompts begin without it",
                "add {{ bos_token }} to the template if the model was trained with it",
            )
        ]
    return [ok(f"prompts begin with {'one' if count else 'no'} {name}")]


def _flags(subject: Subject) -> Iterator[Finding]:
    """Thinking on and off, and variables that the template does not know."""
    chat, template = subject.chat, str(subject.loaded.tokenizer.chat_template)
    for key in chat.template_kwargs:
        if not re.search(rf"\b{re.escape(key)}\b", template):
            yield warn(
                f"model.template_kwargs.{key} changes nothing: the template has no such variable",
                "remove it, or use the name that the template reads",
            )
    for flag in FLAGS[:2]:
        if not re.search(rf"\b{flag}\b", template):
            continue
        on, off = (_rendered(subject, {flag: value}) for value in (True, False))
        differ = first_difference(on, off, chat.tokenizer)
        if differ is not None:
            chosen = chat.template_kwargs.get(flag, "not set")
            yield ok(
                f"{flag} changes a prompt from position {differ.position} on: {differ.ours} with "
                f"it, {differ.theirs} without; here it is {chosen}"
            )


def _rendered(subject: Subject, more: Mapping[str, Any]) -> list[int]:
    from distill.tokens import Chat

    own = subject.chat
    chat = Chat(
        own.tokenizer,
        stop=subject.own.model.stop,
        eos_token_ids=own.stop_token_ids,
        template_kwargs={**own.template_kwargs, **more},
    )
    return chat.encode([chat.render(subject.prompts[0])])[0]


def _beginning(chat: Chat, subject: Subject) -> Iterator[Finding]:
    """A prompt ends with the invitation to reply, with a hint and without, and replies are learnt
    behind the same words."""
    asked = [Message(role="user", content="Hello")]
    hinted = [Message(role="user", content="Hello\nHint: the answer is known.")]
    prompt, written = chat.render(asked), chat.written(asked)
    invitation = prompt[len(written) :] if prompt.startswith(written) else ""
    if not invitation:
        yield warn(
            f"a prompt does not end with an invitation to reply: {short(prompt[-WIDTH:])}",
            "the template ignores add_generation_prompt; a model may go on with the user's words",
        )
        return
    if not chat.render(hinted).endswith(invitation):
        yield fail(
            f"a prompt with a hint ends with {short(chat.render(hinted)[-WIDTH:])}, one without "
            f"with {invitation!r}",
            "let the template end every prompt alike: the teacher would judge another beginning",
        )
    whole = chat.written([*asked, Message(role="assistant", content=REPLY)])
    if not whole.startswith(prompt):
        differ = parting(chat, prompt, whole)
        assert differ is not None
        note = (
            f"a prompt and a written conversation part at position {differ.position}: the prompt "
            f"goes on with {differ.ours}, the conversation with {differ.theirs}"
        )
        advice = (
            "set model.template_kwargs so that both begin a reply alike (such as "
            "enable_thinking), or use a template that does"
        )
        recorded = subject.own.data.name == "routing"
        yield fail(note, advice) if recorded else warn(note, advice)
    else:
        yield ok(f"replies are sampled, scored and learnt behind {invitation!r}")


def _growth(chat: Chat) -> Iterator[Finding]:
    """Whether a conversation only grows: what was sampled must stay in front of the next turn."""
    asked = [Message(role="user", content="Hello")]
    said = Message(role="assistant", content=REPLY, reasoning=THOUGHT)
    again = Message(role="user", content="And now?")
    try:
        before, after = chat.written([*asked, said]), chat.render([*asked, said, again])
    except DataError as error:
        yield warn(f"no conversation of several turns: {error}", "only tasks of one reply work")
        return
    if after.startswith(before):
        yield ok("append-only: a later turn leaves the earlier ones as they were")
        return
    differ = parting(chat, before, after)
    assert differ is not None
    dropped = THOUGHT in before and THOUGHT not in after
    what = "drops earlier thinking" if dropped else "rewrites earlier turns"
    yield warn(
        f"the template {what}: position {differ.position} held {differ.ours} and becomes "
        f"{differ.theirs} once the conversation goes on",
        "attempts of several turns fork into one row per turn, which costs more tokens; a template "
        "that keeps the thoughts saves them",
    )


def check_stop_set(subject: Subject) -> list[Finding]:
    """Every way in which a reply may end must be a token that ends it."""
    chat, loaded = subject.chat, subject.loaded
    names = names_of(loaded.tokenizer, chat.stop_token_ids)
    found = [
        ok(
            f"replies end with {names}; tokenizer eos {_name_of(loaded)}, settings "
            f"{names_of(loaded.tokenizer, loaded.eos_token_ids) or 'none'}"
        )
    ]
    end = turn_end(chat)
    if is_cut(chat, end_marker(chat)):
        pass  # its first letter is no end; the check of the template says what is wrong
    elif end is not None and end not in chat.stop_token_ids:
        text = str(loaded.tokenizer.convert_ids_to_tokens(end))
        found.append(
            fail(
                f"the template ends a turn with {text!r} (id {end}), which is not in the stop set "
                f"({names}): replies would run on to the length limit",
                f"set model.stop = [{quoted(text)}]",
            )
        )
    elif end is not None and end != chat.end_id:
        text, own = (str(loaded.tokenizer.convert_ids_to_tokens(i)) for i in (end, chat.end_id))
        found.append(
            warn(
                f"the template ends a turn with {text!r}, but written replies are closed with the "
                f"tokenizer's eos {own!r}",
                f"make {text!r} the tokenizer's eos_token, as instruct models do",
            )
        )
    pad = loaded.tokenizer.pad_token_id
    if pad is not None and pad in chat.stop_token_ids:
        text = str(loaded.tokenizer.convert_ids_to_tokens(pad))
        found.append(
            ok(
                f"pad and end are the same token {text!r} (id {pad}); allowed, because masks are "
                "made from lengths, never from ids: the end token is trained"
            )
        )
    return found


def turn_end(chat: Chat) -> int | None:
    """The first token that the template writes behind an assistant's words; None for white space,
    for nothing, and for a template that joins contents."""
    rest = _behind_reply(chat)
    first = chat.encode([rest])[0] if rest else []
    return first[0] if first else None


def end_marker(chat: Chat) -> str:
    """The marker, such as `<|im_end|>`, that the template writes right behind an assistant's words;
    empty where there is none."""
    found = _MARKER.match(_behind_reply(chat))
    return found.group() if found else ""


def is_cut(chat: Chat, marker: str) -> bool:
    return bool(marker) and len(chat.encode([marker])[0]) != 1


def _behind_reply(chat: Chat) -> str:
    if is_plain(chat.tokenizer):
        return ""
    asked, said = Message(role="user", content="a"), Message(role="assistant", content=REPLY)
    return chat.written([asked, said]).rpartition(REPLY)[2].lstrip()


def names_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{t!r} ({i})" for t, i in zip(tokens_of(tokenizer, ids), ids, strict=True))


def tokens_of(tokenizer: Any, ids: Sequence[int | None]) -> list[str]:
    return ["none" if i is None else str(tokenizer.convert_ids_to_tokens(i)) for i in ids]


def _name_of(loaded: Loaded) -> str:
    eos = loaded.tokenizer.eos_token_id
    return "none" if eos is None else names_of(loaded.tokenizer, (eos,))


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
