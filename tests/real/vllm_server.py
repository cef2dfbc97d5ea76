"""A vLLM server process on a port of its own, with everything that delivery needs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

NAME = "student"
START = 300.0
"""Seconds that a server may take to start: imports and small kernels."""


class RealServer:
    """Serves the model in a folder under NAME."""

    def __init__(self, model: Path, log: Path, *, max_length: int = 64, max_rank: int = 8) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.flags = {
            "model": str(model),
            "served-model-name": NAME,
            "host": "127.0.0.1",
            "port": str(self.port),
            "max-model-len": str(max_length),
            "dtype": "float32",
            "max-num-seqs": "32",
            "gpu-memory-utilization": "0.3",
            "generation-config": "vllm",
        }
        self.switches = ["--enforce-eager"]
        if max_rank:
            self.flags["max-lora-rank"] = str(max_rank)
            self.switches.append("--enable-lora")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        said = [part for name, value in self.flags.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *said]
        settings = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.switches],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ends = time.monotonic() + START
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"no server after {START:g} s: {self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End the server and the engine process that it started."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
