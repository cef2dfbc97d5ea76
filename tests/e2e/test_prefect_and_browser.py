"""The night as people run it: under a real Prefect server, its report in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
import zlib
from pathlib import Path

import psutil
import pytest

from conftest import Command
from distill.rundir import RunDir, read_json

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class PrefectCommand(Command):
    @property
    def env(self) -> dict[str, str]:
        clean = {k: v for k, v in super().env.items() if not k.startswith("PREFECT_")}
        return {**clean, "PREFECT_HOME": str(self.home / "prefect")}


def servers(word: str = "prefect.server") -> set[int]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if word in " ".join(process.info["cmdline"] or []):
            found.add(process.pid)
    return found


@pytest.fixture(scope="module")
def prefect_home(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished night under a Prefect server that started from an empty folder."""
    home = tmp_path_factory.mktemp("prefect")
    shutil.copytree(micro_home / "cache", home / "cache")
    before = servers()
    done = PrefectCommand(home)("nightly", "micro", "run.orchestrator=prefect", timeout=500)
    assert done.returncode in (0, 3), done.stderr
    assert "telemetry" not in done.stderr
    assert servers() <= before, "the temporary server is gone when the night is over"
    return home


def test_a_night_under_prefect_ends_with_the_weights_of_one_without(prefect_home, micro_home):
    digests = [
        read_json(RunDir.all(home)[0].summary_path)["adapter_sha256"]
        for home in (prefect_home, micro_home)
    ]
    assert digests[0] == digests[1]


def test_every_stage_was_a_task_run_and_the_artifacts_are_there(prefect_home):
    import sqlite3

    with sqlite3.connect(prefect_home / "prefect" / "prefect.db") as database:
        tasks = [name for (name,) in database.execute("select name from task_run order by id")]
        states = {state for (state,) in database.execute("select state_type from task_run")}
        artifacts = {key for (key,) in database.execute("select key from artifact")}
    database.close()
    expected = {"teacher", "base", "start", "evaluate before", "evaluate teacher", "opd"}
    assert expected | {"evaluate after", "gate", "promote", "report"} == set(tasks)
    assert states == {"COMPLETED"}
    assert {"gate", "report"} <= artifacts


def test_a_killed_night_leaves_a_server_that_the_next_one_ends(micro_home, tmp_path):
    shutil.copytree(micro_home / "cache", tmp_path / "cache")
    command, before = PrefectCommand(tmp_path), servers()
    process = command.start(
        "nightly", "micro", "run.orchestrator=prefect", "stage.opd.trainer.steps=400"
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/stages/opd/segments/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (orphan,) = servers() - before
    try:
        done = command("nightly", "micro", "run.orchestrator=prefect", timeout=500)
        assert done.returncode in (0, 3), done.stderr
        assert orphan not in servers()
        assert servers() <= before
    finally:
        if psutil.pid_exists(orphan):
            os.kill(orphan, signal.SIGKILL)


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    pytest.fail("no browser found; install Debian's package chromium")


def look(page: Path, picture: Path, width: int) -> tuple[int, int]:
    """Take a picture of a page; returns how many different colours and rows it has."""
    profile = picture.parent / f"profile-{width}"
    subprocess.run(
        [
            browser(),
            *BROWSER_FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},1400",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pixels = png_rows(picture.read_bytes())
    return len({bytes(row[i : i + 3]) for row in pixels[::7] for i in range(1, 900, 21)}), len(
        set(pixels)
    )


def png_rows(data: bytes) -> list[bytes]:
    """Filtered scan lines of a PNG: enough to see that a page is not blank."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, packed, width, height = 8, b"", 0, 0
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, height = struct.unpack(">II", body[:8])
        if kind == b"IDAT":
            packed += body
        position += 12 + length
    raw = zlib.decompress(packed)
    stride = len(raw) // height
    assert width > 0
    return [raw[i * stride : (i + 1) * stride] for i in range(height)]


@pytest.mark.parametrize("width", [1100, 500])
def test_the_report_opens_in_a_browser_and_is_not_blank(micro_home, tmp_path, width):
    run = RunDir.all(micro_home)[0]
    colours, rows = look(run.path / "report.html", tmp_path / "report.png", width)
    assert colours > 8
    assert rows > 200


def test_the_page_holds_its_sections_once_scripts_and_styles_have_run(micro_home, tmp_path):
    run = RunDir.all(micro_home)[0]
    done = subprocess.run(
        [
            browser(),
            *BROWSER_FLAGS,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (run.path / "report.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    for word in ("<svg", "sort", "rewrite", "rule", read_json(run.summary_path)["verdict"]):
        assert word in done.stdout
