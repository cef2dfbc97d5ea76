"""The run directory: nothing half-written, whatever kills the writer, and one owner at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill.config import Config, Layer, load
from distill.errors import ConfigError, DataError, DistillError
from distill.leftovers import sweep_dead, sweep_partial
from distill.lock import EXPIRES_AFTER, Lock, is_held
from distill.rundir import (
    TEMPORARY,
    RunDir,
    append_jsonl,
    atomic_write,
    clear_disk_errors,
    digest_bytes,
    digest_file,
    digest_json,
    from_json,
    read_json,
    read_jsonl,
    staged_dir,
    to_json,
    write_json,
)
from distill.tracking import FanOut, JsonlTracker, NullTracker
from distill.types import CheckpointRef, Estimate, EvalReport, Outcome, Rollout, StopReason


def python(code: str, *arguments: str, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    """Start `code` in another interpreter; `limit_bytes` is the largest file it may write."""
    prelude = "import sys, resource\nfrom pathlib import Path\n"
    if limit_bytes is not None:
        prelude += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def waiting(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Wait for the first line of a child, and let it never outlive the test."""
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        try:
            yield process
        finally:
            process.kill()


KILLED_BEFORE_RENAME = """
import os
from distill.rundir import atomic_write
def stop(*_):
    print("written, not renamed", flush=True)
    import time; time.sleep(60)
Path.replace = stop
atomic_write(Path(sys.argv[1]), "new" * 100_000)
"""


def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    atomic_write(path, "old")
    with waiting(python(KILLED_BEFORE_RENAME, str(path))) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.read_text() == "old"
    assert len(list(tmp_path.glob(f".*{TEMPORARY}*"))) == 1
    assert sweep_partial(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_readers_see_the_old_or_the_new_content_and_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "f"
    code = """
from distill.rundir import atomic_write
path = Path(sys.argv[1])
atomic_write(path, "a" * 200_000)
print("started", flush=True)
while True:
    for letter in "ba":
        atomic_write(path, letter * 200_000)
"""
    with waiting(python(code, str(path))) as child:
        for _ in range(50):
            text = path.read_text()
            assert (len(text), len(set(text))) == (200_000, 1)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert len(path.read_text()) == 200_000


FULL = """
from distill.errors import DistillError
from distill.rundir import append_jsonl, atomic_write, staged_dir
path = Path(sys.argv[1])
def staged():
    with staged_dir(path / "weights") as folder:
        (folder / "small").write_text("fits")
        (folder / "big").write_bytes(b"x" * 100_000)
for write in (
    lambda: atomic_write(path / "file", "x" * 100_000),
    lambda: append_jsonl(path / "rows.jsonl", [{"row": 1, "text": "x" * 100_000}], sync=True),
    staged,
):
    try:
        write()
        print("no error")
    except DistillError as error:
        print(error.exit_code, error)
"""


def test_no_space_left_is_one_clear_line_and_keeps_nothing_half_written(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "rows.jsonl", [{"row": 0}])
    child = python(FULL, str(tmp_path), limit_bytes=20_000)
    out, err = child.communicate(timeout=60)
    lines = out.splitlines()
    assert len(lines) == 3, out + err
    assert all(line.startswith("20 no space left while writing") for line in lines)
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"row": 0}]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_native_writer_that_only_says_disk_full_in_words_is_understood(tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="no space left"), clear_disk_errors(tmp_path):
        raise RuntimeError(f"IoError: {os.strerror(28)} (os error 28)")
    with pytest.raises(KeyError), clear_disk_errors(tmp_path):
        raise KeyError("not about disks")


def test_a_broken_last_line_is_dropped_and_overwritten_by_the_next_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, [{"row": 0}, {"row": 1}])
    with path.open("a") as file:
        file.write('{"row": 2, "text": "interrup')
    with caplog.at_level(logging.WARNING):
        assert read_jsonl(path) == [{"row": 0}, {"row": 1}]
    assert "incomplete last line 3" in caplog.text
    append_jsonl(path, [{"row": 3}])
    assert [row["row"] for row in read_jsonl(path)] == [0, 1, 3]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2"):
        read_jsonl(path)


def test_a_damaged_or_missing_json_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(DataError, match=r"bad\.json is not a readable JSON file"):
        read_json(tmp_path / "bad.json")
    with pytest.raises(DataError, match=r"none\.json does not exist"):
        read_json(tmp_path / "none.json")


def test_a_staged_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made" / "weights"

    def fail() -> None:
        with staged_dir(path) as partial:
            (partial / "a").write_text("a")
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        fail()
    assert list(path.parent.iterdir()) == []
    with staged_dir(path) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "a").write_text("a")
        assert not path.exists()
    assert (path / "deep" / "a").read_text() == "a"
    with pytest.raises(DataError, match="never overwritten"), staged_dir(path):
        pass
    assert (path / "deep" / "a").read_text() == "a"


def test_records_survive_json_and_digests_ignore_the_order_of_keys(tmp_path: Path) -> None:
    rollout = Rollout(
        task_id="t",
        group_id="t",
        index=0,
        domain="sort",
        policy_version=3,
        seed="0/1",
        token_ids=(1, 2),
        completion_mask=(False, True),
        logprobs=(0.0, -0.1234567890123456),
        stop=StopReason.STOP,
        traj_id="t/0",
        reward_parts={"format": 1.0},
    )
    ref = CheckpointRef(path=tmp_path, step=1, policy_version=1, base="b", kind="full", digest="d")
    report = EvalReport(
        suite="world/gate",
        suite_digest="s",
        model="m",
        num_tasks=1,
        samples_per_task=0,
        metrics={"greedy": Estimate(mean=0.5, low=0.0, high=1.0, n=1)},
        outcomes={"t": Outcome(domain="sort", greedy=1.0)},
    )
    for record in (rollout, ref, report):
        write_json(tmp_path / "record.json", record)
        assert from_json(type(record), read_json(tmp_path / "record.json")) == record
    assert digest_json({"a": 1, "b": [2]}) == digest_json({"b": (2,), "a": 1})
    assert digest_json(rollout) == digest_json(to_json(rollout))
    assert digest_file(tmp_path / "record.json") == digest_bytes(
        (tmp_path / "record.json").read_bytes()
    )


def test_a_record_that_does_not_fit_names_the_file_and_the_field() -> None:
    with pytest.raises(DataError, match=r"x\.json is not a valid Estimate: low"):
        from_json(Estimate, {"mean": 1.0, "low": "much", "high": 1, "n": 1}, where="x.json")


def test_run_names_count_up_and_two_processes_never_get_the_same(tmp_path: Path) -> None:
    code = """
from distill.rundir import RunDir
for _ in range(20):
    print(RunDir.create(Path(sys.argv[1]), "tiny", "20260101").name)
"""
    children = [python(code, str(tmp_path)) for _ in range(2)]
    names = [name for child in children for name in child.communicate(timeout=60)[0].split()]
    assert len(names) == len(set(names)) == 40
    assert RunDir.create(tmp_path, "tiny", "20260101").name == "tiny-20260101-41"
    assert RunDir.create(tmp_path, "tiny-20260101", "20260101").name == "tiny-20260101-20260101-1"


def toy(*overrides: str) -> Config:
    return load([Layer(origin="toy", text="[trainer]\nsteps = 3\n")], overrides)


def test_a_folder_of_another_configuration_is_refused_with_the_keys(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "toy")
    run.write_config(toy(), "# as given\n")
    run.write_config(toy(), "# given again\n")
    assert run.read_config() == toy()
    assert (run.path / "config.toml").read_text() == "# as given\n"
    with pytest.raises(ConfigError, match=r"differs in: run\.seed, trainer\.steps;"):
        run.write_config(toy("trainer.steps=4", "run.seed=1"), "")


def test_runs_are_listed_newest_first_and_opened_by_name_or_path(tmp_path: Path) -> None:
    runs = []
    for number in range(3):
        run = RunDir.create(tmp_path, "toy")
        run.write_config(toy(), "")
        os.utime(run.path / "config.json", (1000 + number, 1000 + number))
        runs.append(run)
    RunDir.create(tmp_path, "toy")  # died before it had a configuration
    assert RunDir.all(tmp_path) == runs[::-1]
    assert RunDir.open(tmp_path, runs[0].name) == RunDir.open(tmp_path, runs[0].path) == runs[0]
    with pytest.raises(DataError, match=f"the newest are: {runs[2].name}"):
        RunDir.open(tmp_path, "other")


def test_every_attempt_gets_its_log_and_latest_points_to_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "toy")
    assert [run.new_log().name, run.new_log().name] == ["attempt_1.log", "attempt_2.log"]
    assert (run.path / "logs" / "latest").resolve().name == "attempt_2.log"


def test_a_live_owner_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    code = """
import time
from distill.lock import Lock
with Lock(Path(sys.argv[1]), "night on model 'toy'"):
    print("held", flush=True)
    time.sleep(60)
"""
    with waiting(python(code, str(path))) as child:
        assert is_held(path)
        with pytest.raises(ConfigError, match=f"another night .* is running .pid {child.pid}"):
            Lock(path, "night on model 'toy'").__enter__()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not is_held(path)
        with Lock(path, "night on model 'toy'"):
            assert read_json(path)["pid"] == os.getpid()
    assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "is_taken_over"),
    [
        ({"pid": 2**22 + 1}, True),
        ({"start": "1"}, True),
        ({"boot": "another boot"}, True),
        ({}, False),
        ({"boot": "x", "host": "elsewhere"}, False),
        ({"boot": "x", "host": "elsewhere", "expires": time.time() - 1}, True),
        ({"namespace": "pid:[1]", "expires": time.time() - 1}, True),
        ({"namespace": "pid:[1]"}, False),
    ],
    ids=[
        *("dead owner", "reused pid", "rebooted", "alive", "other host"),
        *("other host, expired", "other container, expired", "other container"),
    ],
)
def test_only_a_lock_whose_owner_is_gone_is_taken_over(
    tmp_path: Path, changes: dict[str, object], is_taken_over: bool
) -> None:
    path = tmp_path / "lock.json"
    with Lock(path, "night"):
        record = read_json(path)
    assert EXPIRES_AFTER - 60 < record["expires"] - time.time() <= EXPIRES_AFTER
    path.write_text(json.dumps({**record, **changes}))
    if is_taken_over:
        with Lock(path, "night"):
            assert read_json(path)["pid"] == os.getpid()
        assert not path.exists()
    else:
        with pytest.raises(ConfigError, match="another night is running"):
            Lock(path, "night").__enter__()


def test_an_unreadable_lock_file_belongs_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("{")
    with Lock(tmp_path / "lock.json", "night"):
        assert read_json(tmp_path / "lock.json")["pid"] == os.getpid()


def test_the_metrics_file_holds_valid_json_and_a_lost_file_never_stops_a_night(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    tracker = FanOut(
        [
            JsonlTracker(blocked / "metrics.jsonl", stage="opd"),
            NullTracker(),
            JsonlTracker(tmp_path / "metrics.jsonl", stage="opd"),
        ]
    )
    with caplog.at_level(logging.WARNING):
        tracker.log({"loss": float("nan"), "num_tokens": 5, "lr": 0.5}, 1)
        tracker.log({"loss": 0.25}, 2)
    tracker.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"stage": "opd", "step": 1, "loss": None, "num_tokens": 5, "lr": 0.5},
        {"stage": "opd", "step": 2, "loss": 0.25},
    ]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert caplog.text.count("numbers are being lost") == 1


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / f".a.partial-{gone}-1").mkdir()
    (tmp_path / f".b.partial-{gone}-1").write_text("half")
    (tmp_path / f".c.partial-{os.getpid()}-1").write_text("being written")
    assert sweep_dead(tmp_path) == 2
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [f".c.partial-{os.getpid()}-1"]
