"""Doctor: does a teacher read what the student wrote, and does it end replies in the same way?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distill.config import STAGE_PREFIX
from flows.doctor_checks import Finding, Loaded, Subject, fail, named_tables, ok, urls_of, warn
from flows.doctor_tokens import parting, quoted, tokens_of


def check_teacher(subject: Subject) -> list[Finding]:
    """Teachers in this process: same ids, same special tokens, same words for the same task."""
    from distill.tokens import require_same_tokenizer

    found: list[Finding] = []
    own = subject.own
    for named in (own.teacher, own.reference):
        for name, options in named_tables(named.name, named.options):
            path = str(options.get("path", ""))
            if name == "local" and options.get("adapter"):
                found.append(ok("an adapter of the student's own base"))
            elif name == "local" and path:
                theirs = subject.load(path)
                if not crosses_tokenizers(subject):
                    require_same_tokenizer(subject.loaded.tokenizer, theirs.tokenizer, path)
                    found.append(ok(f"{path} reads the same {len(theirs.tokenizer)} tokens"))
                    found += _widths(subject.loaded, theirs, path)
                    found += _ends(subject, theirs, path)
                found += _same_words(subject, theirs, path)
            elif urls_of(options):
                found += _server_flags(subject, options)
    return found


def crosses_tokenizers(subject: Subject) -> bool:
    """Whether the objective asks for a teacher with a tokenizer of its own."""
    needs = subject.objective.needs if subject.objective else ()
    return any(need.startswith("teacher.group") for need in needs)


def _widths(ours: Loaded, theirs: Loaded, path: str) -> list[Finding]:
    widths = {w for w in (ours.vocab_size, theirs.vocab_size) if w is not None}
    if len(widths) < 2:
        return []
    shared = min(len(ours.tokenizer), *widths)
    return [
        ok(
            f"output layers have {ours.vocab_size} rows here and {theirs.vocab_size} in {path}: "
            f"both are cut to the {shared} shared ids before the softmax"
        )
    ]


def _ends(subject: Subject, theirs: Loaded, path: str) -> Iterator[Finding]:
    """The student must stop where its teacher would."""
    ours, chat = subject.loaded, subject.chat
    for name in ("eos_token_id", "bos_token_id"):
        left, right = getattr(ours.tokenizer, name), getattr(theirs.tokenizer, name)
        if left == right or (name == "eos_token_id" and right in chat.stop_token_ids):
            continue
        shown = [repr(t) for t in tokens_of(ours.tokenizer, (left, right))]
        note = f"{name} is {left} ({shown[0]}) here and {right} ({shown[1]}) in {path}"
        if name == "eos_token_id" and right is not None:
            yield fail(
                f"{note}: the teacher ends replies with a token that does not end the student's",
                f"set model.stop = [{quoted(shown[1][1:-1])}], or pair base with base and "
                "instruct with instruct",
            )
        else:
            yield warn(note, "use the same tokenizer files on both sides")


def _same_words(subject: Subject, theirs: Loaded, path: str) -> list[Finding]:
    """What the teacher would read by its own template and flags, against what it will be given."""
    from distill.tokens import Chat

    ours, flags = subject.chat, dict[str, Any]()
    if path.startswith(STAGE_PREFIX):
        maker = subject.config.stage(path.removeprefix(STAGE_PREFIX))
        flags = dict(subject.config.for_stage(maker).model.template_kwargs)
    other = Chat(
        theirs.tokenizer,
        stop=subject.own.model.stop,
        eos_token_ids=theirs.eos_token_ids,
        template_kwargs=flags,
    )
    left, right = ours.render(subject.prompts[0]), other.render(subject.prompts[0])
    if left == right:
        size = len(ours.encode([left])[0])
        return [ok(f"a task of {size} tokens reads alike in both templates")]
    differ = parting(ours, left, right)
    if differ is None:
        return [ok("a task has equal ids in both templates")]
    note = (
        f"a task is written differently for {path}: position {differ.position} is {differ.ours} "
        f"for the student and {differ.theirs} for the teacher"
    )
    with_ours = Chat(
        theirs.tokenizer,
        stop=subject.own.model.stop,
        eos_token_ids=theirs.eos_token_ids,
        template_kwargs=ours.template_kwargs,
    )
    if ours.template_kwargs != flags and with_ours.render(subject.prompts[0]) == left:
        changed = sorted(
            k
            for k in {*flags, *ours.template_kwargs}
            if flags.get(k) != ours.template_kwargs.get(k)
        )
        advice = "give both sides the same model.template_kwargs"
        note = f"the flag {changed[0]} differs: {note}"
        return [fail(note, advice) if path.startswith(STAGE_PREFIX) else warn(note, advice)]
    return [
        warn(
            note,
            "the teacher reads the student's ids, in a format that it may not know; give both the "
            "template that the teacher was trained with",
        )
    ]


def _server_flags(subject: Subject, options: Mapping[str, Any]) -> Iterator[Finding]:
    """A server that writes its own prompts must use the same template variables."""
    body = options.get("body", {})
    theirs = body.get("chat_template_kwargs", {}) if isinstance(body, Mapping) else {}
    ours = subject.own.model.template_kwargs
    for key in sorted({*theirs, *ours}):
        if theirs.get(key) != ours.get(key):
            yield warn(
                f"the flag {key} differs: {ours.get(key, 'not set')} for the student, "
                f"{theirs.get(key, 'not set')} at {urls_of(options)[0]}",
                "set the same value in teacher.body.chat_template_kwargs and model.template_kwargs",
            )
    if options.get("continue_mode") == "completions":
        text = subject.chat.render(subject.prompts[0])
        bos = subject.loaded.tokenizer.bos_token
        if bos and text.startswith(bos):
            yield warn(
                f"a double BOS: the rendered text begins with {bos!r}, and a server that gets text "
                "adds its own",
                'use teacher.continue_mode = "chat", or a server that adds none',
            )
