"""How fast a log is imported, and how much memory that takes.

The log is generated: LiteLLM spend rows of about 2 KB with a conversation, a routing decision and
an outcome each, in sessions of a few turns. Every measurement runs in a fresh process; every figure
returned was measured in that run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from distill.errors import ConfigError, PreflightError

MODELS = ("c0-small", "c1-base", "c2-large", "c3-max")
TIERS = dict(zip(MODELS, range(4), strict=True))
REDACTORS = ("none", "rules")
_INTERVAL = 0.25
"""Seconds between two looks at the memory."""
_BEGAN = datetime(2020, 9, 1, tzinfo=UTC)
_TOPICS = (
    "invoice parser backup schedule shipment refund contract calendar search index report dataset "
    "server cluster ticket order garden recipe train hotel translation essay lecture theorem proof "
    "engine sensor battery customer newsletter payroll warehouse archive museum concert election"
)
_VERBS = "explain compare write fix summarise plan translate check extend shorten sort test"
_FILLER = (
    "please keep the tone friendly and mention every step that matters while leaving out whatever "
    "a reader would know already because the last version was far too long for a single page and "
    "nobody found the part about limits exceptions deadlines costs owners and open questions"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportSpeed:
    """Seconds, and bytes for `peak` and `stored`."""

    rows: int
    jobs: int
    redactor: str
    log: int
    """Bytes of the log."""
    kept: int
    """Turns in the store afterwards."""
    first: float
    """Import: read, normalise, take out personal data, store once."""
    again: float
    """The same import once more, with nothing new."""
    build: float
    """Clean, judge outcomes, estimate demand, and write the stages of a curriculum."""
    examples: int
    peak: int
    """Most memory that the process and its helpers had together, looked at a few times a second;
    pages that they share count once where the system tells them apart."""
    stored: int


def litellm_rows(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Spend rows of LiteLLM, about 2 KB as JSON each, in sessions of one to eight turns."""
    draw = random.Random(seed)
    number = 0
    session = 0
    while number < count:
        session += 1
        user = f"user-{draw.randrange(1 + count // 40)}"
        at = _BEGAN + timedelta(seconds=session * 37)
        history: list[dict[str, str]] = []
        for _ in range(min(draw.randint(1, 8), count - number)):
            at += timedelta(seconds=draw.randint(5, 300))
            yield _row(draw, number, f"s{seed}-{session}", user, at, history)
            number += 1


def _row(
    draw: random.Random,
    number: int,
    session: str,
    user: str,
    at: datetime,
    history: list[dict[str, str]],
) -> dict[str, Any]:
    topics, filler = _TOPICS.split(), _FILLER.split()
    verb, thing = draw.choice(_VERBS.split()), " ".join(draw.sample(topics, 2))
    asked = f"{verb} the {thing} number {number}: " + " ".join(draw.choices(filler, k=50))
    reply = f"the {thing}: " + " ".join(draw.choices(filler + topics, k=90))
    model = draw.choices(MODELS, (4, 3, 2, 1))[0]
    fine = draw.random() < 0.6 + 0.1 * TIERS[model]
    took = draw.uniform(0.3, 9.0)
    messages = [*history[-1:], {"role": "user", "content": asked}]
    history.append({"role": "user", "content": asked[:200]})
    tokens_in, tokens_out = len(asked) // 4, len(reply) // 4
    return {
        "request_id": f"chatcmpl-{session}-{number:08d}",
        "call_type": "acompletion",
        "api_key": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05df778539800c9f1243fe6b4b",
        "spend": round(tokens_out * 1e-6 * (1 + TIERS[model]) ** 2, 9),
        "total_tokens": tokens_in + tokens_out,
        "prompt_tokens": tokens_in,
        "completion_tokens": tokens_out,
        "startTime": at.isoformat(),
        "endTime": (at + timedelta(seconds=took)).isoformat(),
        "model": model,
        "model_group": "auto",
        "custom_llm_provider": "openai",
        "end_user": user,
        "session_id": session,
        "status": "success" if draw.random() < 0.98 else "failure",
        "cache_hit": "False",
        "request_tags": ["chat", draw.choice(("web", "app", "api"))],
        "metadata": {
            "user_api_key_alias": "team-main",
            "status": "success",
            "feedback": None if draw.random() < 0.7 else fine,
        },
        "messages": messages,
        "response": {
            "id": f"chatcmpl-{number:08d}",
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": reply},
                }
            ],
            "usage": {"prompt_tokens": tokens_in, "completion_tokens": tokens_out},
        },
    }


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """A JSONL log of `count` rows."""
    with path.open("w", encoding="utf-8") as file:
        for row in litellm_rows(count, seed):
            file.write(json.dumps(row) + "\n")


def import_speed(rows: int, *, jobs: int = 1, redactor: str = "rules") -> ImportSpeed:
    """Time and memory of importing `rows` rows into a new store, and of a rerun. ConfigError for an
    unknown redactor, PreflightError when the measuring process fails."""
    if rows < 1 or jobs < 1 or redactor not in REDACTORS:
        raise ConfigError(
            f"expected rows and jobs of at least 1 and one of {', '.join(REDACTORS)}, found "
            f"{rows}, {jobs} and {redactor!r}"
        )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_rows(log, rows)
        values = {"folder": folder, "rows": rows, "jobs": jobs, "redactor": redactor}
        return ImportSpeed(**_child(values))


def _child(values: dict[str, Any]) -> dict[str, Any]:
    """Measure in a fresh process, so that the memory of this one does not count."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **one, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "flows.bench_logs", json.dumps(values)]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        peak, done = 0, None
        while done is None:
            try:
                done = child.communicate(timeout=_INTERVAL)
            except subprocess.TimeoutExpired:
                peak = max(peak, _memory(child.pid))
    if child.returncode:
        last = (done[1].strip().splitlines() or [f"code {child.returncode}"])[-1]
        advice = "; it may have run out of memory" if child.returncode < 0 else ""
        raise PreflightError(f"measuring an import with {values} failed: {last}{advice}")
    found: dict[str, Any] = json.loads(done[0].splitlines()[-1])
    return found | {"peak": max(peak, found["peak"])}


def _memory(pid: int) -> int:
    """Bytes of a process and all that it started, at this moment. Pages that several of them share
    count once (proportional set size), where the system tells; else once per process."""
    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(map(_own_memory, family))


def _own_memory(process: psutil.Process) -> int:
    try:
        found = process.memory_full_info()
    except psutil.Error:  # it ended meanwhile
        return 0
    return int(getattr(found, "pss", found.rss))


def _measure(folder: str, rows: int, jobs: int, redactor: str) -> ImportSpeed:
    from distill.curriculum.build import build
    from distill.curriculum.options import CurriculumSection
    from distill.curriculum.pii import KeyedHash, Redactor
    from distill.curriculum.prepare import Source
    from distill.curriculum.store import LogStore

    log = Path(folder) / "log.jsonl"
    source = Source(name="bench", path=str(log), tiers=TIERS)
    now_ms = int(time.time() * 1000)
    with LogStore.open(Path(folder) / "store", create=True) as store:
        redact = Redactor(pseudonym=KeyedHash(store.salt)) if redactor == "rules" else None
        began = time.perf_counter()
        store.ingest([source], redact=redact, now_ms=now_ms, jobs=jobs)
        first = time.perf_counter() - began
        began = time.perf_counter()
        store.ingest([source], redact=redact, now_ms=now_ms, jobs=jobs)
        again = time.perf_counter() - began
        began, out = time.perf_counter(), Path(folder) / "curriculum"
        out.mkdir()
        summary = build(store, CurriculumSection(), out, suites=_suites())
        built = time.perf_counter() - began
        peak = _memory(os.getpid())
        kept = store.num_turns
        stored = sum(segment.size for segment in store.segments)
    return ImportSpeed(
        rows=rows,
        jobs=jobs,
        redactor=redactor,
        log=log.stat().st_size,
        kept=kept,
        first=first,
        again=again,
        build=built,
        examples=summary["counts"]["examples"],
        peak=peak,
        stored=stored,
    )


def _suites() -> Any:
    """Two thousand evaluation prompts of fifty words, none of which is in the log."""
    from distill.curriculum.contamination import Suites

    draw = random.Random("suites")
    words = [f"w{number}" for number in range(5000)]
    prompts = (" ".join(draw.choices(words, k=50)) for _ in range(2000))
    return Suites([("bench", str(number), [text]) for number, text in enumerate(prompts)])


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(**json.loads(sys.argv[1])))))
