"""The control without a skill: successes imitate their own surprising tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.errors import ConfigError
from distill.ledger import Ledger
from distill.objectives import GRPO, OPID, Surprise
from distill.objectives.base import reads_teacher
from helpers import INFO, logits_batch, logits_view, objective_loss
from vectors import (
    F64,
    close,
    coefficients,
    f64,
    full_scores,
    gradient,
    numeric_gradient,
    per_token,
    prompted,
    two_way,
)

STUDENT = f64([[-0.5, -1.2, -2.0, -0.1]]).expand(3, 4)
RAW = {"group": "center", "lone_group": "raw", "kl_coefficient": 0.0}


def rows(**changes):
    """A success, a failure, and a failure after a penalty; each a group of its own."""
    values = {"rewards": f64([0.9, 0.0, -0.1]), "behaviour_logprobs": prompted(STUDENT)}
    return logits_batch(torch.zeros(3, 4, dtype=torch.long), **(values | changes))


def test_only_successes_add_their_surprise():
    found = -per_token(Surprise(**RAW), two_way(STUDENT), rows())
    close(found[0], [0.9 + 0.5 * x for x in (0.5, 1.2, 2.0, 0.1)])
    close(found[1:], [[0.0] * 4, [-0.1] * 4])


def test_what_counts_as_a_failure_can_be_set():
    found = -per_token(Surprise(failed_at=-0.05, **RAW), two_way(STUDENT), rows())
    close(found[1], [0.5 * x for x in (0.5, 1.2, 2.0, 0.1)])
    close(found[2], [-0.1] * 4)


def test_the_surprise_is_that_of_the_policy_that_acted_and_carries_no_gradient():
    batch = rows(behaviour_logprobs=None)
    found = coefficients(Surprise(**RAW), STUDENT, batch)
    close(found[0], [-(0.9 + 0.5 * x) / 12 for x in (0.5, 1.2, 2.0, 0.1)])
    batch, objective = rows(), Surprise(**RAW)
    at = two_way(STUDENT - f64([0.05, 0.1, -0.02, 0.03]))

    def loss(logits):
        return objective_loss(objective, logits, batch)

    close(gradient(loss, at), numeric_gradient(loss, at), 1e-8)


def some(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, old, reference = torch.randn(3, 4, 4, 5, dtype=F64, generator=generator)
    tokens = torch.randint(0, 5, (4, 4), generator=generator)
    batch = logits_batch(
        tokens,
        rewards=f64([1.0, 0.0, 0.9, 0.0]),
        row_group=torch.zeros(4, dtype=torch.long),
        behaviour_logprobs=full_scores(old, tokens).logprobs,
        targets={"reference": full_scores(reference, tokens)},
    )
    return logits, batch


@pytest.mark.parametrize("weight", [0.1, 0.5])
def test_it_is_opid_with_skills_that_give_every_success_away(weight):
    # world-agents A4.7: log p(reply | own skill) is about 0, whatever the skill says
    logits, batch = some(0)
    told = {**batch.targets, "teacher": full_scores(logits, batch.input_ids[:, 1:])}
    told["teacher"].logprobs.zero_()
    skilled = replace(batch, targets=told, row_viewed=batch.rewards > 0)
    opid = OPID(w_episode=weight, allow_large_weights=True)
    pairs = ((Surprise(surprise_weight=weight), batch), (opid, skilled))
    slopes = [gradient(lambda z, o=o, b=b: objective_loss(o, z, b), logits) for o, b in pairs]
    close(slopes[0], slopes[1], 1e-9)


def test_a_weight_of_zero_is_grpo_bit_for_bit_and_no_teacher_is_ever_asked():
    logits, batch = some(1)
    plain = GRPO(ddof=1, clip_dual=3.0, kl_coefficient=0.01, aggregate="token")
    found = [
        gradient(lambda z, o=o: objective_loss(o, z, batch), logits)
        for o in (Surprise(surprise_weight=0.0), plain, Surprise())
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[2], found[1])
    assert not reads_teacher(Surprise())


def test_its_metrics_tell_successes_and_their_surprise():
    objective = Surprise(**RAW)
    batch, _ = objective.prepare(rows(), INFO, {})
    ledger = Ledger()
    ledger.add(0.0, objective(logits_view(two_way(STUDENT), batch, objective), batch))
    close(ledger.metrics()["surprise/surprise"], 0.95)
    close(ledger.metrics()["surprise/success_share"], 1 / 3)


def test_a_bad_hyper_parameter_is_named():
    with pytest.raises(ConfigError, match="surprise_weight"):
        Surprise(surprise_weight=-1.0)
