"""The collapse monitor: silent on healthy series, warns and ends a stage at the right step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distill.config import Layer, load
from distill.errors import ConfigError
from distill.monitor import MEASURES, Collapse, Finding, Monitor
from distill.rows import repeated_share, summarise
from distill.sections import LENIENT, STRICT, AbortLimits, MonitorSection, WarnLimits
from distill.types import StopReason
from helpers import make_rollout

HEALTHY = {
    "grad_norm": 2.0,
    "reward/mean": 0.5,
    "rollout/surprise": 1.0,
    "rollout/distinct_share": 0.9,
    "rollout/truncated_share": 0.05,
    "rollout/repeat_share": 0.0,
    "rollout/tokens_mean": 20.0,
    "opd/advantage_at/p5": -3.0,
    "opd/advantage_at/p95": 0.5,
    "gkd/student_mass": 0.95,
    "gkd/negative_share": 0.01,
}
BROKEN = {
    "entropy": {"rollout/surprise": 0.001},
    "distinct": {"rollout/distinct_share": 0.02},
    "truncated": {"rollout/truncated_share": 1.0},
    "repeated": {"rollout/repeat_share": 0.9},
    "length": {"rollout/tokens_mean": 1.0},
    "grad_norm": {"grad_norm": 1e6},
    "grad_jump": {"grad_norm": 100.0},
    "advantage": {"opd/advantage_at/p5": -60.0},
    "mass": {"gkd/student_mass": 0.1},
    "negative": {"gkd/negative_share": 0.9},
}
"""What a row says when one measure is far past every limit."""
HEALTHY_STEPS = 20


def monitor(guarded: bool = False, **options: Any) -> Monitor:
    return Monitor(options=MonitorSection(**options), stage="opd", guarded=guarded)


def series(
    changes: dict[str, float], healthy: int = HEALTHY_STEPS, broken: int = 30
) -> list[dict[str, float]]:
    return [HEALTHY] * healthy + [HEALTHY | changes] * broken


def play(watcher: Monitor, rows: list[dict[str, float]]) -> list[Finding]:
    """What each step adds, up to a collapse; the state goes through JSON as in a checkpoint."""
    found: list[Finding] = []
    for step, row in enumerate(rows, 1):
        state = json.loads(json.dumps(found[-1].state)) if found else {}
        found.append(watcher.watch(step, row, state))
        if found[-1].collapse is not None:
            break
    return found


def first_warning(found: list[Finding]) -> int | None:
    return next((step for step, f in enumerate(found, 1) if f.warnings), None)


def collapse_of(found: list[Finding]) -> Collapse:
    assert found[-1].collapse is not None
    return found[-1].collapse


def test_the_examples_cover_every_measure_and_every_measure_has_both_limits():
    assert set(BROKEN) == set(MEASURES)
    assert set(MEASURES) == set(WarnLimits.__dataclass_fields__)
    assert set(MEASURES) == set(AbortLimits.__dataclass_fields__)
    assert set(LENIENT) | set(STRICT) <= set(MEASURES)


@pytest.mark.parametrize("mode", ["off", "warn", "lenient", "strict"])
def test_a_healthy_series_is_silent_in_every_mode(mode):
    found = play(monitor(mode=mode), series({}))
    assert len(found) == 50
    assert not any(f.warnings or f.collapse or f.is_suspect for f in found)


@pytest.mark.parametrize("name", MEASURES)
def test_a_broken_measure_is_warned_of_once_and_counted(name):
    watcher = monitor(mode="warn")
    rows = series(BROKEN[name] | {"reward/mean": 0.0})
    found = play(watcher, rows)
    said = f": {MEASURES[name].text} is"
    texts = [text for f in found for text in f.warnings if said in text]
    assert len(texts) == 1
    step = HEALTHY_STEPS + MEASURES[name].warn_after
    assert texts[0].startswith(f"stage opd, step {step}: ")
    (line,) = [w for w in watcher.warnings(found[-1].state, 50) if w.startswith(texts[0])]
    count = {"grad_jump": 20}.get(name, 30)  # the running median follows a lasting jump
    assert f"past it in {count} of 50 steps" in line


@pytest.mark.parametrize("name", MEASURES)
def test_a_limit_of_ones_own_ends_the_stage_after_patience_steps_in_a_row(name):
    limits = AbortLimits(**{n: 0.0 for n in MEASURES} | {name: getattr(WarnLimits(), name)})
    watcher = monitor(mode="strict", patience=4, abort=limits)
    collapse = collapse_of(play(watcher, series(BROKEN[name])))
    assert collapse.measure == name
    assert (collapse.since, collapse.step) == (HEALTHY_STEPS + 1, HEALTHY_STEPS + 4)
    assert collapse.healthy_step == HEALTHY_STEPS - 1
    assert f"at step {HEALTHY_STEPS + 4} the {MEASURES[name].text} is" in collapse.text


@pytest.mark.parametrize("name", MEASURES)
def test_a_limit_of_zero_turns_a_measure_off(name):
    off = {n: 0.0 for n in MEASURES}
    watcher = monitor(mode="strict", warn=WarnLimits(**off), abort=AbortLimits(**off))
    found = play(watcher, series(BROKEN[name]))
    assert len(found) == 50
    assert not any(f.warnings for f in found)
    assert not watcher.can_abort


def test_by_default_low_entropy_ends_nothing_unless_all_replies_are_the_same():
    worse = {"reward/mean": 0.0}
    assert play(monitor(), series(BROKEN["entropy"] | worse))[-1].collapse is None
    both = play(monitor(), series(BROKEN["entropy"] | BROKEN["distinct"] | worse))
    collapse = collapse_of(both)
    assert collapse.step == HEALTHY_STEPS + 10
    assert first_warning(both) == HEALTHY_STEPS + 3
    assert "distinct" in collapse.text
    assert "entropy" in collapse.text


def test_a_student_that_has_learnt_its_task_is_not_called_collapsed():
    learnt = BROKEN["entropy"] | BROKEN["distinct"] | {"reward/mean": 0.9}
    found = play(monitor(), series(learnt))
    assert not any(f.warnings or f.collapse for f in found)


def test_by_default_a_stage_whose_replies_no_longer_end_is_ended():
    found = play(monitor(), series(BROKEN["truncated"] | {"reward/mean": 0.0}))
    assert first_warning(found) == HEALTHY_STEPS + 3
    assert collapse_of(found).step == HEALTHY_STEPS + 10
    assert collapse_of(found).action == "fail"


def test_replies_that_were_cut_from_the_start_on_are_a_warning_and_no_collapse():
    found = play(monitor(), [HEALTHY | BROKEN["truncated"]] * 40)
    assert first_warning(found) == 3
    assert found[-1].collapse is None


@pytest.mark.parametrize(
    ("name", "value"), [("entropy", 0.29), ("truncated", 0.21), ("distinct", 0.44)]
)
def test_a_guarded_objective_stops_at_the_limits_of_its_method(name, value):
    (key,) = BROKEN[name]
    collapse = collapse_of(play(monitor(guarded=True), series({key: value})))
    assert collapse.step == HEALTHY_STEPS + 5
    assert collapse.action == "stop"
    assert play(monitor(), series({key: value}))[-1].collapse is None


def test_one_healthy_step_starts_the_count_anew():
    rows = series(BROKEN["truncated"], broken=4) + series(BROKEN["truncated"], 1, 5)
    found = play(monitor(mode="strict"), rows)
    assert collapse_of(found).since == HEALTHY_STEPS + 6
    suspect = [step for step, f in enumerate(found, 1) if f.is_suspect]
    assert suspect == [21, 22, 23, 24, 26, 27, 28, 29, 30]


def test_the_exact_entropy_is_preferred_to_its_estimate():
    rows = [r | {"entropy": 2.0} for r in series(BROKEN["entropy"])]
    assert play(monitor(mode="strict"), rows)[-1].collapse is None


def test_a_collapse_in_the_very_first_steps_does_not_become_the_start():
    found = play(monitor(patience=3), series(BROKEN["truncated"] | {"reward/mean": 0.0}, 1))
    collapse = collapse_of(found)
    assert (collapse.since, collapse.step, collapse.healthy_step) == (2, 4, 0)


def test_a_measure_that_a_step_lacks_is_not_judged():
    rows = [{"grad_norm": 2.0, "loss": 1.0}] * 30
    found = play(monitor(mode="strict"), rows)
    assert len(found) == 30
    assert not any(f.warnings for f in found)


def test_a_resumed_series_ends_like_an_unbroken_one():
    watcher = monitor(guarded=True)
    rows = [
        HEALTHY | {"rollout/surprise": 0.93**step, "grad_norm": 1 / 3 * step} for step in range(40)
    ]
    whole: list[Finding] = []
    for step, row in enumerate(rows, 1):
        whole.append(watcher.watch(step, row, whole[-1].state if whole else {}))
        if whole[-1].collapse:
            break
    through_json = play(watcher, rows)
    assert [f.state for f in whole] == [f.state for f in through_json]
    assert collapse_of(whole) == collapse_of(through_json)


def test_limits_come_from_the_configuration_and_a_stage_may_have_its_own():
    text = """
        [model.build]
        [monitor]
        on_abort = "stop"
        [monitor.warn]
        entropy = 0.5
        [[stage]]
        name = "a"
        kind = "on_policy"
        target = "student"
        [stage.monitor]
        mode = "strict"
        [stage.monitor.abort]
        truncated = 0.7
    """
    config = load([Layer(origin="f", text=text)], ["stage.a.monitor.patience=2"])
    own = config.for_stage(config.stage("a")).monitor
    assert (own.mode, own.on_abort, own.patience) == ("strict", "stop", 2)
    assert own.warn == WarnLimits(entropy=0.5)
    assert own.abort == AbortLimits(truncated=0.7)
    assert config.monitor.mode == "auto"
    collapse = collapse_of(
        play(Monitor(options=own, stage="a"), series({"rollout/truncated_share": 0.8}))
    )
    assert (collapse.step, collapse.limit) == (HEALTHY_STEPS + 2, 0.7)


def test_an_unknown_measure_is_an_error_that_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"monitor\.warn\.entropie.*did you mean 'entropy'"):
        load([], ["monitor.warn.entropie=1"])


def replies(*texts: str, **changes: Any) -> dict[str, float]:
    rows = [
        make_rollout([5, 6], [ord(c) for c in text], traj_id=str(i), **changes)
        for i, text in enumerate(texts)
    ]
    return summarise(rows)


def test_the_variety_of_replies_is_measured():
    told = replies("abcdefgh", "abcdefgh", "hgfedcba", "abababababababab")
    assert told["rollout/distinct_share"] == 0.75
    assert told["rollout/repeat_share"] == 0.25
    assert told["rollout/missing_end_share"] == 0.0
    assert replies("abc", "abd", stop=StopReason.LENGTH)["rollout/missing_end_share"] == 1.0
    assert replies("ab", logprobs=(0.0, 0.0, -1.0, -2.0))["rollout/surprise"] == 1.5


def test_worked_solutions_and_failed_episodes_are_no_replies_of_the_student():
    assert "rollout/distinct_share" not in replies("abc", "abc", policy_version=-1)
    failed = make_rollout([5], [7, 8], completion_mask=(False,) * 3, error="x")
    assert summarise([failed, make_rollout([5], [7])])["rollout/distinct_share"] == 1.0


@pytest.mark.parametrize(
    ("turns", "share"),
    [
        (["abcdefghij"], 0.0),
        (["abc"], 0.0),
        (["aaaaaaaaaa"], 4 / 7),
        (["abcd" * 25], 85 / 97),
        (["walk", "walk", "walk", "walk", "walk"], 0.0),  # once per turn is no loop
    ],
)
def test_the_repeated_share_counts_n_grams_seen_three_times_before(turns, share):
    assert repeated_share(turns) == pytest.approx(share)
