"""What a night learned in words, on the page of a report."""

from __future__ import annotations

from collections.abc import Sequence

from evals.markup import Html, el, number_cell, section, table, tick, tile
from evals.report_facts import Facts, percent
from evals.report_learned import Learned, Look, some

_SHOWN_LOOKS = 6


def skills_section(facts: Facts) -> Html | None:
    """One card per stage that learned in words; None when there is no such stage."""
    if not facts.learned:
        return None
    note = "What hindsight about finished attempts left behind: notes, and the skills made of them."
    bank = None
    if facts.bank:
        bank = el("p", "Skills in the prompts: ", el("code", facts.bank), class_="note")
    return section("skills", "Skills", note, bank, *map(_stage, facts.learned))


def _stage(learned: Learned) -> Html:
    title = el("h3", f"{learned.stage or 'run'} ", el("span", learned.objective))
    return el(
        "div",
        title,
        el("dl", *_tiles(learned), class_="tiles"),
        _verdict(learned),
        _notes(learned) if learned.notes else None,
        *_looks(learned),
        _version(learned),
        class_="card learned",
    )


def _tiles(learned: Learned) -> list[Html]:
    tiles = [tile("Notes", f"{learned.num_notes:,}")]
    if learned.valid_rate is not None:
        tiles.append(tile("Could be read", percent(learned.valid_rate)))
    if learned.correct_rate is not None:
        tiles.append(tile("Right", percent(learned.correct_rate), "by the known lessons"))
    if learned.has_skills:
        both = learned.num_looks > 0 and learned.num_kept is not None
        below = f"{learned.num_evolved} from looks, {learned.num_kept} at the end"
        tiles.append(tile("Skills added", f"{learned.num_added}", below if both else None))
    if learned.num_kept is not None:
        tiles.append(tile("Skills promoted", f"{learned.num_promoted}"))
        tiles.append(tile("Waiting", f"{learned.num_waiting}", "seen too rarely"))
    return tiles


def _verdict(learned: Learned) -> Html | None:
    if not learned.verdict:
        return None
    sign = el("span", "\u00b7", class_="none", aria_hidden="true")
    if learned.is_enough is not None:
        sign = tick(learned.is_enough, "passed" if learned.is_enough else "not passed")
    sentence = f"{learned.verdict[:1].upper()}{learned.verdict[1:]}."
    return el("p", sign, el("span", sentence), class_="verdict")


def _notes(learned: Learned) -> Html:
    most = max(number for _, number in learned.notes)
    body = []
    for words, number in learned.notes:
        bar = el("i", style=f"width:{100 * number / most:.1f}%") if number else None
        body.append(
            el(
                "tr",
                el("th", words, scope="row"),
                el("td", bar, class_="share", aria_hidden="true"),
                number_cell(f"{number:,}"),
                number_cell(percent(number / learned.num_notes)),
            )
        )
    caption = "What became of the notes"
    return table(caption, ["Note", "Share"], ["Notes", "Percent"], body, card=False)


def _looks(learned: Learned) -> list[Html]:
    """Every look at what fails, or how many there were where only that is known."""
    if not learned.num_looks:
        return []
    if not learned.looks:
        words = f"Looks at what fails: {learned.num_looks}; skills added: {learned.num_evolved}."
        return [el("p", words, class_="note")]
    shown, rest = learned.looks[:_SHOWN_LOOKS], learned.looks[_SHOWN_LOOKS:]
    more = None
    if rest:
        more = el("details", el("summary", f"{len(rest)} more"), _list(rest))
    return [el("h4", "Looks at what fails"), _list(shown), *([more] if more else [])]


def _list(looks: Sequence[Look]) -> Html:
    return el("ol", *map(_look, looks), class_="looks")


def _look(look: Look) -> Html:
    weak = [name if rate is None else f"{name} ({percent(rate)})" for name, rate in look.weak]
    found = f"weak: {some(weak)}" if weak else "nothing was weak"
    nothing = bool(weak) and not look.added and not look.refused
    return el(
        "li",
        el("b", f"Step {look.step}"),
        el("span", found, class_="weak"),
        _done("Added", look.added, good=True),
        _done("Refused", look.refused, good=False),
        el("div", "No new skill came of it.", class_="weak") if nothing else None,
    )


def _done(word: str, texts: Sequence[str], *, good: bool) -> Html | None:
    if not texts:
        return None
    between = ", " if good else "; "
    return el("div", tick(good, word, shown=True), el("span", some(texts, between)))


def _version(learned: Learned) -> Html | None:
    if learned.version is None:
        return None
    return el("p", "Bank after this stage: ", el("code", learned.version), class_="version")
