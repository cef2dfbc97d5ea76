"""Chunked divergence against the dense form: time, peak extra memory, value and gradient.

    python benchmarks/divergence.py [--tokens 4096] [--vocab 49152] [--hidden 576] [--repeat 3]

Both sides run in fresh child processes, alternating, on one machine; every figure printed is
measured in that run. Peak extra memory is the rise of the resident set above what inputs take.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from distill.distributions import HiddenDistribution
from distill.divergence import DivergenceSpec
from distill.headpass import HeadPass, Wanted
from distill.logprobs import Head


def inputs(tokens: int, vocab: int, hidden: int) -> tuple[torch.Tensor, Head, Head, torch.Tensor]:
    torch.manual_seed(0)
    rows = (torch.randn(tokens, hidden) * 0.5).requires_grad_()
    ours = Head(weight=(torch.randn(vocab, hidden) * 0.1).requires_grad_())
    theirs = Head(weight=torch.randn(vocab, hidden) * 0.1)
    return rows, ours, theirs, torch.randn(tokens, hidden) * 0.5


def dense(rows: torch.Tensor, ours: Head, theirs: Head, teacher: torch.Tensor) -> torch.Tensor:
    """The plain form: both [tokens x vocabulary] tensors, differentiated by autograd."""
    with torch.no_grad():
        nu = torch.log_softmax(teacher @ theirs.weight.t(), -1)
    pi = torch.log_softmax(rows @ ours.weight.t(), -1)
    return (pi.exp() * (pi - nu)).sum(-1).mean()


def chunked(rows: torch.Tensor, ours: Head, theirs: Head, teacher: torch.Tensor) -> torch.Tensor:
    """The product's form."""
    count = rows.shape[0]
    wanted = Wanted(
        spec=DivergenceSpec(name="x", beta=1.0),
        target=HiddenDistribution(hidden=teacher, head=theirs),
        rows=torch.arange(count),
        weights=torch.ones(count),
    )
    ids = torch.zeros(count, 1, dtype=torch.long)
    out = HeadPass(head=ours, token_ids=ids, divergences=(wanted,)).run(rows)
    return out.divergences[0].per_token.sum() / count


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(args: argparse.Namespace) -> None:
    rows, ours, theirs, teacher = inputs(args.tokens, args.vocab, args.hidden)
    form = dense if args.child == "dense" else chunked
    before, began = peak(), time.perf_counter()
    loss = form(rows, ours, theirs, teacher)
    loss.backward()
    seconds = time.perf_counter() - began
    assert rows.grad is not None
    assert ours.weight.grad is not None
    print(
        json.dumps(
            {
                "seconds": seconds,
                "extra": peak() - before,
                "loss": float(loss.detach()),
                "rows": rows.grad[:: max(1, args.tokens // 64)].flatten().tolist(),
                "weight": ours.weight.grad[:: max(1, args.vocab // 64)].flatten().tolist(),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="figures for other programs")
    parser.add_argument("--child", choices=("dense", "chunked"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    found: dict[str, list[dict[str, object]]] = {"dense": [], "chunked": []}
    sizes = [f"--{n}={getattr(args, n)}" for n in ("tokens", "vocab", "hidden")]
    for _ in range(args.repeat):
        for form in found:
            made = subprocess.run(
                [sys.executable, __file__, *sizes, f"--child={form}"],
                check=True,
                capture_output=True,
                text=True,
            )
            found[form].append(json.loads(made.stdout))
    time_of, extra_of = (
        {f: statistics.median(float(str(r[k])) for r in runs) for f, runs in found.items()}
        for k in ("seconds", "extra")
    )
    left, right = found["dense"][0], found["chunked"][0]
    gap = max(
        float((torch.tensor(left[k]) - torch.tensor(right[k])).abs().max())
        for k in ("loss", "rows", "weight")
    )
    if args.json:
        print(json.dumps({"seconds": time_of, "extra_bytes": extra_of, "gap": gap}))
        return
    print(f"{args.tokens} tokens x {args.vocab} vocabulary x {args.hidden} hidden")
    for form in found:
        print(f"{form:8}  {time_of[form]:7.2f} s   {extra_of[form] / 2**20:8.0f} MiB extra")
    print(f"ratio     {time_of['chunked'] / time_of['dense']:7.2f}     ", end="")
    print(f"{extra_of['chunked'] / extra_of['dense']:8.3f}")
    print(f"largest difference of value and gradients: {gap:.2e}")


if __name__ == "__main__":
    main()
