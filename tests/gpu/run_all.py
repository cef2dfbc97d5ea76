"""Everything that only a GPU can show, in one script: under eight minutes on one, no downloads.

    python tests/gpu/run_all.py [--only NAME] [--json FILE]
    python tests/gpu/run_all.py --device cpu      # a rehearsal with small sizes; proves no speed

Models are made from configurations. Every check prints what it measured and whether that is what
the product promises; the exit code is 1 when a promise was broken. Checks of vllm are left out, and
said to be, where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import parts_of_gpu_checks as parts  # noqa: E402
import torch  # noqa: E402


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one check measured; `promises` maps a sentence to whether it holds."""

    name: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)
    skipped: str = ""


def check(name: str, run: Callable[[], tuple[dict[str, Any], dict[str, bool]]]) -> Found:
    """Run one check. An exception is a broken promise and does not stop the others."""
    began = time.perf_counter()
    try:
        figures, promises = run()
    except parts.Skip as reason:
        return Found(name=name, seconds=time.perf_counter() - began, skipped=str(reason))
    except (RuntimeError, ValueError, AssertionError, OSError, subprocess.SubprocessError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        figures, promises = {"error": text}, {"it runs": False}
    return Found(name=name, seconds=time.perf_counter() - began, figures=figures, promises=promises)


def several_processes(device: str) -> tuple[dict[str, Any], dict[str, bool]]:
    """One process per GPU, at most two; on a CPU two. The worker compares with one process."""
    count = min(2, torch.cuda.device_count()) if device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        losses = {}
        for number in dict.fromkeys((1, count)):
            told = out / f"{number}.json"
            told.write_text(
                json.dumps(
                    {"out": str(out / str(number)), "device": device, "scenarios": {"plain": {}}}
                )
            )
            (out / str(number)).mkdir()
            subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(number), str(ROOT / "tests" / "parallel_worker.py")),
                    str(told),
                ],
                check=True,
                capture_output=True,
                timeout=180,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            rows = json.loads((out / str(number) / "plain.json").read_text())
            losses[number] = [row["loss"] for row in rows]
    gap = max(abs(a - b) for a, b in zip(losses[1], losses[count], strict=True))
    backend = "nccl" if device == "cuda" else "gloo"
    return (
        {"processes": count, "backend": backend, "largest difference of a loss": gap},
        {"losses equal those of one process within 1e-4": gap < 1e-4},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", help="names of checks; may be repeated")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu rehearses with small sizes", file=sys.stderr)
        return 2
    sizes = parts.BIG if args.device == "cuda" else parts.SMALL
    checks: dict[str, Callable[[], tuple[dict[str, Any], dict[str, bool]]]] = {
        "bf16": lambda: parts.half_precision(args.device, sizes),
        "loss": lambda: parts.chunked_loss(args.device, sizes),
        "step": lambda: parts.step_against_floor(args.device, sizes),
        "memory": lambda: parts.memory_options(args.device, sizes),
        "processes": lambda: several_processes(args.device),
        "vllm": lambda: parts.vllm_engine(args.device, sizes),
    }
    unknown = set(args.only or ()) - set(checks)
    if unknown:
        print(f"unknown checks {sorted(unknown)}; known: {', '.join(checks)}", file=sys.stderr)
        return 2
    began, found = time.perf_counter(), []
    print(f"{parts.device_name(args.device)}, torch {torch.__version__}, ", end="")
    print("vllm installed" if importlib.util.find_spec("vllm") else "vllm not installed")
    for name, run in checks.items():
        if args.only and name not in args.only:
            continue
        found.append(check(name, run))
        show(found[-1])
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.json:
        rows = [
            {k: getattr(f, k) for k in ("name", "seconds", "figures", "promises", "skipped")}
            for f in found
        ]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(not all(all(f.promises.values()) for f in found))


def show(found: Found) -> None:
    print(f"{found.name} ({found.seconds:.1f} s)" + (f": {found.skipped}" if found.skipped else ""))
    for name, value in found.figures.items():
        print(f"    {name}: {value:.4g}" if isinstance(value, float) else f"    {name}: {value}")
    for sentence, holds in found.promises.items():
        print(f"    {'holds ' if holds else 'BROKEN'} {sentence}")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
