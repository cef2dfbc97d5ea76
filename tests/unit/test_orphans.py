"""A server whose owner was killed is ended by the next night; everything else is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from distill.rundir import read_json, write_json
from flows.orphans import end_orphans, record_as_they_start, record_children

OWNER = """
import subprocess, sys, time
from pathlib import Path
from flows.orphans import record_children
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # a-server"])
print(record_children(Path(sys.argv[1]), "a-server"), flush=True)
time.sleep(60)
"""


def start_owner(path: Path) -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "1\n"
    owner.stdout.close()
    return owner


def test_the_child_of_a_killed_owner_is_ended_and_that_of_a_living_one_is_not(tmp_path):
    owner = start_owner(tmp_path / "run.json")
    (child,) = read_json(tmp_path / "run.json")["children"]
    assert end_orphans(tmp_path) == 0
    assert psutil.pid_exists(child["pid"])
    owner.kill()
    owner.wait()
    assert end_orphans(tmp_path) == 1
    assert not psutil.pid_exists(child["pid"]) or (
        psutil.Process(child["pid"]).status() == psutil.STATUS_ZOMBIE
    )
    assert end_orphans(tmp_path) == 0


def test_a_recycled_process_id_is_never_touched(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    gone = {"pid": 2**22 - 3, "created": 1.0}
    stale = {"pid": bystander.pid, "created": 1.0}
    write_json(tmp_path / "run.json", {"owner": gone, "children": [stale]})
    assert end_orphans(tmp_path) == 0
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_server_is_recorded_before_it_is_ready(tmp_path):
    watch = record_as_they_start(tmp_path / "run.json", "a-late-server", 20.0)
    command = "import time; time.sleep(60)  # a-late-server"
    server = subprocess.Popen([sys.executable, "-c", command])
    watch.join(20.0)
    (child,) = read_json(tmp_path / "run.json")["children"]
    assert child["pid"] == server.pid
    server.kill()
    server.wait()


def test_nothing_recorded_is_nothing_to_do(tmp_path):
    assert end_orphans(tmp_path / "missing") == 0
    assert record_children(tmp_path / "run.json", "no such word") == 0
