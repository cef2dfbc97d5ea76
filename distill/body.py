"""What lies below the log-probabilities of a causal language model: its body and its head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.logprobs import Head, is_right_padded


def hidden_states(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states of a causal language model: [B, T] -> [B, T, d].

    With right padding a causal model never sees the padding, so no mask is passed: the plain
    causal kernel is exact there, and faster.
    """
    body = backbone(model)
    if not is_right_padded(attention_mask):
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        out = body(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=positions,
            use_cache=False,
        )
    else:
        out = body(input_ids=input_ids, use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden


def backbone(model: Any) -> Any:
    """The body below the head, adapters included."""
    return causal_lm(model).base_model


def layers_of(model: Any) -> list[Any]:
    """The decoder layers, by the names of their classes that the model gives itself; none where it
    names none."""
    lm = causal_lm(model)
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [m for m in lm.modules() if type(m).__name__ in names]


def causal_lm(model: Any) -> Any:
    """The Hugging Face causal LM under an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def head_of(model: Any, temperature: float) -> Head:
    lm = causal_lm(model)
    module = lm.get_output_embeddings()
    config = lm.config.get_text_config()
    # Some families of models carry an extra factor, divisor or cap on their logits.
    scale = getattr(config, "logit_scale", None)
    if scale is None and getattr(config, "logits_scaling", None):
        scale = 1.0 / float(config.logits_scaling)
    return Head(
        weight=module.weight,
        bias=getattr(module, "bias", None),
        scale=1.0 if scale is None else float(scale),
        soft_cap=getattr(config, "final_logit_softcapping", None),
        temperature=temperature,
    )


def require_known_head(model: Any) -> None:
    """Raise ConfigError unless `head_of` computes what the model itself computes.

    Some families do more with their logits than is known here; their log-probabilities, and every
    loss made of them, would silently be wrong.
    """
    module = causal_lm(model).get_output_embeddings()
    if hasattr(module, "base_layer"):
        raise ConfigError(
            "the output layer carries an adapter, which is not supported; exclude it from "
            "model.target_modules"
        )
    ids = torch.arange(3, device=module.weight.device)[None]
    with torch.no_grad():
        ours = head_of(model, 1.0).logits(hidden_states(model, ids, torch.ones_like(ids).bool()))
        theirs = model(input_ids=ids, use_cache=False).logits.float()
    gap, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not gap <= 0.02 * size + 1e-4:
        raise ConfigError(
            f"the logits of {type(causal_lm(model)).__name__} differ from its output layer by up "
            f"to {gap:.3g}: the model scales them in a way that is not supported"
        )


@contextmanager
def kept_modes(model: Any) -> Iterator[None]:
    """Modules are afterwards in training or evaluation mode as before: peft puts all of them into
    evaluation mode when it loads an adapter."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
