"""What devices can do at most: arithmetic, memory and links. No torch in here.

The figures are the vendors' (dense, without sparsity); memory is what the driver reports.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distill.errors import ConfigError

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device. Rates are peaks, which nothing real reaches."""

    name: str
    half: float
    """bf16 FLOP/s, dense."""
    single: float
    """float32 FLOP/s."""
    bandwidth: float
    """Bytes/s between the device and its memory."""
    memory: int
    """Bytes."""
    link: float
    """Bytes/s to the host, and so to other processes."""

    def flops(self, bytes_per_weight: int) -> float:
        """FLOP/s of matrix products of weights of so many bytes."""
        return self.half if bytes_per_weight <= 2 else self.single


def _gpu(
    name: str, half: float, single: float, bandwidth: float, gib: float, link: float
) -> Device:
    """Rates in TFLOP/s, TB/s and GB/s."""
    return Device(
        name=name,
        half=half * 1e12,
        single=single * 1e12,
        bandwidth=bandwidth * 1e12,
        memory=int(gib * GIB),
        link=link * 1e9,
    )


DEVICES: tuple[Device, ...] = (
    _gpu("B200", 2250.0, 75.0, 8.0, 179.0, 64.0),
    _gpu("H200", 989.0, 67.0, 4.8, 140.0, 64.0),
    _gpu("H100 PCIe", 756.0, 51.0, 2.0, 79.6, 64.0),
    _gpu("H100", 989.0, 67.0, 3.35, 79.6, 64.0),
    _gpu("A100 40GB", 312.0, 19.5, 1.555, 40.0, 32.0),
    _gpu("A100", 312.0, 19.5, 2.039, 80.0, 32.0),
    _gpu("L40S", 362.0, 91.6, 0.864, 45.0, 32.0),
    _gpu("L4", 121.0, 30.3, 0.3, 22.5, 32.0),
    _gpu("A10G", 70.0, 35.0, 0.6, 22.5, 32.0),
    _gpu("A10", 125.0, 31.2, 0.6, 22.5, 32.0),
    _gpu("RTX 6000 Ada", 364.0, 91.1, 0.96, 48.0, 32.0),
    _gpu("RTX A6000", 154.8, 38.7, 0.768, 48.0, 32.0),
    _gpu("RTX 5090", 209.5, 104.8, 1.792, 31.8, 64.0),
    _gpu("RTX 4090", 165.2, 82.6, 1.008, 24.0, 32.0),
    _gpu("RTX 3090", 71.0, 35.6, 0.936, 24.0, 32.0),
)
"""Of two that fit a name, the first one counts."""


def find_device(name: str) -> Device:
    """The device of a driver's name, such as `NVIDIA A100-SXM4-40GB`, or of `cpu`, which is
    measured. ConfigError for one that is not in the table."""
    if name.lower() == "cpu":
        return measure_cpu()
    words = _words(name)
    for device in DEVICES:
        if _words(device.name) <= words:
            return device
    raise ConfigError(
        f"the rates of device {name!r} are not known; expected cpu or one of "
        f"{', '.join(d.name for d in DEVICES)}; describe another one as a distill.devices.Device"
    )


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", name.lower()))


def measure_cpu(seconds: float = 0.2) -> Device:
    """This machine's CPUs, measured for about so long with as many threads as numpy uses.

    float32 stands for bf16 too: few CPUs are faster with it. Memory is that of the machine, or
    of the container where that has a limit.
    """
    import numpy as np

    left = np.ones((384, 384), dtype=np.float32)
    out = np.empty_like(left)
    np.matmul(left, left, out=out)  # starts the threads
    flops = _rate(lambda: np.matmul(left, left, out=out), 2.0 * 384**3, seconds / 2)
    source, copy = np.ones(2**23, dtype=np.float32), np.empty(2**23, dtype=np.float32)
    np.copyto(copy, source)  # touches the pages
    bandwidth = _rate(lambda: np.copyto(copy, source), 2.0 * source.nbytes, seconds / 2)
    return Device(
        name="cpu",
        half=flops,
        single=flops,
        bandwidth=bandwidth,
        memory=_host_memory(),
        link=bandwidth,
    )


def _rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """Amount per second of the fastest run within so many seconds."""
    end, best = time.perf_counter() + seconds, float("inf")
    while True:
        began = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            return amount / best


def _host_memory() -> int:
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP.read_text().strip() if _CGROUP.is_file() else "max"
    return min(found, int(limit)) if limit.isdecimal() else found
