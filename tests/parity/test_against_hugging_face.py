"""Our numbers against Hugging Face's own: losses, log-probabilities, generation, adapters."""

from __future__ import annotations

import pytest
import torch

from distill import logprobs
from distill.batch import collate
from distill.body import head_of, hidden_states, require_known_head
from distill.distributions import HiddenDistribution
from distill.divergence import DivergenceSpec, divergence
from distill.engines.hf import HFEngine
from distill.errors import ConfigError
from distill.models import load_adapter, new_adapter
from distill.objectives import GKD, SFT
from distill.objectives.base import ForwardPlan
from distill.policy import AdapterSpec, Policy
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling, TeacherView
from helpers import INFO, make_chat, make_model, make_policy, make_rollout, random_rollouts


def test_the_sft_loss_and_gradient_equal_those_of_hugging_face():
    policy, rollouts = make_policy(), random_rollouts(worked=True)
    batch = collate(rollouts)
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=0.0, grad_clip=0.0))
    theirs = make_model()
    out = theirs(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask.long(),
        labels=batch.labels,
    )
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), float("inf"))

    report = trainer.update(batch, SFT(), INFO)

    assert report.loss == pytest.approx(float(out.loss.detach()), abs=1e-6)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_token_log_probabilities_equal_those_of_a_plain_forward_pass():
    policy, batch = make_policy(), collate(random_rollouts())
    view = policy.forward(batch, ForwardPlan(entropy=True))
    with torch.no_grad():
        logits = policy.model(input_ids=batch.input_ids).logits.log_softmax(-1)
    for row in range(batch.num_rows):
        for t in range(batch.input_ids.shape[1]):
            if batch.completion_mask[row, t]:
                dist = logits[row, t - 1]
                assert float(view.logprobs[row, t].detach()) == pytest.approx(
                    float(dist[batch.input_ids[row, t]]), abs=1e-5
                )
                entropy = -(dist.exp() * dist).sum()
                assert float(view.entropy[row, t]) == pytest.approx(float(entropy), abs=1e-5)
            else:
                assert float(view.logprobs[row, t].detach()) == 0.0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_chunked_head_equals_the_dense_one_in_value_and_gradient(beta, monkeypatch):
    rollouts, objective = random_rollouts(), GKD(beta=beta)
    results = []
    for elements in (logprobs.CHUNK_ELEMENTS, 100):  # 100 logits: two rows at a time
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        policy, teacher = make_policy(), make_policy(seed=1)
        views = [_own(r) for r in rollouts]
        hidden, _ = teacher.hidden(views, "student")
        target = HiddenDistribution(hidden=hidden, head=teacher.head())
        batch = collate(rollouts, {"teacher": target})
        batch, _ = objective.prepare(batch, INFO, {})
        view = policy.forward(batch, objective.plan())
        value = view.divergences["gkd"].per_token.sum() + view.logprobs.sum()
        value.backward()
        grads = {n: p.grad.clone() for n, p in policy.trainable().items()}
        results.append((view.divergences["gkd"].per_token.detach(), view.entropy, grads))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)
    for name, grad in results[0][2].items():
        torch.testing.assert_close(grad, results[1][2][name], atol=1e-4, rtol=1e-4)


def test_the_chunked_divergence_equals_a_dense_one_written_by_hand():
    policy, teacher, rollouts = make_policy(), make_policy(seed=1), random_rollouts()
    views = [_own(r) for r in rollouts]
    hidden, _ = teacher.hidden(views, "student")
    target = HiddenDistribution(hidden=hidden, head=teacher.head())
    batch = collate(rollouts, {"teacher": target})
    found = policy.forward(batch, GKD().plan()).divergences["gkd"].per_token.detach()
    with torch.no_grad():
        ours = policy.model(input_ids=batch.input_ids).logits.log_softmax(-1)
        theirs = teacher.model(input_ids=batch.input_ids).logits.log_softmax(-1)
    dense = divergence(
        ours, theirs, DivergenceSpec(name="x")
    ).per_token  # [B, T], row t predicts t + 1
    expected = torch.zeros_like(found)
    expected[:, 1:] = dense[:, :-1]
    expected = expected.masked_fill(~batch.completion_mask, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_engine_records_the_log_probabilities_that_the_trainer_computes():
    policy, chat = make_policy(), make_chat()
    engine = HFEngine(policy, pad_id=chat.pad_id)
    prompts = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14)]
    sampling = Sampling(
        num_samples=4, max_new_tokens=12, stop_token_ids=(1, 20, 21), keys=("a", "b", "c")
    )
    groups = engine.generate(prompts, sampling)
    rollouts = [
        make_rollout(p, c.token_ids, traj_id=f"{i}/{g}")
        for i, (p, group) in enumerate(zip(prompts, groups, strict=True))
        for g, c in enumerate(group)
    ]
    scores = policy.score([_own(r) for r in rollouts])
    flat = [c for group in groups for c in group]
    assert len({len(c.token_ids) for c in flat}) > 2  # rows did retire at different times
    for completion, score in zip(flat, scores, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(score.logprobs), atol=1e-4, rtol=1e-4
        )


def test_greedy_decoding_equals_generate_of_hugging_face():
    policy, chat = make_policy(), make_chat()
    prompt = [5, 6, 7, 8]
    out = policy.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=1,
        pad_token_id=0,
    )
    ((found,),) = HFEngine(policy, pad_id=chat.pad_id).generate(
        [prompt], Sampling(temperature=0.0, max_new_tokens=10, stop_token_ids=(1,))
    )
    assert list(found.token_ids) == out[0, 4:].tolist()


def test_an_adapter_scores_like_the_merged_model_and_leaves_the_base_alone(tmp_path):
    model = make_model()
    plain = Policy(make_model(), base="b")
    policy = Policy(new_adapter(model, AdapterSpec(rank=4), seed=3), base="b", kind="adapter")
    views = [_own(r) for r in random_rollouts()]
    before = plain.score(views)
    assert _close(policy.score(views), before)  # a fresh adapter changes nothing
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    trained = policy.score(views)
    assert not _close(trained, before)
    assert _close(policy.score(views, "base"), before)
    policy.model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    merged = load_adapter(make_model(), tmp_path).merge_and_unload()
    assert _close(Policy(merged, base="b").score(views), trained)


def test_a_model_that_divides_its_logits_scores_like_its_own_forward_pass():
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = GraniteConfig(vocab_size=48, logits_scaling=8.0, **sizes, **heads)
    model = GraniteForCausalLM(config).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        ours = head_of(model, 1.0).logits(hidden_states(model, ids, torch.ones_like(ids).bool()))
        torch.testing.assert_close(ours, model(ids).logits)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused():
    model = make_model()
    require_known_head(model)
    model.register_forward_hook(lambda _, args, out: setattr(out, "logits", 2 * out.logits))
    with pytest.raises(ConfigError, match="not supported"):
        require_known_head(model)


def test_an_adapter_on_the_output_layer_is_refused():
    spec = AdapterSpec(rank=2, target_modules=".*(q_proj|lm_head)")
    model = new_adapter(make_model(tie_embeddings=False), spec, seed=0)
    with pytest.raises(ConfigError, match="output layer"):
        require_known_head(model)


def _own(rollout):
    positions = tuple(i for i, m in enumerate(rollout.completion_mask) if m)
    return TeacherView(token_ids=rollout.token_ids, positions=positions, kind="own", id="x")


def _close(left, right):
    flat = [torch.tensor([x for s in scores for x in s.logprobs]) for scores in (left, right)]
    return torch.allclose(flat[0], flat[1], atol=1e-4)
