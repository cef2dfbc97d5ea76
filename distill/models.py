"""Models and tokenizers: made from a configuration, loaded from a directory, saved to one.

Every saved directory is an ordinary Hugging Face one (full weights with their tokenizer, or a PEFT
adapter), so that any other program can serve what a night made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from distill.body import causal_lm
from distill.errors import CheckpointError, ConfigError
from distill.policy import AdapterSpec, Policy
from distill.rundir import digest_file
from distill.sections import ModelBuild, ModelSection
from distill.tokens import PLAIN_TEMPLATE
from distill.types import CheckpointRef

ADAPTER_WEIGHTS = "adapter_model.safetensors"
FULL_WEIGHTS = "model.safetensors"
_ATTENTION: tuple[str, ...] = get_args(get_type_hints(ModelSection)["attention"])


def char_tokenizer(alphabet: str) -> Any:
    """A tokenizer with one id per character: id 0 pads, id 1 ends a reply, id 2 is unknown."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) != len(alphabet) or len(alphabet) < 3:
        raise ConfigError("an alphabet needs at least three different characters")
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[], unk_token=alphabet[2])
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=alphabet[0],
        eos_token=alphabet[1],
        unk_token=alphabet[2],
        chat_template=PLAIN_TEMPLATE,
    )


def build_model(build: ModelBuild, tokenizer: Any, *, seed: int) -> Any:
    """A freshly initialised causal language model; equal arguments give equal weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocab = -(-len(tokenizer) // 16) * 16
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=build.hidden_size,
        intermediate_size=build.intermediate_size,
        num_hidden_layers=build.num_layers,
        num_attention_heads=build.num_heads,
        num_key_value_heads=build.num_kv_heads,
        head_dim=build.head_dim,
        max_position_embeddings=build.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": build.rope_theta},
        tie_word_embeddings=build.tie_embeddings,
        initializer_range=build.initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU when there is one, else the CPU. ConfigError for what torch cannot use."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device = {name!r} cannot be used: {_line(error)}") from error
    return device


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise CheckpointError(
            f"the tokenizer of {path} cannot be loaded: {_line(error)}"
        ) from error


def load_model(path: str, *, dtype: str = "float32", trust_remote_code: bool = False) -> Any:
    """A causal language model from a checked local directory."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    unreadable = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
    except (*unreadable, StrictDataclassError) as error:
        raise CheckpointError(
            f"the model in {path} cannot be loaded: {_line(error)}; restore or re-download it"
        ) from error


def choose_attention(model: Any, name: str) -> Any:
    """`model` itself, which from now on computes attention in the way `name`; `auto` leaves it as
    it is. ConfigError for what the model or this machine cannot do."""
    if name == "auto":
        return model
    lm = causal_lm(model)
    try:
        lm.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise _no_attention(lm, name, _line(error)) from error
    # Some models only warn, and some ways are replaced by another one without a word.
    if lm.config._attn_implementation != name:
        reason = f"the model stays with {lm.config._attn_implementation!r}"
        raise _no_attention(lm, name, reason)
    return model


def _no_attention(lm: Any, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.attention = {name!r} cannot be used with {type(lm).__name__} on this machine: "
        f"{reason}; expected one of {', '.join(_ATTENTION)}, where auto and eager always work"
    )


def recompute_layers(model: Any) -> None:
    """From now on keep only what enters each layer, and compute the layer again in the backward
    pass. Scores and replies, which need no gradient, are made as before.

    The model stays in evaluation mode, so dropout stays off. ConfigError for a model without layers
    that can do it, or with layers that would then drop something themselves.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    lm = causal_lm(model)
    layers = [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers or not lm.supports_gradient_checkpointing:
        raise ConfigError(
            f"trainer.gradient_checkpointing does not work with {type(lm).__name__}, which has no "
            "layers that can be computed again; set it to false and lower "
            "trainer.micro_batch_tokens"
        )
    for layer in layers:
        rates = {k: v for k, v in vars(layer).items() if "drop" in k and isinstance(v, float)}
        if any(rates.values()):
            raise ConfigError(
                f"trainer.gradient_checkpointing would switch dropout on: {type(layer).__name__} "
                f"has {rates}; set it to 0 in the model's config.json"
            )
    # The old name is deprecated where the new one exists.
    enable = getattr(lm, "activation_checkpointing_enable", None)
    # Nothing is drawn at random in a layer, so there is no state of a generator to keep.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    (enable or lm.gradient_checkpointing_enable)(options)
    lm.disable_input_require_grads()  # only the reentrant kind needs a gradient of what enters
    for layer in layers:
        # It looks at its own flag alone; those of the modules inside stay off.
        layer.training = True


def new_adapter(model: Any, spec: AdapterSpec, *, seed: int) -> Any:
    """Wrap a model with a fresh trainable adapter (float32 weights)."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=spec.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), _without_peft_noise():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


@contextmanager
def _without_peft_noise() -> Iterator[None]:
    """peft 0.21 reads an attribute that transformers 5.24 deprecates; nobody can act on that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def load_adapter(model: Any, path: Path, *, trainable: bool = True) -> Any:
    """Wrap a model with a saved adapter."""
    from peft import PeftModel
    from safetensors import SafetensorError

    adapter_dir(path)
    try:
        with _without_peft_noise():
            return PeftModel.from_pretrained(model, str(path), is_trainable=trainable)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {path} cannot be loaded: {_line(error)}") from error


def adapter_dir(path: Path) -> Path:
    """`path` itself. CheckpointError unless it is the folder of an adapter."""
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{path} holds no {ADAPTER_WEIGHTS}; give the folder of an adapter")
    return path


def save_weights(policy: Policy, tokenizer: Any, folder: Path) -> None:
    """Write the student's weights: a full model with its tokenizer, or a PEFT adapter.

    Where several processes hold a part each, the first one writes what one process would write.
    """
    options: dict[str, Any] = {} if policy.group.is_alone else {"state_dict": policy.whole_state()}
    if not policy.group.is_first:
        return
    if policy.kind == "adapter":
        policy.model.save_pretrained(
            str(folder), selected_adapters=["default"], save_embedding_layers=False, **options
        )
    else:
        policy.model.save_pretrained(str(folder), **options)
        tokenizer.save_pretrained(str(folder))


def load_trained_weights(policy: Policy, folder: Path) -> None:
    """Put the weights of a checkpoint into the live student, in place."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = weights_file(folder)
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {_line(error)}") from error
    if policy.kind == "adapter":
        from peft import set_peft_model_state_dict

        result = set_peft_model_state_dict(policy.model, tensors)
        unexpected = list(result.unexpected_keys)
    else:
        # A tied head is stored once, under the name of the embedding.
        unexpected = list(policy.model.load_state_dict(tensors, strict=False).unexpected_keys)
    if unexpected:
        raise CheckpointError(
            f"{path} holds {len(unexpected)} tensors that this model does not have (first: "
            f"{unexpected[0]}); it belongs to another model"
        )


def weights_file(folder: Path) -> Path:
    """The file with the trained weights of a saved folder."""
    for name in (ADAPTER_WEIGHTS, FULL_WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder} holds neither {ADAPTER_WEIGHTS} nor {FULL_WEIGHTS}; give the folder of saved "
        "weights"
    )


def checkpoint_ref(
    folder: Path, *, base: str, step: int = 0, policy_version: int = 0
) -> CheckpointRef:
    """Describe a folder of saved weights; the digest is that of its weights file."""
    path = weights_file(folder)
    kind: Literal["adapter", "full"] = "adapter" if path.name == ADAPTER_WEIGHTS else "full"
    return CheckpointRef(
        path=folder,
        step=step,
        policy_version=policy_version,
        base=base,
        kind=kind,
        digest=digest_file(path),
    )


def eos_token_ids(model: Any) -> Sequence[int]:
    """Every id that the model's generation settings or config name as an end."""
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(found))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
