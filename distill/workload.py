"""One step of a stage in numbers: the shapes of its models and how much they read and write.

Everything is read from configuration files alone, so that a stage can be judged before any weight
is loaded. No torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill.config import Config
from distill.errors import ConfigError
from distill.rundir import read_json
from distill.sections import ModelBuild

_UNGATED = ("gpt_neox", "phi", "starcoder2", "opt", "codegen")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TIED = ("gemma", "cohere", "command")
Engine = Literal["shared", "copy", "served", "none"]
Place = Literal["local", "own", "served"]
_ENGINES: Mapping[str, Engine] = {"hf": "shared", "server": "served"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a dense decoder-only model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the feed-forward part."""
    vocab: int
    tied: bool
    """Whether the head is the embedding."""
    gated: bool = True
    """Three feed-forward matrices, or two."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Input width of every linear layer of a block."""
        mlp = (self.hidden,) * (2 if self.gated else 1)
        return (self.hidden,) * 3 + (self.heads * self.head_dim, *mlp, self.inner)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Output width of every linear layer of a block."""
        kv = self.kv_heads * self.head_dim
        mlp = (self.inner,) * (2 if self.gated else 1)
        return (self.heads * self.head_dim, kv, kv, self.hidden, *mlp, self.hidden)

    @property
    def matmul_weights(self) -> int:
        """N: weights in matrix products of one token, the head included."""
        block = sum(i * o for i, o in zip(self.inputs, self.outputs, strict=True))
        return self.layers * block + self.vocab * self.hidden

    @property
    def num_weights(self) -> int:
        """All weights; norms and biases are left out."""
        return self.matmul_weights + (0 if self.tied else self.vocab * self.hidden)

    def adapter_weights(self, rank: int) -> int:
        """Weights of a LoRA adapter of every linear layer but the head."""
        return self.layers * rank * (sum(self.inputs) + sum(self.outputs))

    def cache_bytes(self, bytes_per_value: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def layer_bytes(self, width: int, *, adapter: bool) -> int:
        """What one layer keeps per token for its backward pass; `width` is bytes per weight.

        Counted from the tensors that Hugging Face's layers save with a fused attention: norms work
        in float32, an adapter in float32 reads its inputs in float32.
        """
        d, own = self.hidden, self.heads * self.head_dim
        kv, inner = self.kv_heads * self.head_dim, self.inner
        if not adapter:
            return width * (4 * d + 5 * own + 4 * inner) + 4 * (2 * d + own + kv)
        read = 5 * d + own + inner if width < 4 else 2 * d + inner
        return width * (2 * d + 5 * own + 3 * inner) + 4 * (2 * d + own + kv + read)


def shape_of(table: Mapping[str, Any], where: str = "config.json") -> Shape:
    """The shape in a Hugging Face configuration. ConfigError for one that is not understood."""
    text = table.get("text_config", table)
    if any(text.get(name) for name in _EXPERTS):
        raise ConfigError(f"{where}: no estimate for models with experts; expected a dense one")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [
        name for name in (*names, "intermediate_size") if not isinstance(text.get(name), int)
    ]
    if missing:
        raise ConfigError(
            f"{where}: no estimate for model_type {text.get('model_type')!r}: expected numbers "
            f"{', '.join(missing)}, found none"
        )
    hidden, layers, heads, vocab = (text[name] for name in names)
    kind = str(text.get("model_type", ""))
    tied = text.get("tie_word_embeddings", table.get("tie_word_embeddings"))
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        inner=text["intermediate_size"],
        vocab=vocab,
        tied=kind.startswith(_TIED) if tied is None else tied,
        gated=kind not in _UNGATED,
    )


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder, from its config.json alone."""
    path = folder / "config.json"
    return shape_of(read_json(path), str(path))


def built_shape(build: ModelBuild, num_tokens: int) -> Shape:
    """The shape of a model that is made for a tokenizer of so many tokens."""
    return Shape(
        hidden=build.hidden_size,
        layers=build.num_layers,
        heads=build.num_heads,
        kv_heads=build.num_kv_heads,
        head_dim=build.head_dim,
        inner=build.intermediate_size,
        vocab=-(-num_tokens // 16) * 16,
        tied=build.tie_embeddings,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of a stage on one device."""

    student: Shape
    rollouts: int
    """B: prompts times samples."""
    samples: int = 1
    """G: replies that share one prompt."""
    prompt: int
    """P, mean tokens of a prompt."""
    reply: int
    """C, mean tokens of a reply."""
    micro_tokens: int
    """T."""
    epochs: int = 1
    width: int = 2
    """Bytes per weight of the student: 2 is bfloat16, 4 float32."""
    rank: int | None = None
    """r of the adapter; None trains all weights."""
    master_weights: bool = True
    recompute: bool = False
    offload: bool = False
    eager: bool = False
    """Attention that keeps its whole matrix."""
    engine: Engine = "shared"
    """Where replies come from: the student's own weights, a copy of them on this device, another
    device, or nowhere."""
    concurrent: int | None = None
    """Most replies decoded at once; None is all."""
    copies: int = 0
    """Further copies of the student's weights: a moving average, a start, a sampling copy."""
    teacher: Shape | None = None
    teacher_width: int = 2
    teacher_at: Place = "local"
    """A model of its own here, the student's own weights, or elsewhere."""
    exact: bool = True
    """A divergence over the whole vocabulary, for which the teacher's hidden states are kept."""
    candidates: int = 0
    """k: entries per token that a served teacher sends besides the sampled one."""

    @property
    def tokens(self) -> int:
        """D: tokens of a step."""
        return self.rollouts * (self.prompt + self.reply)

    @property
    def at_most(self) -> int:
        """Tokens of the largest micro-batch: never less than a row, nor more than there are."""
        return max(self.prompt + self.reply, min(self.micro_tokens, self.tokens))

    @property
    def trained(self) -> int:
        """n."""
        student = self.student
        return student.num_weights if self.rank is None else student.adapter_weights(self.rank)

    @property
    def at_once(self) -> int:
        """Replies decoded together."""
        return min(self.rollouts, self.concurrent or self.rollouts)


def workload_of(
    config: Config,
    student: Shape,
    *,
    prompt: int,
    reply: int | None = None,
    teacher: Shape | None = None,
    exact: bool = True,
) -> Workload:
    """The step that the configuration of one stage describes (`Config.for_stage`).

    prompt, reply: mean tokens; without a reply `sampling.max_new_tokens`, which is the most.
    teacher: the shape of a model that scores, the widest of several. exact: whether the objective
    reads whole distributions.
    """
    model, trainer, sampling = config.model, config.trainer, config.sampling
    acts = config.stages[0].kind == "on_policy"
    where = _place_of_teacher(config)
    options = config.teacher.options
    return Workload(
        student=student,
        rollouts=trainer.batch * (sampling.num_samples if acts else 1),
        samples=sampling.num_samples if acts else 1,
        prompt=prompt,
        reply=sampling.max_new_tokens if reply is None else reply,
        micro_tokens=trainer.micro_batch_tokens,
        epochs=trainer.epochs,
        width=2 if model.dtype == "bfloat16" else 4,
        rank=None if model.kind == "full" else model.rank,
        master_weights=trainer.master_weights,
        recompute=trainer.gradient_checkpointing,
        offload=trainer.offload == "optimizer",
        eager=model.attention == "eager",
        engine=_ENGINES.get(config.engine.name, "copy") if acts else "none",
        concurrent=int(config.engine.options.get("max_batch", 256)),
        copies=_copies(config),
        teacher=student if where == "own" else teacher,
        teacher_width=2 if options.get("dtype", "float32") == "bfloat16" else 4,
        teacher_at=where,
        exact=exact,
        candidates=int(config.objective.options.get("k", 0)),
    )


def _place_of_teacher(config: Config) -> Place:
    named = config.teacher
    if named.name == "self_teacher" or named.options.get("adapter"):
        return "own"
    return "served" if named.name in ("server", "remote") else "local"


def _copies(config: Config) -> int:
    """Copies of the trained weights that a stage keeps besides those under training."""
    copies = int(config.sampling.refresh > 0)
    if config.teacher.name == "self_teacher":
        weights = config.teacher.options.get("weights", "base")
        # The base of an adapter is there anyway.
        there = ("live",) if config.model.kind == "full" else ("live", "base", "trust_region")
        copies += weights not in there
    return copies
