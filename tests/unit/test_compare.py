"""Comparisons: their configuration, their budget, their table and their page."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from distill.config import Layer
from distill.errors import ConfigError, DataError
from distill.rundir import from_json, to_json
from evals.compare_page import render
from evals.compare_page_charts import curve
from evals.compare_page_facts import About, Ends, Point, Range, Results, Run, Speed
from flows.compare_config import Comparison, choose, comparisons, load_comparison, resolve
from flows.compare_run import tokens_of
from flows.compare_table import detectable, summarise

EVIL = '</td><script>alert("1")</script>&'
VOID = {"meta", "br", "hr"}
BASE = """
[model.build]
hidden_size = 16

[data]
name = "world"

[evals]
samples = 1
k = [1]

[[stage]]
name = "base"
kind = "sft"
target = "base"

[stage.objective]
name = "sft"

[[stage]]
name = "student"
kind = "on_policy"
target = "student"

[stage.model]
path = "stage:base"

[stage.trainer]
lr = 1e-3
"""
TWO = """
[[contender]]
name = "plain"

[contender.objective]
name = "grpo"

[[contender]]
name = "hot"

[contender.objective]
name = "grpo"
ddof = 1

[contender.trainer]
lr = 1e-2
"""


def made(text: str = TWO, *overrides: str, compare: str = "") -> Comparison:
    return resolve([Layer(origin="my.toml", text=BASE + compare + text)], overrides)


def config_of(comparison: Comparison, name: str, seed: int = 0) -> Any:
    whole = comparison.config(name, seed)
    return whole.for_stage(whole.stage("student"))


def test_a_contender_is_the_student_stage_with_its_own_sections_over_it() -> None:
    comparison = made()
    assert comparison.names == ["plain", "hot"]
    assert comparison.baseline == "plain"
    plain, hot = config_of(comparison, "plain"), config_of(comparison, "hot", seed=3)
    assert (plain.trainer.lr, hot.trainer.lr) == (1e-3, 1e-2)
    assert hot.objective.options == {"ddof": 1}
    assert (plain.run.seed, hot.run.seed) == (0, 3)
    assert plain.model.path == hot.model.path == "stage:base"
    assert plain.evals.tasks_per_domain == 256


def test_values_of_the_command_line_reach_everyone_or_one_contender() -> None:
    comparison = made(
        TWO, "stage.student.trainer.batch=2", "contender.hot.trainer.lr=0.5", "compare.points=3"
    )
    assert comparison.settings.points == 3
    assert [config_of(comparison, n).trainer.batch for n in comparison.names] == [2, 2]
    assert [config_of(comparison, n).trainer.lr for n in comparison.names] == [1e-3, 0.5]


def test_a_later_file_adds_to_a_contender_by_name_or_replaces_the_list() -> None:
    first = Layer(origin="a", text=BASE + TWO)
    adds = Layer(origin="b", text="[contender.hot.trainer]\nlr = 0.25")
    assert config_of(resolve([first, adds]), "hot").trainer.lr == 0.25
    assert config_of(resolve([first, adds]), "hot").objective.options == {"ddof": 1}
    replaces = Layer(origin="b", text='[[contender]]\nname = "new"\nobjective = {name = "grpo"}')
    assert resolve([first, replaces]).names == ["new"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[contender]]\nname = "a"\n[contender.objektive]\nname = "grpo"', "mean 'objective'"),
        ('[[contender]]\nname = "a"\n[contender.model]\npath = "x"', "unknown key 'contender.a.m"),
        ('[[contender]]\nname = "a"\n[[contender]]\nname = "a"', "two contenders are called 'a'"),
        ('[[contender]]\nname = "a/b"', "needs a name of letters"),
        ("[[contender]]\n", "needs a name of letters"),
        ("contender = 3", "expected \\[\\[contender\\]\\] tables, found contender = 3"),
        ('[contender.hot]\nview = {name = "plain"}', "no contender is called 'hot'"),
        ("", "there is nothing to compare"),
        ("[compare]\ntoken = 5" + TWO, "unknown key 'compare.token', did you mean 'tokens'"),
        ("[compare]\ntokens = 0" + TWO, "compare.tokens: expected at least 1, found 0"),
        ("[compare]\nseeds = [1, 1]" + TWO, "compare.seeds must name different seeds"),
        ('[compare]\nbaseline = "hto"' + TWO, "compare.baseline: .*did you mean 'hot'"),
        ('[compare]\nmetric = "pass"' + TWO, "compare.metric: expected one of 'sampled'"),
        ("compare = 1" + TWO, "expected a table \\[compare\\], found 1"),
    ],
)
def test_a_wrong_table_is_refused_by_name(text: str, message: str) -> None:
    # A bare value must stand before the first table.
    text = f"{text}\n{BASE}" if text.startswith(("contender =", "compare =")) else BASE + text
    with pytest.raises(ConfigError, match=message):
        resolve([Layer(origin="my.toml", text=text)])


def test_an_unknown_key_deep_inside_names_the_contender() -> None:
    comparison = made(TWO, "contender.hot.trainer.lrr=1")
    with pytest.raises(ConfigError, match=r"contender 'hot': unknown key .*did you mean 'lr'"):
        comparison.config("hot", 0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=3", "run.seed is set by compare.seeds"),
        ("evals.tasks_per_domain=3", "is set by compare.tasks_per_domain"),
        ("evals.samples=0", "needs evals.samples of at least 1"),
        ("stage.student.target=base", 'target = "student"'),
        ("stage.student.kind=sft", "on-policy, as the template"),
    ],
)
def test_what_does_not_fit_a_comparison_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(TWO, override)


def test_a_contender_that_cannot_run_is_named_before_any_model_is_built() -> None:
    from flows.compare import check

    check(made())
    with pytest.raises(ConfigError, match=r"contender 'hot': .*needs a teacher"):
        check(made(TWO, "contender.hot.objective.name=opd"))


def test_only_seeds_and_baseline_choose() -> None:
    chosen = choose(made(), only=["hot"], num_seeds=3)
    assert (chosen.names, chosen.settings.seeds, chosen.baseline) == (["hot"], (0, 1, 2), "hot")
    several = made(TWO, compare="[compare]\nseeds = [5, 7, 9]")
    assert choose(several, num_seeds=2).settings.seeds == (5, 7)
    assert choose(several, num_seeds=4).settings.seeds == (5, 7, 9, 10)
    assert choose(made(), baseline="hot").baseline == "hot"
    with pytest.raises(ConfigError, match=r"--only: no contender is called 'plian', .*'plain'"):
        choose(made(), only=["plian"])
    with pytest.raises(ConfigError, match="--baseline: no contender is called 'plain'"):
        choose(made(), only=["hot"], baseline="plain")


def test_every_objective_stands_in_a_packaged_comparison() -> None:
    from distill.objectives import OBJECTIVES
    from flows.compare import check

    used = set()
    for packaged in comparisons():
        comparison = load_comparison([packaged])
        check(comparison)
        used |= {config_of(comparison, name).objective.name for name in comparison.names}
    # All contenders have one teacher, and that of `gold` has another tokenizer.
    assert used == set(OBJECTIVES) - {"sft", "gold"}
    assert {"compare", "skills"} <= set(comparisons())
    with pytest.raises(ConfigError, match=r"neither a packaged comparison nor a file, .*'compare'"):
        load_comparison(["comparee"])


def test_dropped_rows_and_the_words_of_a_teacher_count_as_tokens() -> None:
    assert tokens_of({"rollout/tokens": 640.0, "num_tokens": 20}) == 640
    assert tokens_of({"rollout/tokens": 640.0, "audit/teacher_tokens": 96.0}) == 736


def run_of(name: str, seed: int, ends: list[float], **changes: Any) -> Run:
    """A run whose tasks all start at 0 and whose curve rises in two points."""
    end = sum(ends) / len(ends)
    curve = tuple(
        Point(point=i, step=10 * i, tokens=1000 * i, greedy=v, sampled=v, domains={"rule": v})
        for i, v in enumerate((0.0, end / 2, end))
    )
    values: dict[str, Any] = {
        "contender": name,
        "seed": seed,
        "stopped": None,
        "steps": 20,
        "tokens": 2000,
        "num_dropped": 0,
        "curve": curve,
        "start": (0.0,) * len(ends),
        "end": tuple(ends),
        "grad_norm": Range(low=0.1, high=1.0 + seed),
        "entropy": Range(low=0.2, high=0.9),
        "kept": Ends(start=1.0, end=0.75),
        "speed": Speed(seconds=2.0, seconds_per_step=0.1 + seed, peak_rss_bytes=2**28),
    }
    return Run(**(values | changes))


GOOD, BAD = [1.0] * 18 + [0.0] * 2, [1.0] * 6 + [0.0] * 14
RUNS = [run_of("good", s, GOOD) for s in (0, 1)] + [run_of("bad", s, BAD) for s in (0, 1)]


def test_the_table_pools_seeds_ranks_by_end_and_compares_with_the_baseline() -> None:
    table = summarise(RUNS, ["bad", "good"], baseline="bad", level=0.45, metric="sampled")
    good, bad = table.rows
    assert (good.name, bad.name) == ("good", "bad")
    assert good.end == pytest.approx(0.9)
    assert good.change.mean == pytest.approx(0.9)
    assert good.change.low < 0.9 < good.change.high
    assert bad.against is None
    assert good.against is not None
    assert good.against.mean == pytest.approx(0.6)
    assert (good.num_reached, good.steps_to_level, good.tokens_to_level) == (2, 10, 1000)
    assert (bad.num_reached, bad.tokens_to_level) == (0, None)
    assert (good.grad_norm.low, good.grad_norm.high) == (0.1, 2.0)
    assert good.seconds_per_step == pytest.approx(0.6)
    assert good.kept == pytest.approx(-0.25)
    gaps = [g - b for g, b in zip(GOOD * 2, BAD * 2, strict=True)]
    spread = (sum((g - 0.6) ** 2 for g in gaps) / 40) ** 0.5
    assert table.detectable == pytest.approx(2.8016 * spread / 40**0.5, rel=1e-4)


def test_equal_results_do_not_claim_that_any_difference_would_be_seen() -> None:
    assert detectable([0.0] * 100, [0.0] * 100) == pytest.approx(0.028, abs=1e-3)


def test_contenders_with_different_seeds_are_not_compared() -> None:
    with pytest.raises(DataError, match="needs the same seeds"):
        summarise(RUNS[:3], ["good", "bad"], baseline="bad", level=0.5, metric="sampled")


def results_of(runs: list[Run], **changes: Any) -> Results:
    names = list(dict.fromkeys(run.contender for run in runs))
    values: dict[str, Any] = {
        "name": "mine-20260101-1",
        "metric": "sampled",
        "level": 0.45,
        "tokens": 2000,
        "num_tasks": 20,
        "seeds": tuple(dict.fromkeys(run.seed for run in runs)),
        "contenders": tuple(
            About(name=n, objective="grpo", teacher="none", view="none", lr=1e-4) for n in names
        ),
        "runs": tuple(runs),
        "table": summarise(runs, names, baseline=names[-1], level=0.45, metric="sampled"),
        "teachers": {"0": {"teacher": {"all": 0.97}}},
        "command": "distill compare",
    }
    return Results(**(values | changes))


class Page(HTMLParser):
    """Checks that elements close in order, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_results_survive_their_file() -> None:
    results = results_of(RUNS)
    assert from_json(Results, to_json(results)) == results


def test_the_page_names_the_winner_and_draws_one_panel_per_contender() -> None:
    page = Page(render(results_of(RUNS)))
    assert page.tags.count("figure") == 2
    assert page.words[page.words.index("good") + 1] == " ends highest: 90.0\u00a0%"
    assert "script" not in page.tags
    assert "Stopped early" not in page.words
    one = Page(render(results_of(RUNS[:1])))
    assert "Visible difference" not in one.words


def test_no_title_is_surer_than_the_numbers() -> None:
    def told(*runs: Run) -> str:
        return "".join(Page(render(results_of(list(runs)))).words)

    flat = [run_of(name, 0, [0.0] * 20) for name in ("good", "bad")]
    assert "No contender surely rose above the start" in told(*flat)
    near = [1.0] * 17 + [0.0] * 3
    close = told(run_of("good", 0, GOOD), run_of("bad", 0, near))
    assert "good, bad end highest, too close to tell apart" in close


def test_a_run_that_stopped_shows_why_and_keeps_its_last_measure() -> None:
    broken = run_of("good", 0, GOOD, stopped="collapsed at step 12")
    last = replace(broken.curve[-1], point=1, step=12, tokens=1200, sampled=0.1)
    broken = replace(broken, curve=(*broken.curve[:2], last))
    results = results_of([broken, run_of("bad", 0, BAD)])
    assert [round(s.tokens) for s in curve(results, "good")] == [0, 1000, 1200]
    assert "good, seed 0: collapsed at step 12" in Page(render(results)).words


def learning_run(name: str, seed: int, ends: list[float], turns: list[float], **more: Any) -> Run:
    """A run whose greedy attempts end after these numbers of turns."""
    run = run_of(name, seed, ends, end_turns=tuple(turns), **more)
    last = replace(run.curve[-1], turns=sum(turns) / len(turns))
    return replace(run, curve=(*run.curve[:-1], last))


LEARNING = [
    learning_run(
        "good",
        seed,
        GOOD,
        [3.0] * 10 + [5.0] * 10,
        withheld=0.5 + 0.1 * seed,
        notes_valid=0.9,
        notes_correct=0.6,
        skills_added=3 + 2 * seed,
    )
    for seed in (0, 1)
] + [learning_run("bad", seed, BAD, [6.0] * 20) for seed in (0, 1)]


def test_the_table_knows_turns_and_skills_where_runs_do() -> None:
    good, bad = results_of(LEARNING).table.rows
    assert (good.turns, bad.turns) == (4.0, 6.0)
    assert good.turns_against is not None
    assert good.turns_against.mean == pytest.approx(-2.0)
    assert good.turns_against.low < -2.0 < good.turns_against.high < 0
    assert bad.turns_against is None
    assert good.withheld == pytest.approx(0.55)
    assert (good.notes_valid, good.notes_correct) == (0.9, 0.6)
    assert good.skills_added == 4.0
    assert (bad.withheld, bad.notes_valid, bad.skills_added) == (None, None, 0.0)
    assert [row.turns for row in results_of(RUNS).table.rows] == [None, None]


def test_a_contender_that_always_ends_at_once_takes_one_turn_beside_others() -> None:
    runs = [*LEARNING[:2], *RUNS[2:]]
    good, bad = results_of(runs).table.rows
    assert (good.turns, bad.turns) == (4.0, 1.0)
    assert good.turns_against is not None
    assert good.turns_against.mean == pytest.approx(3.0)


def test_turns_are_not_paired_where_only_their_means_were_kept() -> None:
    runs = [replace(run, end_turns=()) for run in LEARNING]
    good = results_of(runs).table.rows[0]
    assert good.turns == 4.0
    assert good.turns_against is None


def test_the_page_has_columns_for_turns_and_skills_only_where_a_run_has_them() -> None:
    words = Page(render(results_of(LEARNING))).words
    for name in ("Turns", "Turns against bad", "Skills withheld", "Notes valid", "Notes right"):
        assert name in words
    assert words.count("Turns and skills") == 1
    assert {"4.00", "6.00", "\u22122.00", "55.0\u00a0%", "\u221235.0 points", "60.0\u00a0%"} <= {
        *words
    }
    plain = Page(render(results_of(RUNS))).words
    assert not {"Turns and skills", "Turns", "Skills", "Skills added"} & {*plain}
    turns = [replace(r, withheld=None, notes_valid=None, notes_correct=None) for r in LEARNING]
    only = Page(render(results_of([replace(r, skills_added=0) for r in turns]))).words
    assert "Turns" in only
    assert not {"Turns and skills", "Skills", "Notes valid", "Skills added"} & {*only}


def test_results_of_before_there_were_turns_and_skills_can_be_read() -> None:
    stored = to_json(results_of(RUNS))
    new = ("withheld", "notes_valid", "notes_correct", "skills_added")
    for run in stored["runs"]:
        for key in (*new, "end_turns"):
            del run[key]
        for point in run["curve"]:
            del point["turns"]
    for row in stored["table"]["rows"]:
        for key in (*new, "turns", "turns_against"):
            del row[key]
    assert from_json(Results, stored) == results_of(RUNS)


def test_everything_on_the_page_is_escaped() -> None:
    runs = [replace(run, contender=EVIL, stopped=EVIL) for run in RUNS[:2]] + RUNS[2:]
    results = results_of(
        runs,
        name=EVIL,
        command=EVIL,
        contenders=(About(name=EVIL, objective=EVIL, teacher=EVIL, view=EVIL, lr=1.0),),
    )
    text = render(results)
    assert "<script" not in text
    assert "script" not in Page(text).tags
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
