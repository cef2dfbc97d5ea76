"""What only saves memory or time must not change a result: layers computed again, the way that
attention is computed, half precision of a frozen base, micro-batches sorted by length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from distill.asking import own_view
from distill.batch import collate, micro_batches
from distill.config import Config
from distill.distributions import HiddenDistribution
from distill.engines.hf import HFEngine
from distill.errors import ConfigError
from distill.followers import FollowerSpec
from distill.models import choose_attention, new_adapter, recompute_layers
from distill.objectives import GKD
from distill.objectives.base import ForwardPlan
from distill.policy import AdapterSpec, Policy
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling
from helpers import INFO, make_model, make_policy, make_rollout, random_rollouts

SAMPLING = Sampling(num_samples=2, max_new_tokens=6, stop_token_ids=(1,), keys=("a",))


def make_adapter_policy():
    policy = Policy(
        new_adapter(make_model(), AdapterSpec(rank=4), seed=3), base="b", kind="adapter"
    )
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return policy


def step(policy, **options):
    """One step against a teacher: its report, and the gradient that it took."""
    rollouts, teacher, kept = random_rollouts(8), make_policy(seed=1), {}
    hidden, _ = teacher.hidden([own_view(r) for r in rollouts], "student")
    target = HiddenDistribution(hidden=hidden, head=teacher.head())
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=0.0, grad_clip=0.0, **options))
    real = trainer.optimizer.step

    def keep_then_step():
        kept.update({n: p.grad.clone() for n, p in trainer.optimizer.stepped.items()})
        return real()

    trainer.optimizer.step = keep_then_step
    return trainer.update(collate(rollouts, {"teacher": target}), GKD(beta=0.5), INFO), kept


@pytest.mark.parametrize("make", [make_policy, make_adapter_policy], ids=["full", "adapter"])
def test_layers_that_are_computed_again_give_the_same_gradient(make):
    plain, expected = step(make())
    again, found = step(make(), gradient_checkpointing=True)
    assert again.loss == pytest.approx(plain.loss, abs=1e-7)
    assert any(bool(grad.any()) for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [make_policy, make_adapter_policy], ids=["full", "adapter"])
def test_layers_that_are_computed_again_keep_less(make):
    def kept(policy):
        """Bytes that a forward pass keeps for the backward pass, the weights aside."""
        weights = {p.data_ptr() for p in policy.model.parameters()}
        seen = {}

        def note(tensor):
            if tensor.data_ptr() not in weights:
                seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            policy.forward(collate(random_rollouts(16)), ForwardPlan())
        return sum(seen.values())

    plain, again = make(), make()
    recompute_layers(again.model)
    assert kept(again) < 0.4 * kept(plain)


def test_dropout_stays_off_in_layers_that_are_computed_again():
    found = []
    for chosen in (False, True):
        model = make_model()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        found.append(step(Policy(model, base="b"), gradient_checkpointing=chosen)[1])
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-6)


def test_a_model_whose_layers_drop_something_is_refused():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16}
    config = OPTConfig(
        vocab_size=32, num_hidden_layers=1, num_attention_heads=2, dropout=0.1, **sizes
    )
    with pytest.raises(ConfigError, match=r"dropout on.*0\.1"):
        recompute_layers(OPTForCausalLM(config).eval())


def test_a_model_without_layers_that_can_be_computed_again_is_refused():
    from transformers import CTRLConfig, CTRLLMHeadModel

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=32, n_embd=16, dff=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        recompute_layers(model.eval())


def test_replies_and_followers_do_not_see_that_layers_are_computed_again():
    plain, again = make_policy(), make_policy()
    recompute_layers(again.model)
    again.add_follower(FollowerSpec(name="ema", rate=0.5))
    replies = [HFEngine(p).generate([(5, 6, 7)], SAMPLING) for p in (plain, again)]
    assert replies[0] == replies[1]
    views = [own_view(r) for r in random_rollouts()]
    expected = [replace(s, source="tiny:ema") for s in plain.score(views)]
    assert again.score(views, "ema") == expected


def test_every_way_to_compute_attention_gives_the_same_log_probabilities():
    batch, found = collate(random_rollouts()), {}
    for name in ("auto", "sdpa", "eager"):
        policy = Policy(choose_attention(make_model(), name), base="b")
        found[name] = policy.forward(batch, ForwardPlan()).logprobs.detach()
    torch.testing.assert_close(found["sdpa"], found["auto"], atol=0.0, rtol=0.0)
    torch.testing.assert_close(found["eager"], found["sdpa"], atol=1e-5, rtol=1e-5)


def test_a_way_to_compute_attention_that_is_not_there_is_an_error_that_names_the_others():
    with pytest.raises(ConfigError, match=r"flash_attention_3.*expected one of auto, sdpa, eager"):
        choose_attention(make_model(), "flash_attention_3")
    with pytest.raises(ConfigError, match=r"model\.attention.*'sdpa', 'eager'"):
        Config.from_dict({"model": {"attention": "sdpaa"}})


def test_a_model_that_does_not_let_its_attention_be_chosen_is_an_error():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match=r"BloomForCausalLM.*stays with 'eager'"):
        choose_attention(model, "flex_attention")


def test_a_frozen_base_in_half_precision_is_the_same_after_a_hundred_changes_of_the_adapter():
    model = make_model().to(torch.bfloat16)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    views = [own_view(r) for r in random_rollouts(2)]
    plain = [s.logprobs for s in Policy(model, base="b").score(views)]
    policy = Policy(new_adapter(model, AdapterSpec(rank=2), seed=0), base="b", kind="adapter")
    trainer = Trainer(policy, TrainerOptions(num_steps=100, lr=0.01))
    for cycle in range(100):
        assert [s.logprobs for s in policy.score(views, "base")] == plain, cycle
        for parameter in policy.trainable().values():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()
        assert [s.logprobs for s in policy.score(views)] != plain, cycle
    after = {
        n.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for n, p in policy.model.named_parameters()
        if "lora_" not in n
    }
    assert set(after) == set(base)
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())


def test_micro_batches_of_ragged_rows_are_sorted_so_that_little_is_padding():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(256).log_normal_(4.0, 0.8, generator=generator).clamp(4, 500).long()
    rows = [
        make_rollout([5], [6] * int(n), traj_id=f"t{i}", name=f"t{i}")
        for i, n in enumerate(lengths)
    ]
    batch = collate(rows)
    tokens = int(batch.attention_mask.sum())
    whole = sum(m.input_ids.numel() for m in micro_batches(batch, 0))
    cut = [m.input_ids.numel() for m in micro_batches(batch, 1024)]
    assert whole > 3.0 * tokens
    assert sum(cut) < 1.1 * tokens
    assert max(cut) <= 1024


def test_the_same_rows_in_another_order_are_cut_into_the_same_micro_batches():
    rows = [make_rollout([5], [6] * n, traj_id=f"t{n}", name=f"t{n}") for n in range(1, 30)]
    turned = torch.randperm(29, generator=torch.Generator().manual_seed(1)).tolist()
    ours, theirs = (
        list(micro_batches(collate(chosen), 60)) for chosen in (rows, [rows[i] for i in turned])
    )
    assert [m.input_ids.tolist() for m in ours] == [m.input_ids.tolist() for m in theirs]


def test_an_adapter_that_is_loaded_later_leaves_recomputed_layers_as_they_are(tmp_path):
    def adapted() -> Policy:
        return Policy(
            new_adapter(make_model(), AdapterSpec(rank=2), seed=1), base="b", kind="adapter"
        )

    adapted().model.save_pretrained(str(tmp_path))
    policy = adapted()
    recompute_layers(policy.model)
    before = {name: module.training for name, module in policy.model.named_modules()}
    assert any(before.values())
    policy.add_adapter("expert", tmp_path)
    after = {name: module.training for name, module in policy.model.named_modules()}
    assert {name: after[name] for name in before} == before
