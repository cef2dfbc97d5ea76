"""Faults that other trainers shipped, each as the case that showed it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.asking import own_view
from distill.batch import collate
from distill.body import require_known_head
from distill.config import Layer, load
from distill.curriculum.samplers import TaskSampler
from distill.errors import ConfigError
from distill.logprobs import Head, predictor_rows
from distill.models import eos_token_ids, new_adapter
from distill.objectives import OBJECTIVES, SDPO, SFT
from distill.policy import AdapterSpec
from distill.tokens import Chat
from distill.types import Message, Task
from flows import wiring
from helpers import (
    logits_batch,
    make_chat,
    make_model,
    make_policy,
    make_rollout,
    objective_loss,
    random_rollouts,
)


def test_a_model_that_predicts_every_next_token_has_likelihood_one():
    # T3: with an unshifted or doubly shifted pairing the same model looks hopeless
    rollouts = [make_rollout([3, 4], [5, 6, 7, 1]), make_rollout([3], [9, 8])]
    batch = collate(rollouts)
    following = torch.roll(batch.input_ids, -1, dims=1)
    hidden = 30.0 * torch.nn.functional.one_hot(following, 12).float()
    rows = predictor_rows(hidden, batch.completion_mask)
    found = Head(weight=torch.eye(12)).log_probs(rows)
    tokens = batch.input_ids[batch.completion_mask]
    assert float(found.gather(-1, tokens[:, None]).min()) > -1e-6
    assert float(found.gather(-1, (tokens[:, None] + 1) % 12).max()) < -20


PLAIN = ("opd", "gkd", "power_opd", "opsd", "sft")


@pytest.mark.parametrize("name", PLAIN)
def test_logits_of_tokens_outside_the_mask_change_no_loss(name):
    # T9
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 5, (3, 4), generator=generator)
    scores = torch.log_softmax(teacher, -1).gather(-1, tokens[..., None])[..., 0]
    batch = logits_batch(tokens, scores)
    mask = batch.completion_mask.clone()
    mask[:, 3:] = False
    batch = replace(batch, completion_mask=mask, row_sampled=torch.full((3,), name != "sft"))
    other = student.clone()
    other[:, 2:] = torch.randn(3, 2, 5, dtype=torch.float64, generator=generator)
    objective = OBJECTIVES[name]()
    found = objective_loss(objective, student, batch, teacher)
    assert float(found) == float(objective_loss(objective, other, batch, teacher)) != 0.0
    nothing = replace(batch, completion_mask=torch.zeros_like(mask))
    assert float(objective_loss(objective, student, nothing, teacher)) == 0.0


def test_an_advantage_that_does_not_know_the_action_moves_nothing_and_is_no_option():
    # T15: the expected policy gradient of a state's own divergence is zero
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, -1)
    advantage = -float((log_probs.exp() * log_probs).sum().detach())
    expected = (log_probs.exp().detach() * advantage * log_probs).sum()
    (slope,) = torch.autograd.grad(expected, logits)
    assert float(slope.abs().max()) < 1e-12
    text = '[[stage]]\nname = "s"\nkind = "on_policy"\ntarget = "student"\n'
    config = load(
        [Layer(origin="n.toml", text=text)],
        ["model.path=x", "objective.name=opd", "objective.advantage=divergence"],
    )
    with pytest.raises(ConfigError, match=r"unknown key 'objective.advantage'.*valid in"):
        wiring.build_objective(config.for_stage(config.stages[0]))


@pytest.mark.parametrize(("given", "expected"), [(None, ()), (5, (5,)), ([2, 5], (2, 5))])
def test_no_end_token_one_or_several_are_all_understood(given, expected):
    # T23
    model = make_model()
    model.config.eos_token_id = given
    model.generation_config.eos_token_id = given
    assert tuple(eos_token_ids(model)) == expected
    chat = Chat(make_chat().tokenizer, eos_token_ids=eos_token_ids(model), max_length=64)
    assert set(expected) <= set(chat.stop_token_ids)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_a_temperature_divides_logits_and_not_log_probabilities(temperature):
    # T26
    rollouts = random_rollouts()
    policy = make_policy(temperature=temperature)
    batch = collate(rollouts)
    with torch.no_grad():
        logits = policy.model(input_ids=batch.input_ids).logits
    found = policy.score([own_view(r) for r in rollouts])
    for row, (rollout, scores) in enumerate(zip(rollouts, found, strict=True)):
        places = [i for i, m in enumerate(rollout.completion_mask) if m]
        dist = torch.log_softmax(logits[row] / temperature, -1)
        expected = [float(dist[i - 1, rollout.token_ids[i]]) for i in places]
        assert list(scores.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_run_that_stops_between_two_epochs_goes_on_with_the_second():
    # T42
    tasks = [
        Task(
            id=f"t{i}",
            env="e",
            domain="d",
            split="train",
            prompt=(Message(role="user", content=f"{i}"),),
        )
        for i in range(8)
    ]
    whole = TaskSampler(tasks, batch=4, key="k")
    drawn = [[t.id for t in whole(step)] for step in range(1, 5)]
    again = TaskSampler(tasks, batch=4, key="k")
    assert [[t.id for t in again(step)] for step in (3, 4)] == drawn[2:]
    assert sorted(drawn[2] + drawn[3]) == sorted(t.id for t in tasks)


def test_a_support_larger_than_the_vocabulary_is_named():
    student = torch.zeros(1, 1, 3, dtype=torch.float64)
    batch = logits_batch(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ConfigError, match="k must not exceed the vocabulary of 3 entries, got 100"):
        objective_loss(SDPO(), student, batch, student)


def test_worked_rows_teach_sft_and_sampled_ones_do_not():
    # T41
    student = torch.zeros(1, 1, 3, dtype=torch.float64)
    sampled = logits_batch(torch.zeros(1, 1, dtype=torch.long))
    worked = replace(sampled, row_sampled=torch.zeros(1, dtype=torch.bool))
    assert float(objective_loss(SFT(), student, sampled)) == 0.0
    assert float(objective_loss(SFT(), student, worked)) == pytest.approx(1.098612, abs=1e-6)


def test_an_adapter_on_the_output_layer_is_refused_because_our_head_would_not_see_it():
    # T36
    spec = AdapterSpec(rank=2, target_modules=".*lm_head|.*q_proj")
    model = new_adapter(make_model(tie_embeddings=False), spec, seed=0)
    with pytest.raises(ConfigError, match=r"carries an adapter.*model.target_modules"):
        require_known_head(model)
