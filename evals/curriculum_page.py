"""A curriculum as one self-contained page: no script, no font, no picture from elsewhere.

It shows what `summary.json` of a built curriculum says: where turns came from and what became of
them, how much capability they need, what each tier can do, and how the stages are composed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.rundir import atomic_write, read_json
from evals.curriculum_page_charts import calibration, heat_map, histogram, key, paragraphs, strip
from evals.curriculum_page_tables import Summary, allocation, boundary, coverage, dropped
from evals.curriculum_page_words import (
    DIMENSIONS,
    RUNGS,
    part,
    plain,
    scene_name,
    several,
    share,
)
from evals.markup import Html, el, join, section, tile

PAGE = "curriculum.html"
FORMAT = 1
_SHEETS = ("report.css", "curriculum_page.css")
_THIRDS = (("easy", "easy third"), ("middle", "middle third"), ("hard", "hard third"))
_GRADES = (
    ("pass", "PASS", "passed"),
    ("warn", "WARN", "with doubts"),
    ("fail", "FAIL", "failed"),
    ("unseen", "NOT_EVALUATED", "not looked at"),
)
_MOST_SCENES = 8


def write_page(folder: Path, title: str = "") -> Path:
    """Write `curriculum.html` beside the `summary.json` of a built curriculum and return its path.

    DataError when the folder holds no summary or one of another version.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; expected a folder that `distill curriculum build` wrote"
        )
    summary = read_json(path)
    if not isinstance(summary, Mapping) or summary.get("format") != FORMAT:
        found = summary.get("format") if isinstance(summary, Mapping) else type(summary).__name__
        raise DataError(
            f"{path} is no summary of this version: expected format {FORMAT}, found {found!r}; "
            "build the curriculum again"
        )
    page = folder / PAGE
    atomic_write(page, build_page(summary, title or _title_of(folder)))
    return page


def _title_of(folder: Path) -> str:
    """A run and its stage, or the folder's own name; also while the folder is still being made."""
    own = re.sub(r"^\.(.+?)\.partial-.*$", r"\1", folder.name)
    if own == "final" and folder.parent.parent.name == "stages":
        return f"{folder.parent.parent.parent.name} \u00b7 {folder.parent.name}"
    return own


def build_page(summary: Mapping[str, Any], title: str) -> str:
    """The whole page for the summary of a curriculum. Every text is escaped, styles are inline."""
    styles = [files("evals").joinpath(name).read_text(encoding="utf-8") for name in _SHEETS]
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"Curriculum - {plain(title)}"),
        el("style", Html("\n".join(styles))),
    )
    parts = (_stages, _demand, _tiers, boundary, _profile, allocation, coverage, dropped)
    body = el(
        "body",
        el("a", "Skip to the stages", href="#main", class_="skip"),
        _header(summary, title),
        el("main", *(one(summary) for one in parts), id="main"),
        el("footer", "Written by distill curriculum. The same numbers stand in summary.json."),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _header(summary: Summary, title: str) -> Html:
    counts: Mapping[str, int] = summary.get("counts") or {}
    turns, examples = counts.get("turns", 0), counts.get("examples", 0)
    num_stages = len([s for s in summary.get("stages") or () if s["n"]])
    if examples:
        line = f"{several(examples, 'example')} in {several(num_stages, 'stage')}"
        rest = f", from {several(turns, 'turn')} of {several(counts.get('sessions', 0), 'session')}"
    else:
        line, rest = "No example", f" came out of {several(turns, 'turn')}"
    tiles = [
        tile("Model calls", f"{counts.get('calls', 0):,}"),
        tile("User turns", f"{turns:,}"),
        tile("Examples", f"{examples:,}", f"{part(examples, turns)} of the turns"),
        tile("Worked answers", f"{counts.get('sft', 0):,}", "to learn word for word"),
        tile("Contexts", f"{counts.get('contexts', counts.get('opd', 0)):,}", "to answer oneself"),
    ]
    gone = summary.get("forgotten", 0)
    words = f"{several(gone, 'turn')} of these were erased on request since; the numbers stay."
    return el(
        "header",
        el("p", f"distill curriculum \u00b7 {plain(title, 120)}", class_="eyebrow"),
        el("h1", el("span", line, class_="promote" if examples else "hold"), rest),
        el("dl", *tiles, class_="tiles"),
        el("p", words, class_="alert") if gone else None,
    )


def _stages(summary: Summary) -> Html | None:
    stages: Sequence[Summary] = [s for s in summary.get("stages") or () if s["n"]]
    if not stages:
        return None
    rows: list[Html] = []
    for stage in stages:
        pieces = list(zip((style for style, _ in _THIRDS), stage["thirds"], strict=True))
        words = ", ".join(
            f"{n:,} of the {name}" for (_, name), (_, n) in zip(_THIRDS, pieces, strict=True)
        )
        number = f"Stage {stage['stage']}"
        rows += [
            el("span", number),
            strip(pieces, words=f"{number}: {words}"),
            el("span", several(stage["n"], "example"), class_="of"),
        ]
    scores = "; ".join(
        f"stage {s['stage']} {s['mean_score']:.2f}" for s in stages if s["mean_score"] is not None
    )
    card = el(
        "div",
        key(*_THIRDS),
        el("div", *rows, class_="parts"),
        el("p", f"Mean score: {scores}", class_="stack"),
        *(el("p", f"Stage {s['stage']}: {_scenes(s)}", class_="stack") for s in stages),
        class_="card",
    )
    note = "Thirds are by how capable a model a turn needs. Every example comes once per pass."
    return section("stages", "How the stages are composed", note, card)


def _scenes(stage: Summary) -> str:
    ranked = sorted((stage.get("scenes") or {}).items(), key=lambda pair: (-pair[1], pair[0]))
    named = [f"{scene_name(name)} {number:,}" for name, number in ranked[:_MOST_SCENES]]
    rest = ranked[_MOST_SCENES:]
    if rest:
        others = several(len(rest), "other scene")
        named.append(f"{others} {sum(number for _, number in rest):,}")
    return ", ".join(named) or "no scene named"


def _demand(summary: Summary) -> Html | None:
    demand: Summary = summary.get("demand") or {}
    counts, edges = demand.get("counts") or (), demand.get("edges") or ()
    found: Summary = demand.get("calibration") or {}
    cards = []
    if sum(counts) and len(edges) == len(counts) + 1:
        card = el(
            "div",
            el("h3", "Scores"),
            paragraphs("Turns by score; higher needs a more capable model."),
            histogram(edges, counts),
            el("p", "demand score", class_="axis-name"),
            class_="card",
        )
        cards.append(card)
    if found.get("bins"):
        card = el(
            "div",
            el("h3", "Calibration"),
            paragraphs(
                "Chance of success at the tier that served, in turns that the estimator did not "
                "see. On the dashed line it says what came; bars are 95 %."
            ),
            calibration(found["bins"]),
            el("p", "estimated (across), seen (up)", class_="axis-name"),
            el("p", _quality(found), class_="stack"),
            class_="card",
        )
        cards.append(card)
    if not cards and not demand.get("note"):
        return None
    who = {
        "fitted": "an estimator that was fitted on these logs",
        "logged": "the router's own probabilities",
        "logged_tier": "the tier that the router logged",
        "judge": "a judging model",
        "flat": "nobody: every tier is as likely as the next",
        "fallback": "the router's own prediction where there is one",
    }.get(str(demand.get("method")), plain(demand.get("method", "an estimator")))
    note = (
        f"Said by {who}, from the request and what came before it; who served the turn, and how it "
        "ended, is never read."
    )
    told = demand.get("note")
    return section(
        "demand",
        "How capable a model the turns need",
        note,
        el("div", *cards, class_="pair") if cards else None,
        el("p", plain(told, 600), class_="note" if cards and found else "alert") if told else None,
    )


def _quality(found: Summary) -> str:
    """How good the estimates are, beside two that read no text. Lower Brier scores are better."""
    model: Summary = found.get("model") or {}
    parts = []
    if model.get("brier") is not None:
        others = [
            f"{found[name]['brier']:.3f} {words}"
            for name, words in (("tier", "for the rate of its tier"), ("constant", "for one rate"))
            if (found.get(name) or {}).get("brier") is not None
        ]
        parts.append(f"Brier score {model['brier']:.3f}")
        parts += [f"against {' and '.join(others)}"] if others else []
    if model.get("ece") is not None:
        parts.append(f"calibration error {share(model['ece'], 1)}")
    if model.get("auc") is not None and not math.isnan(model["auc"]):
        parts.append(f"AUC {model['auc']:.2f}")
    return ", ".join(parts)


def _tiers(summary: Summary) -> Html | None:
    tiers: Sequence[Summary] = summary.get("tiers") or ()
    rows = []
    for one in tiers:
        name = "No tier" if one["tier"] is None else f"Tier {one['tier']}"
        counts = [one["success"], one["failure"], one["unknown"]]
        detail = f"mean score {one['mean_score']:.2f}" if one.get("mean_score") is not None else ""
        rows.append((name, detail, counts))
    columns = [("success", "Success"), ("failure", "Failure"), ("unknown", "Unknown")]
    if not any(sum(counts) for _, _, counts in rows):
        return None
    note = (
        "Shade is the share of a tier's turns. That nobody complained is no success: such turns "
        "are unknown."
    )
    region = el(
        "div",
        heat_map(rows, columns, "Served by"),
        _rungs(summary.get("outcomes") or {}),
        class_="card",
    )
    return section("outcomes", "Who served, and how it ended", note, region)


def _rungs(outcomes: Summary) -> Html | None:
    rungs: Mapping[str, int] = outcomes.get("rungs") or {}
    known = [name for name in RUNGS if rungs.get(name)]
    known += sorted(name for name in rungs if name not in RUNGS and rungs[name])
    if not known:
        return None
    items = [
        piece
        for name in known
        for piece in (
            el("dt", RUNGS.get(name, plain(name))),
            el("dd", several(rungs[name], "turn")),
        )
    ]
    return join([el("h4", "How it is known", class_="stack"), el("dl", *items, class_="facts")])


def _profile(summary: Summary) -> Html | None:
    profile: Mapping[str, Mapping[str, int]] = summary.get("profile") or {}
    rows: list[Html] = []
    names = [*(n for n in DIMENSIONS if n in profile), *(n for n in profile if n not in DIMENSIONS)]
    for name in names:
        pieces = [(style, profile[name].get(grade, 0)) for style, grade, _ in _GRADES]
        judged = sum(number for _, number in pieces[:3])
        words = ", ".join(
            f"{n:,} {word}" for (_, n), (_, _, word) in zip(pieces, _GRADES, strict=True)
        )
        label = DIMENSIONS.get(name, plain(name))
        rows += [
            el("span", label),
            strip(pieces, words=f"{label}: {words}"),
            el("span", f"{part(pieces[0][1], judged)} passed" if judged else "\u2013", class_="of"),
        ]
    if not rows:
        return None
    card = el(
        "div",
        key(*((style, word) for style, _, word in _GRADES)),
        el("div", *rows, class_="parts"),
        class_="card",
    )
    note = (
        "Checks of every turn in six dimensions. What was not looked at never counts as passed; "
        "shares are of those that were."
    )
    return section("profile", "Quality of the turns", note, card)
