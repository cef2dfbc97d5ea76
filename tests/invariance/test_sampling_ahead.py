"""Sampling one step ahead: what is stale, what is stored, and that nothing else changes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from distill.ahead import Ahead
from distill.checkpoint import list_checkpoints
from distill.errors import ConfigError, EngineError
from distill.rundir import RunDir, read_json, read_jsonl
from distill.segments import Segments, stored
from distill.types import Rollout, StopReason
from flows import wiring
from flows.configs import load_config
from flows.nightly import run_nightly
from flows.progress import NoProgress

SETTINGS = (
    "stage.opd.trainer.steps=6",
    "stage.opd.checkpoint.every_steps=2",
    "stage.opd.checkpoint.every_seconds=1000",
    "stage.opd.checkpoint.keep=9",
    "stage.opd.sampling.refresh=1",
    "stage.opd.correction.level=token",
)
OVERLAP = (*SETTINGS, "stage.opd.sampling.overlap=true")


def night(home: Path, *overrides: str) -> RunDir:
    config = load_config(["micro", *overrides])
    run = RunDir.create(home, config.run.preset)
    run.write_config(config, "")
    run_nightly(config, run=run, progress=NoProgress())
    return run


def sha(run: RunDir) -> str:
    return str(read_json(run.summary_path)["adapter_sha256"])


def rollouts(run: RunDir) -> dict[int, list[Rollout]]:
    return dict(stored(run.stage_dir("opd"), "rollouts", Rollout))


def row(step: int) -> Rollout:
    return Rollout(
        task_id="t",
        group_id="g",
        index=0,
        domain="d",
        policy_version=step,
        seed="s",
        token_ids=(1, 2),
        completion_mask=(False, True),
        logprobs=(0.0, -1.0),
        stop=StopReason.STOP,
        traj_id="j",
    )


def test_every_reply_but_those_of_the_first_step_is_one_update_old(warm_home):
    run = night(warm_home, *OVERLAP)
    versions = {step: {r.policy_version for r in rows} for step, rows in rollouts(run).items()}
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {2}, 5: {3}, 6: {4}}
    ages = [r.get("staleness/mean") for r in read_jsonl(run.metrics_path) if r["stage"] == "opd"]
    assert ages == [None, 1.0, 1.0, 1.0, 1.0, 1.0]
    weights = [r["correction/mean"] for r in read_jsonl(run.metrics_path) if r["stage"] == "opd"]
    assert abs(weights[0] - 1.0) < 1e-5
    assert max(abs(w - 1.0) for w in weights[1:]) > 1e-4


def test_without_overlap_the_correction_has_nothing_to_correct(warm_home):
    run = night(warm_home, *SETTINGS)
    assert {r.policy_version for r in rollouts(run)[6]} == {5}
    rows = [r for r in read_jsonl(run.metrics_path) if r["stage"] == "opd"]
    assert all("staleness/mean" not in r for r in rows)
    assert max(abs(r["correction/mean"] - 1.0) for r in rows) < 1e-5


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_night_repeats_no_reply_and_ends_with_the_same_weights(warm_home, step):
    run = night(warm_home, *OVERLAP)
    expected, made = sha(run), rollouts(run)
    shutil.rmtree(run.stage_dir("opd") / "final")
    shutil.rmtree(run.path / "gates")
    for path in (run.summary_path, run.eval_path("after")):
        path.unlink()
    for path in list_checkpoints(run.stage_dir("opd")):
        if int(path.name) > step:
            shutil.rmtree(path)
    # What a checkpoint makes durable with itself: its own step, and the replies of the next one.
    for path in (run.stage_dir("opd") / "segments").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        steps = [int(x.split(",")[0].split(":")[1]) for x in lines]
        names = [x.split('"name":"')[1].split('"')[0] for x in lines]
        kept = [
            x
            for x, s, name in zip(lines, steps, names, strict=True)
            if s <= step or (s == step + 1 and name == "rollouts")
        ]
        path.write_text("".join(kept))
    run_nightly(run.read_config(), run=run, progress=NoProgress())
    assert rollouts(run) == made
    assert sha(run) == expected


def test_the_next_step_is_sampled_while_this_one_trains():
    began, may_end = threading.Event(), threading.Event()

    def make(step: int) -> list[Rollout]:
        began.set()
        assert may_end.wait(10)
        return [row(step)]

    ahead = Ahead(make, num_steps=3)
    ahead.start(2)
    assert began.wait(10), "it samples before anybody waits for it"
    may_end.set()
    ahead.finish()
    assert ahead.take(3) is None
    assert ahead.take(2) == [row(2)]
    assert ahead.take(2) is None
    ahead.start(4)
    ahead.finish()
    assert ahead.take(4) is None, "there is no such step"
    ahead.close()


def test_what_goes_wrong_ahead_is_raised_where_it_is_waited_for():
    def make(step: int) -> list[Rollout]:
        raise EngineError(f"no reply in step {step}")

    ahead = Ahead(make, num_steps=3)
    ahead.start(2)
    with pytest.raises(EngineError, match="no reply in step 2"):
        ahead.finish()
    ahead.close()


def test_what_is_kept_for_a_later_step_is_written_once_and_made_by_nobody(tmp_path):
    segments = Segments(tmp_path, 1)
    later = segments.later(2)
    assert not later.holds("rollouts")
    later.keep("rollouts", [row(2)])
    assert later.holds("rollouts")
    assert segments.at(2)("rollouts", Rollout, lambda: pytest.fail("made again")) == [row(2)]
    segments.close()
    (file,) = (tmp_path / "segments").iterdir()
    assert len(file.read_text().splitlines()) == 1
    again = Segments(tmp_path, 2)
    assert again.later(2).holds("rollouts")
    assert again.at(2)("rollouts", Rollout, lambda: pytest.fail("made again")) == [row(2)]
    again.close()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("stage.opd.sampling.refresh=0",), "shares them"),
        (("stage.opd.correction.level=none",), "correction.level"),
        (('stage.opd.sampler={name="kalman"}', "stage.opd.objective.name=grpo"), "by this step's"),
        (("stage.opd.skills.bank=b",), "skill bank 'b'"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        wiring.check(load_config(["micro", *OVERLAP, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [(OVERLAP, "overlap needs the student"), (("trainer.offload=optimizer",), "one process only")],
)
def test_what_several_processes_cannot_do_is_refused_before_any_training(
    overrides, words, monkeypatch
):
    wiring.check(load_config(["micro", *overrides]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=words):
        wiring.check(load_config(["micro", *overrides]))
