"""Four families of models, built from their configurations: each learns in our trainer, is saved
and loaded again, and has the log-probabilities that Hugging Face's own forward pass has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from distill import logprobs
from distill.asking import own_view
from distill.batch import collate
from distill.body import head_of, require_known_head
from distill.engines.hf import HFEngine
from distill.errors import ConfigError
from distill.models import (
    ADAPTER_WEIGHTS,
    choose_attention,
    eos_token_ids,
    load_adapter,
    load_model,
    load_tokenizer,
    new_adapter,
    recompute_layers,
    save_weights,
)
from distill.objectives import GKD, OPD, SFT
from distill.objectives.base import ForwardPlan
from distill.parts import Parts
from distill.policy import AdapterSpec, Policy
from distill.step import on_policy_step
from distill.tokens import Chat
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling
from helpers import ALPHABET, make_chat, random_rollouts
from teachers.local import LocalTeacher
from teachers.views import Plain

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
WIDTH = 48
ENDS = [1, 5]


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=WIDTH, head_dim=16, tie_word_embeddings=True, **SIZES)
    return Qwen3ForCausalLM(config)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=WIDTH, tie_word_embeddings=False, **SIZES))


def gemma() -> Any:
    """Soft caps on attention and logits, a sliding window, a vocabulary padded to 64."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0}
    config = Gemma2Config(
        vocab_size=64, head_dim=8, query_pre_attn_scalar=8, sliding_window=6, **caps, **SIZES
    )
    return Gemma2ForCausalLM(config)


def granite() -> Any:
    """Divided logits and a list of ends besides a separate padding token."""
    from transformers import GraniteConfig, GraniteForCausalLM

    factors = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
    sizes = {**SIZES, "eos_token_id": ENDS}
    return GraniteForCausalLM(GraniteConfig(vocab_size=WIDTH, **factors, **sizes))


def cohere() -> Any:
    """Multiplied logits, one norm for both halves of a layer."""
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {**SIZES, "eos_token_id": ENDS}
    return CohereForCausalLM(CohereConfig(vocab_size=WIDTH, logit_scale=0.25, **sizes))


FAMILIES = [qwen3, llama, gemma, granite, cohere]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


def build(family: Callable[[], Any], seed: int = 0) -> Any:
    """A random model of the family whose outputs are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def own_logprobs(model: Any, rollouts: Any) -> list[float]:
    """What the model's own forward pass says of every trained token, one row at a time."""
    found = []
    for rollout in rollouts:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([rollout.token_ids])).logits[0].log_softmax(-1)
        for t, trained in enumerate(rollout.completion_mask):
            if trained:
                found.append(float(out[t - 1, rollout.token_ids[t]]))
    return found


def our_logprobs(model: Any, rollouts: Any) -> list[float]:
    scores = Policy(model, base="b").score([own_view(r) for r in rollouts])
    return [x for s in scores for x in s.logprobs]


def train(model: Any, family: Callable[[], Any], objective: Any, kind: Any = "full") -> list[Any]:
    """Two steps on the model's own replies, or on worked solutions."""
    policy, chat = Policy(model, base="b", kind=kind), make_chat()
    worked = isinstance(objective, SFT)
    shared = len(ALPHABET) if isinstance(objective, GKD) else None
    engine = HFEngine(policy, pad_id=chat.pad_id)
    teacher = Policy(build(family, seed=1), base="t", trainable=False)
    sampling = Sampling(
        num_samples=2, max_new_tokens=6, stop_token_ids=tuple(ENDS), keys=("a", "b", "c")
    )

    def rows(tasks: Any, step: int) -> Any:
        found = random_rollouts(6, seed=step, worked=worked)
        if worked:
            return found
        prompts = [r.token_ids[: r.completion_mask.index(True)] for r in found[::2]]
        replies = [c for group in engine.generate(prompts, sampling) for c in group]
        return [
            replace(
                row,
                token_ids=(*prompts[i // 2], *reply.token_ids),
                completion_mask=(False,) * len(prompts[i // 2]) + (True,) * len(reply.token_ids),
                logprobs=(0.0,) * len(prompts[i // 2]) + tuple(reply.logprobs),
            )
            for i, (row, reply) in enumerate(zip(found, replies, strict=True))
        ]

    parts = Parts(
        tasks=lambda step: [],
        rows=rows,
        policy=policy,
        objective=objective,
        trainer=Trainer(policy, TrainerOptions(num_steps=2, lr=1e-2, warmup_steps=1)),
        # Real models give the rows of a padded vocabulary no probability, random ones sample them:
        # only a divergence can leave them out here.
        teacher=None if worked else LocalTeacher(teacher, name="t", num_ids=shared),
        view=None if worked else Plain(),
    )
    return [on_policy_step(parts, step).update for step in (1, 2)]


@families
@pytest.mark.parametrize("objective", [SFT(), OPD()], ids=lambda o: o.name)
def test_a_model_that_learned_two_steps_is_saved_and_loaded_with_its_log_probabilities(
    family, objective, tmp_path
):
    model, rollouts = build(family), random_rollouts()
    before = our_logprobs(model, rollouts)
    reports = train(model, family, objective)
    assert all(r.grad_norm > 0 for r in reports)
    if objective.name == "opd":  # what the engine recorded is what the trainer computes
        assert all(r.metrics["sampler_gap/max"] < 1e-4 for r in reports)
    policy, tokenizer = Policy(model, base="b"), make_chat().tokenizer
    save_weights(policy, tokenizer, tmp_path)
    loaded = load_model(str(tmp_path))
    require_known_head(loaded)
    found = our_logprobs(loaded, rollouts)
    assert found == pytest.approx(own_logprobs(loaded, rollouts), abs=1e-5)
    assert found == pytest.approx(our_logprobs(model, rollouts), abs=1e-6)
    assert found != pytest.approx(before, abs=1e-3)
    chat = Chat(load_tokenizer(str(tmp_path)), eos_token_ids=eos_token_ids(loaded), max_length=64)
    assert set(chat.stop_token_ids) == set(ENDS if family in (granite, cohere) else ENDS[:1])
    assert chat.pad_id == 0


@families
def test_an_adapter_that_learned_two_steps_is_saved_and_loaded_with_its_log_probabilities(
    family, tmp_path
):
    adapter = new_adapter(build(family), AdapterSpec(rank=2), seed=3)
    rollouts = random_rollouts()
    before = our_logprobs(adapter, rollouts)
    train(adapter, family, OPD(), kind="adapter")
    save_weights(Policy(adapter, base="b", kind="adapter"), None, tmp_path)
    assert (tmp_path / ADAPTER_WEIGHTS).is_file()
    loaded = load_adapter(build(family), tmp_path)
    found = our_logprobs(loaded, rollouts)
    assert found == pytest.approx(own_logprobs(loaded, rollouts), abs=1e-5)
    assert found == pytest.approx(our_logprobs(adapter, rollouts), abs=1e-6)
    assert found != pytest.approx(before, abs=1e-3)


@families
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_the_head_in_chunks_equals_the_models_own_logits_in_value_and_gradient(
    family, rows, monkeypatch
):
    batch = collate(random_rollouts(worked=True))
    ours, theirs = build(family), build(family)
    width = head_of(ours, 1.0).vocab_size
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * width)
    policy = Policy(ours, base="b")
    view = policy.forward(batch, ForwardPlan(entropy=True))
    policy.model.zero_grad()
    (-view.logprobs.sum() / batch.num_tokens).backward()

    mask = batch.attention_mask.long()
    out = theirs(input_ids=batch.input_ids, attention_mask=mask, labels=batch.labels)
    out.loss.backward()

    loss = -float(view.logprobs.detach().sum()) / batch.num_tokens
    assert loss == pytest.approx(float(out.loss.detach()), abs=1e-5)
    own = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad, atol=1e-5, rtol=1e-4)
    cap = getattr(ours.config, "final_logit_softcapping", None)
    if cap:
        assert float(out.logits.detach().abs().max()) > 0.5 * cap  # the cap does bend them


@families
def test_an_exact_divergence_in_chunks_equals_the_one_in_one_piece(family, monkeypatch):
    found = []
    for elements in (logprobs.CHUNK_ELEMENTS, 130):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        model = build(family)
        reports = train(model, family, GKD(beta=0.5))
        found.append(([r.loss for r in reports], our_logprobs(model, random_rollouts())))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-3)


@families
def test_layers_of_every_family_can_be_computed_again(family):
    gradients = []
    for again in (False, True):
        policy = Policy(build(family), base="b")
        if again:
            recompute_layers(policy.model)
        batch = collate(random_rollouts())
        policy.forward(batch, ForwardPlan()).logprobs.sum().backward()
        gradients.append({n: p.grad for n, p in policy.trainable().items()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, atol=1e-6, rtol=1e-6)


def test_a_fused_attention_that_leaves_out_a_cap_of_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"'sdpa' cannot be used with Gemma2ForCausalLM"):
        choose_attention(gemma(), "sdpa")
