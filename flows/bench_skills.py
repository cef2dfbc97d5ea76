"""How fast a skill bank is: search by meaning, the first page of a list, adding with dedup.

Search: vectors are planted in clusters of about 100 around random centres, as skills of one topic
are, and a query is a noisy member of a cluster. List and add: texts are made of a few shapes of
sentence and common words, so that they share as much as skills of one world do. Every measurement
runs in a fresh process with one thread; every figure returned was measured in that run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    import numpy as np

    from skills.bank import SkillBank
    from skills.embed import Vectors
    from skills.items import SkillItem

PER_CLUSTER = 100
SPREAD = 0.6
"""Length of the noise around a centre of length one."""
BLOCK = 50_000
K = 10
LEAST = 100
"""Fewer skills than this measure nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpeed:
    """Seconds, and bytes for `peak`."""

    size: int
    dimension: int
    queries: int
    kind: str
    """flat (compares with every vector) or ivf (looks into some cells)."""
    build: float
    p50: float
    p95: float
    recall: float
    """Share of the exact ten nearest that are among the ten found."""
    peak: int
    """Largest resident memory of the process, planted vectors included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSpeed:
    size: int
    page: float
    """Seconds that reading the first page takes inside a program, median."""
    command: float
    """Seconds of the whole command `distill skills list`, start of Python included, median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddSpeed:
    held: int
    offered: int
    repeats: int
    """Offered skills that were made as a copy with one word more."""
    added: int
    merged: int
    seconds: float
    """Checks, comparison with the bank, and writing to the disk."""
    cpu: float
    """Of these, how long the processor worked."""


def search_speed(size: int, *, dimension: int = 384, queries: int = 200) -> SearchSpeed:
    """Time of one query among `size` skills, recall@10 against the exact answer, time to build."""
    _require(size >= LEAST and dimension > 0 and queries > 0, "size", size)
    found = _child("search", {"size": size, "dimension": dimension, "queries": queries})
    return SearchSpeed(**found)


def list_speed(size: int, *, repeat: int = 3) -> ListSpeed:
    """Time of the first page of a bank of `size` skills."""
    _require(size >= LEAST and repeat > 0, "size", size)
    return ListSpeed(**_child("list", {"size": size, "repeat": repeat}))


def add_speed(held: int, *, offered: int = 1000) -> AddSpeed:
    """Time to add `offered` skills, a tenth of them repeats, to a bank of `held` with dedup."""
    _require(held >= LEAST and offered > 0, "size", held)
    return AddSpeed(**_child("add", {"held": held, "offered": offered}))


def _require(fine: bool, name: str, value: int) -> None:
    if not fine:
        raise ConfigError(f"{name} must be at least {LEAST}, and the rest positive, got {value}")


def _child(what: str, values: dict[str, int]) -> dict[str, Any]:
    """Measure in a fresh process, so that neither threads nor memory of this one count."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **one, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "flows.bench_skills", what, json.dumps(values)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        advice = "; it may have run out of memory" if done.returncode < 0 else ""
        raise PreflightError(f"measuring {what} with {values} failed: {last}{advice}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- search ---------------------------------------------------------------------------------------


def planted(count: int, dimension: int, draw: np.random.Generator) -> tuple[Vectors, Vectors]:
    """Vectors [N, d] in clusters, and the centres [C, d]; all of length one."""
    import numpy as np

    centres = _unit(draw.standard_normal((max(1, count // PER_CLUSTER), dimension), np.float32))
    rows = np.empty((count, dimension), dtype=np.float32)
    for start in range(0, count, BLOCK):
        stop = min(count, start + BLOCK)
        rows[start:stop] = near(centres, stop - start, draw)
    return rows, centres


def near(centres: Vectors, count: int, draw: np.random.Generator) -> Vectors:
    """Noisy members of clusters: [count, d]."""
    import numpy as np

    chosen = centres[draw.integers(0, len(centres), count)]
    noise = _unit(draw.standard_normal(chosen.shape, np.float32))
    return _unit(chosen + SPREAD * noise)


def _unit(rows: Vectors) -> Vectors:
    import numpy as np

    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def _exact(rows: Vectors, query: Vectors) -> set[int]:
    import numpy as np

    return set(np.argpartition(-(rows @ query), K)[:K].tolist())


def _search(size: int, dimension: int, queries: int) -> SearchSpeed:
    import numpy as np

    from skills.embed import EmbedderKey
    from skills.index import SkillIndex

    draw = np.random.default_rng(0)
    rows, centres = planted(size, dimension, draw)
    asked = near(centres, queries, draw)
    names = [f"s{i:07d}" for i in range(size)]
    began = time.perf_counter()
    index = SkillIndex(EmbedderKey(name="planted", version="1", dimension=dimension))
    index.add(names, ["0" * 64] * size, rows)
    build = time.perf_counter() - began
    seconds, right = [], 0
    index.search(asked[:1], K)
    for query in asked:
        began = time.perf_counter()
        (hits,) = index.search(query[None], K)
        seconds.append(time.perf_counter() - began)
        right += len({int(hit.id[1:]) for hit in hits} & _exact(rows, query))
    return SearchSpeed(
        size=size,
        dimension=dimension,
        queries=queries,
        kind=index.kind,
        build=build,
        p50=statistics.median(seconds),
        p95=sorted(seconds)[int(len(seconds) * 0.95)],
        recall=right / (K * queries),
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


# -- list and add ---------------------------------------------------------------------------------

_WORDS = (
    "drawer cabinet fridge shelf table sofa lamp mug plate knife apple bread soup towel soap book "
    "pen laptop candle basket bottle bowl spoon fork pan kettle clock vase mirror bench crate "
    "ladder rope bucket brush sponge napkin tray jar box bag key coin ticket letter parcel"
)
_VERBS = (
    "open close heat cool clean rinse slice examine lift carry place stack sort count compare "
    "search weigh label fold wipe fill empty lock check move turn press pull push wrap"
)
_STATES = "closed hot dirty full broken hidden missing heavy wet locked cold empty"


_OPENINGS = (
    "Before you {v} the {a}, make sure that the {b} is not {s}.",
    "Never {v} a {a} while it is {s}.",
    "A {s} {a} tells where the {b} went.",
    "Two things matter here: the {a} and the {b}.",
    "When nobody can {v} the {a}, go back to the {b}.",
    "It saves three steps to {v} the {a} on the way.",
    "Runs failed because they left the {a} {s}.",
    "First look for a {a}; it usually lies near some {b}.",
)
_ADVICE = (
    "{w} the {c} and keep the {d} in hand.",
    "Then {w} whatever is below the {c}, one piece after another.",
    "Only after that {w} the {c}.",
    "Say out loud how often you still have to {w} the {c}.",
    "The {c} can wait: {w} it at the end, together with the {d}.",
    "Ask which {c} is meant if there is more than one.",
    "Put the {d} down, since both hands are needed to {w} a {c}.",
    "Read the label of the {c}, because {d} and {c} look alike.",
)
_REASONS = (
    "Otherwise the {e} has to be found again.",
    "This costs one step and saves the whole attempt.",
    "The environment reports success even though the {e} is {s}.",
    "Nothing in the reply says so, but a second {x} undoes the first.",
    "A later command to {x} the {e} is refused.",
    "Most attempts that ended early had skipped it.",
    "",
    "If it does not work twice, {x} the {e} instead.",
)
_MOMENTS = (
    "The {a} is {s} and the {b} is asked for.",
    "A task names a {c} that is not in sight.",
    "You hold a {d} and have just been told to {x} it.",
    "After the second failed attempt to {w} something.",
)


def texts(count: int, seed: int) -> Iterator[SkillItem]:
    """Skills in twenty categories, of two or three sentences with common words."""
    from skills.items import SkillItem

    draw, states = random.Random(seed), _STATES.split()
    things, verbs = _WORDS.split(), _VERBS.split()
    for number in range(count):

        def words() -> dict[str, str]:
            named = dict(zip("abcde", draw.choices(things, k=5), strict=True))
            named |= zip("vwx", draw.choices(verbs, k=3), strict=True)
            return {**named, "s": draw.choice(states)}

        shapes = [draw.choice(part) for part in (_OPENINGS, _ADVICE, _REASONS)]
        said = [shape.format(**words()) for shape in shapes if shape]
        yield SkillItem(
            id=f"p{seed}_{number:07d}",
            title="{v} the {a}, {w} the {b}".format(**words()).capitalize(),
            category=f"family_{draw.randrange(20):02d}",
            principle=" ".join(text[0].upper() + text[1:] for text in said),
            when_to_apply=draw.choice(_MOMENTS).format(**words()),
        )


def planted_bank(home: Path, count: int) -> SkillBank:
    """A bank of `count` skills, as it would have grown, without comparing them."""
    from skills.bank import SkillBank

    bank = SkillBank.create(home, "main", capacity=0)
    with bank.change(actor="bench") as change:
        for item in texts(count, seed=0):
            change.insert(item)
    return bank


def _list(size: int, repeat: int) -> ListSpeed:
    with tempfile.TemporaryDirectory() as folder:
        bank = planted_bank(Path(folder), size)
        inside, command = [], []
        for _ in range(repeat):
            began = time.perf_counter()
            rows, _ = bank.page(0, 20)
            list(bank.store.read_items(rows))
            inside.append(time.perf_counter() - began)
            began = time.perf_counter()
            words = [sys.executable, "-m", "flows", "skills", "list", "--home", folder]
            subprocess.run(words, check=True, capture_output=True)
            command.append(time.perf_counter() - began)
    page, whole = statistics.median(inside), statistics.median(command)
    return ListSpeed(size=size, page=page, command=whole)


def _add(held: int, offered: int) -> AddSpeed:
    from dataclasses import replace

    with tempfile.TemporaryDirectory() as folder:
        bank = planted_bank(Path(folder), held)
        copies = [
            replace(item, id=f"r{n}", title=f"{item.title} again")
            for n, item in enumerate(texts(min(held, offered // 10), seed=0))
        ]
        items = [*copies, *texts(offered - len(copies), seed=1)]
        began, worked = time.perf_counter(), time.process_time()
        outcomes = bank.add(items)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    results = [outcome.result for outcome in outcomes]
    return AddSpeed(
        held=held,
        offered=offered,
        repeats=len(copies),
        added=results.count("added"),
        merged=results.count("merged"),
        seconds=seconds,
        cpu=cpu,
    )


if __name__ == "__main__":
    _run: Any = {"search": _search, "list": _list, "add": _add}[sys.argv[1]]
    print(json.dumps(asdict(_run(**json.loads(sys.argv[2])))))
