"""Options of a teacher with another tokenizer; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distill.errors import ConfigError

CAPABILITIES = frozenset({"groups"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossTokenizerOptions:
    """name = "cross_tokenizer": a frozen Hugging Face model that reads the same bytes in tokens of
    its own, for the objective `gold`."""

    path: str = ""
    """A Hugging Face name, a directory, `package:NAME` or `stage:NAME`."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = 2048
    """Most tokens of its own template, prompt and reply; a longer row is not compared (counted)."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its chat template, such as enable_thinking = false."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError('the option path is missing: "cross_tokenizer" needs a model')
        if self.max_length < 1:
            raise ConfigError(f"teacher.max_length must be at least 1, got {self.max_length}")
