"""Search among skills: time per query, recall against the exact answer, time to build.

    python benchmarks/skill_search.py [--sizes 10000] [--dimension 384] [--queries 200] [--save]
    python benchmarks/skill_search.py --sizes 10000,1000000   # about 5 GB, some minutes

Vectors are planted: clusters of about 100 around random centres, as skills of one topic are. A
query is a noisy member of a cluster. Every size runs in a fresh child process with one thread;
every figure printed is measured in that run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from skills.embed import EmbedderKey, Vectors
from skills.index import SkillIndex

PER_CLUSTER = 100
SPREAD = 0.6
"""Length of the noise around a centre of length one."""
BLOCK = 50_000


def planted(count: int, dimension: int, draw: np.random.Generator) -> tuple[Vectors, Vectors]:
    """Vectors [N, d] in clusters, and the centres [C, d]."""
    centres = unit(draw.standard_normal((max(1, count // PER_CLUSTER), dimension), np.float32))
    rows = np.empty((count, dimension), dtype=np.float32)
    for start in range(0, count, BLOCK):
        stop = min(count, start + BLOCK)
        chosen = centres[draw.integers(0, len(centres), stop - start)]
        noise = unit(draw.standard_normal((stop - start, dimension), np.float32))
        rows[start:stop] = unit(chosen + SPREAD * noise)
    return rows, centres


def unit(rows: Vectors) -> Vectors:
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def exact(rows: Vectors, query: Vectors, k: int) -> set[int]:
    scores = rows @ query
    return set(np.argpartition(-scores, k)[:k].tolist())


def child(args: argparse.Namespace) -> None:
    draw = np.random.default_rng(0)
    count, k = args.child, 10
    rows, centres = planted(count, args.dimension, draw)
    chosen = centres[draw.integers(0, len(centres), args.queries)]
    noise = unit(draw.standard_normal((args.queries, args.dimension), np.float32))
    queries = unit(chosen + SPREAD * noise)
    names = [f"s{i:07d}" for i in range(count)]
    key = EmbedderKey(name="planted", version="1", dimension=args.dimension)
    began = time.perf_counter()
    index = SkillIndex(key)
    index.add(names, ["0" * 64] * count, rows)
    build = time.perf_counter() - began
    seconds, right = [], 0
    index.search(queries[:1], k)
    for query in queries:
        began = time.perf_counter()
        (hits,) = index.search(query[None], k)
        seconds.append(time.perf_counter() - began)
        right += len({int(h.id[1:]) for h in hits} & exact(rows, query, k))
    few = names[:: max(1, count // 50)]
    began = time.perf_counter()
    index.search(queries[:1], k, among=few)
    among = time.perf_counter() - began
    began = time.perf_counter()
    index.add([f"n{i}" for i in range(1000)], ["1" * 64] * 1000, rows[:1000])
    added = time.perf_counter() - began
    found = {
        "kind": index.kind,
        "build": build,
        "p50": statistics.median(seconds),
        "p95": sorted(seconds)[int(len(seconds) * 0.95)],
        "recall": right / (k * args.queries),
        "among": among,
        "added": added,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if args.save:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            path = index.save(Path(folder))
            found["save"] = time.perf_counter() - began
            began = time.perf_counter()
            SkillIndex.load(path, key)
            found["load"] = time.perf_counter() - began
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default="10000", help="comma-separated numbers of skills")
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="also time writing and reading")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for size in (int(s) for s in args.sizes.split(",")):
        command = [sys.executable, __file__, "--child", str(size), *sys.argv[1:]]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        env["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout)
        print(
            f"{size:>9,} skills, {args.dimension} dimensions, {found['kind']}: "
            f"built in {found['build']:.1f} s, p50 {found['p50'] * 1e3:.2f} ms, "
            f"p95 {found['p95'] * 1e3:.2f} ms, recall@10 {found['recall']:.4f}, "
            f"among 50 {found['among'] * 1e3:.2f} ms, 1,000 added in {found['added']:.2f} s, "
            f"peak {found['peak'] / 2**30:.2f} GiB"
        )
        if args.save:
            print(f"{'':>9}  saved in {found['save']:.2f} s, loaded in {found['load']:.2f} s")


if __name__ == "__main__":
    main()
