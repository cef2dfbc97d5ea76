"""Frozen models that teach: loaded whole or in 8 or 4 bits, and served to other machines.

Quantised weights come from bitsandbytes, which computes on the CPU as on NVIDIA GPUs. `int8` keeps
8 bits per weight and rounds activations to 8 bits per row; `int4` keeps 4 bits per weight (NF4).
Embeddings and the output head stay as they are. Both change the teacher: the KL to the exact one
is small for int8 and about a hundred times larger for int4. Rounded activations make more of last
bits: padding a view differently moves an int8 score by up to about 0.01.
"""

from __future__ import annotations

import importlib
import logging
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.errors import CheckpointError, ConfigError, MissingExtra
from distill.rundir import digest_file, digest_json

if TYPE_CHECKING:
    import torch

    from teachers.scoring_server import Limits, Scorer

Quantize = Literal["none", "int8", "int4"]
NOISY = "bitsandbytes.autograd._functions"
"""Warns at every layer of every pass that inputs become half precision."""


def load_frozen(folder: Path, *, dtype: str, quantize: Quantize, device: torch.device) -> Any:
    """A causal language model to be read from, on its device.

    MissingExtra without bitsandbytes, ConfigError for a device that it cannot use.
    """
    from distill.models import load_model

    if quantize == "none":
        return load_model(str(folder), dtype=dtype).to(device)
    return _load_quantized(folder, dtype=dtype, quantize=quantize, device=device)


def _load_quantized(folder: Path, *, dtype: str, quantize: Quantize, device: torch.device) -> Any:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise MissingExtra.of(
            "bitsandbytes", extra="quant", feature=f'teacher.quantize = "{quantize}"'
        ) from error
    logging.getLogger(NOISY).setLevel(logging.ERROR)
    number: torch.dtype = getattr(torch, dtype)
    if quantize == "int8":
        # No outlier columns: those would be chosen by all rows that are computed together, and a
        # view's scores would depend on its neighbours.
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=number
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="bitsandbytes")
            return AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=number, quantization_config=config, device_map={"": str(device)}
            )
    except ImportError as error:
        raise ConfigError(
            f'teacher.quantize = "{quantize}" cannot be used here: {_line(error)}; set it to "none"'
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the model in {folder} cannot be loaded in {quantize} on {device}: {_line(error)}; "
            'try quantize = "none"'
        ) from error


def weights_digest(folder: Path, *, dtype: str, quantize: Quantize) -> str:
    """Names the weights of a model's folder as they are computed with."""
    files = sorted(p for ending in ("*.safetensors", "*.bin") for p in folder.glob(ending))
    if not files:
        raise CheckpointError(
            f"{folder} should hold weights in *.safetensors or *.bin, it holds none; check the path"
        )
    found = {file.name: digest_file(file) for file in files}
    config = digest_file(folder / "config.json")
    return digest_json({"files": found, "config": config, "dtype": dtype, "quantize": quantize})


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the endpoint listens."""

    host: str
    port: int
    token: str

    def listen(self) -> socket.socket:
        """A bound socket. ConfigError when the address cannot be had, or needs a token."""
        from distill.calls import LOOPBACK

        if self.host not in LOOPBACK and not self.token:
            raise ConfigError(
                f"--host {self.host} lets other machines in; name an environment variable with a "
                "token: --token-env NAME, or keep --host 127.0.0.1"
            )
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {self.host} port {self.port}: {_line(error)}; choose another "
                "--port, or 0 for any"
            ) from error

    def url(self, bound: socket.socket) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{bound.getsockname()[1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Which model is served, and how it is loaded."""

    path: str
    home: Path
    name: str = ""
    revision: str | None = None
    dtype: str = "float32"
    quantize: Quantize = "none"
    device: str = "auto"

    def scorer(self, limits: Limits) -> Scorer:
        """The loaded model, ready to be asked."""
        from distill.body import require_known_head
        from distill.models import load_tokenizer, pick_device
        from distill.policy import Policy
        from distill.pretrained import resolve_model
        from distill.tokens import tokenizer_digest
        from teachers.scoring_server import Scorer

        found = resolve_model(self.path, home=self.home, revision=self.revision)
        folder = Path(found.dir_or_id)
        model = load_frozen(
            folder, dtype=self.dtype, quantize=self.quantize, device=pick_device(self.device)
        )
        require_known_head(model)
        name = self.name or self.path
        return Scorer(
            Policy(model, base=name, trainable=False),
            model=name,
            weights=weights_digest(folder, dtype=self.dtype, quantize=self.quantize),
            tokenizer=tokenizer_digest(load_tokenizer(str(folder))),
            limits=limits,
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
