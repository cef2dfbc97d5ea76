"""Two levels of hindsight skills inside the advantage: values, routing, denominators, weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.batch import collate
from distill.errors import AlignmentError, ConfigError
from distill.ledger import Ledger
from distill.objectives import GRPO, OPID, SEED
from distill.objectives.base import asks_teacher, reads_teacher
from distill.trainer import Trainer, TrainerOptions
from distill.types import Scores
from helpers import INFO, logits_batch, logits_view, make_policy, objective_loss, random_rollouts
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

# skills-and-routing 9.2 and 9.3
STUDENT = f64([[-0.5, -1.2, -2.0, -0.1]])
SKILLED = f64([[-0.3, -1.5, -1.0, -0.1]])
GAP = [0.2, -0.3, 1.0, 0.0]
RAW = {"group": "center", "lone_group": "raw", "kl_coefficient": 0.0}
"""A group of one keeps its reward as its advantage."""
LARGE = {"allow_large_weights": True}


def published(rows=1, *, step=None, **changes):
    """Rows of the published example, scored before the update; every token is id 0. `step` marks
    the rows whose skill is that of a step."""
    values = {"behaviour_logprobs": prompted(STUDENT.expand(rows, 4))}
    if step is not None:
        values["signals"] = {"skill.step": torch.tensor(step)[:, None].expand(rows, 5).double()}
    tokens = torch.zeros(rows, 4, dtype=torch.long)
    return logits_batch(tokens, SKILLED.expand(rows, 4), **(values | changes))


def advantages(objective, batch):
    """At ratio 1 the surrogate is -A."""
    return -per_token(objective, two_way(STUDENT.expand(batch.num_rows, 4)), batch)


def metrics_of(objective, batch):
    batch, _ = objective.prepare(batch, INFO, {})
    ledger = Ledger()
    view = logits_view(two_way(STUDENT.expand(batch.num_rows, 4)), batch, objective)
    ledger.add(0.0, objective(view, batch))
    return ledger.metrics()


@pytest.mark.parametrize("step", [None, [1.0]])
@pytest.mark.parametrize(
    ("reward", "expected"),
    [(0.9, [0.9002, 0.8997, 0.901, 0.9]), (0.0, [0.0002, -0.0003, 0.001, 0.0])],
)
def test_advantages_have_their_published_values_in_either_scope(step, reward, expected):
    # skills-and-routing 9.3
    batch = published(step=step, rewards=f64([reward]))
    close(advantages(OPID(**RAW), batch), [expected])


def test_clamped_and_standardised_gaps_have_their_published_values():
    # skills-and-routing 9.3; a weight of 1 shows the part itself
    whole = OPID(w_episode=1.0, **LARGE, **RAW)
    close(advantages(replace(whole, clip_skill=0.5), published()), [[0.2, -0.3, 0.5, 0.0]])
    scaled = replace(whole, normalize=True)
    close(advantages(scaled, published()), [[-0.051917, -1.090263, 1.609436, -0.467256]])
    both = replace(scaled, clip_skill=1.0)
    close(advantages(both, published()), [[-0.051917, -1.0, 1.0, -0.467256]])
    assert "student.logprobs" in scaled.needs
    assert "student.logprobs" not in whole.needs


def test_gaps_are_standardised_over_the_whole_step_and_each_scope_for_itself():
    objective = OPID(w_episode=1.0, w_step=1.0, normalize=True, **LARGE, **RAW)
    batch = published(3, step=[0.0, 0.0, 1.0])
    batch.targets["teacher"].logprobs[1] += 0.7
    found = advantages(objective, batch)
    gap = torch.cat([f64(GAP), f64(GAP) + 0.7])
    expected = (gap - gap.mean()) / (gap.std(correction=0) + 1e-6)
    close(found[:2].flatten(), expected)
    close(found[2], [-0.051917, -1.090263, 1.609436, -0.467256])


def test_the_auxiliary_losses_have_their_published_values():
    # skills-and-routing 9.3
    none = {"w_episode": 0.0, "w_step": 0.0, "auxiliary_coefficient": 1.0, **RAW}
    found = objective_loss(OPID(auxiliary="delta", **none), two_way(STUDENT), published())
    close(found, 0.435)
    old = STUDENT - 0.3
    batch = published(behaviour_logprobs=prompted(old))
    batch.targets["teacher"].logprobs.copy_(prompted(old + 1.0))
    found = objective_loss(OPID(auxiliary="importance", **none), two_way(STUDENT), batch)
    close(found, -1.349859)
    half = OPID(auxiliary="importance", **(none | {"auxiliary_coefficient": 0.5}))
    close(objective_loss(half, two_way(STUDENT), batch), -0.674930, 1e-6)
    assert len(OPID().prepare(batch, INFO, {})[0].weights) == 2  # the surrogate's and that of k3


@pytest.mark.parametrize("how", ["delta", "importance"])
def test_the_auxiliary_losses_push_by_the_gap(how):
    none = {"w_episode": 0.0, "w_step": 0.0, "auxiliary_coefficient": 1.0, **RAW}
    found = coefficients(OPID(auxiliary=how, **none), STUDENT, published())
    close(found, [[-g / 4 for g in GAP]])


def test_a_step_skill_goes_before_that_of_the_episode():
    # skills-and-routing 2.3
    objective = OPID(w_episode=0.1, w_step=0.05, **RAW)
    found = advantages(objective, published(2, step=[0.0, 1.0]))
    close(found, [[0.1 * g for g in GAP], [0.05 * g for g in GAP]])
    assert "step_skill.logprobs" not in objective.needs


def additive(**changes):
    """Row 0 has both skills, row 1 that of its episode, row 2 that of its step, row 3 none."""
    told = torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None].expand(4, 5).double()
    batch = published(
        4,
        signals={"step_skill.viewed": told},
        row_viewed=torch.tensor([True, True, False, False]),
        **changes,
    )
    step = full_scores(two_way(STUDENT.expand(4, 4) - 0.4), torch.zeros(4, 4, dtype=torch.long))
    return replace(batch, targets={**batch.targets, "step_skill": step})


def test_additive_routing_adds_both_skills():
    objective = OPID(w_episode=0.1, w_step=0.05, routing="additive", **RAW)
    assert {"teacher.logprobs", "step_skill.logprobs"} <= objective.needs
    episode, step = 0.1 * f64(GAP), f64([-0.4 * 0.05] * 4)
    expected = torch.stack([episode + step, episode, step, torch.zeros(4, dtype=F64)])
    close(advantages(objective, additive()), expected)


def test_additive_routing_names_what_it_misses():
    objective = OPID(routing="additive", **RAW)
    with pytest.raises(AlignmentError, match=r"'step_skill\.viewed'"):
        advantages(objective, published())
    batch = replace(additive(), targets={"teacher": additive().targets["teacher"]})
    with pytest.raises(AlignmentError, match="'step_skill'"):
        advantages(objective, batch)


def test_the_skill_part_over_skilled_tokens_is_multiplied_by_all_over_skilled():
    # world-agents A4.2: a third of the rows has a skill, so that it counts three times as much
    seen = torch.tensor([True, False, False])
    batch = published(3, row_viewed=seen)
    found = advantages(OPID(w_episode=0.1, over="skilled", **RAW), batch)
    close(found[0], [0.3 * g for g in GAP])
    close(found[1:], torch.zeros(2, 4))
    close(advantages(OPID(w_episode=0.1, **RAW), batch)[0], [0.1 * g for g in GAP])


@pytest.mark.parametrize("over", ["all", "skilled"])
def test_the_slope_of_a_skill_is_its_weight_over_the_denominator(over):
    batch = published(3, row_viewed=torch.tensor([True, False, False]))
    found = coefficients(OPID(w_episode=0.1, over=over, **RAW), STUDENT.expand(3, 4), batch)
    count = 12 if over == "all" else 4
    close(found[0], [-0.1 * g / count for g in GAP])


def some(seed=0, **changes):
    """Three rows of one group with a random teacher; the last has no skill."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(3, 4, 5, generator=generator) for _ in range(4)]
    tokens = torch.randint(0, 5, (3, 4), generator=generator)
    scores = {
        n: full_scores(x, tokens) for n, x in zip(("teacher", "reference"), made[:2], strict=True)
    }
    values = {
        "rewards": torch.tensor([1.0, 0.0, 0.3]),
        "row_group": torch.zeros(3, dtype=torch.long),
        "row_viewed": torch.tensor([True, True, False]),
        "behaviour_logprobs": full_scores(made[2], tokens).logprobs,
        "targets": scores,
    }
    return made[3], logits_batch(tokens, **(values | changes))


def both(objective, logits, batch):
    value = objective_loss(objective, logits, batch)
    return value, gradient(lambda z: objective_loss(objective, z, batch), logits)


PUBLISHED = GRPO(ddof=1, clip_dual=3.0, kl_coefficient=0.01, aggregate="token")


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        (OPID(w_episode=0.0, w_step=0.0), {}),
        (OPID(), {"row_viewed": torch.zeros(3, dtype=torch.bool)}),
        (OPID(over="skilled", normalize=True), {"row_viewed": torch.zeros(3, dtype=torch.bool)}),
    ],
)
def test_without_a_skill_to_learn_it_is_grpo_bit_for_bit(objective, changes):
    # skills-and-routing 7.6, invariant 4
    logits, batch = some(**changes)
    plain, found = both(PUBLISHED, logits, batch), both(objective, logits, batch)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    assert not torch.equal(both(OPID(w_episode=0.1), *some())[1], plain[1])


def test_weights_of_zero_ask_no_teacher():
    assert not reads_teacher(OPID(w_episode=0.0, w_step=0.0))
    assert asks_teacher(OPID(w_episode=0.0), INFO)
    delta = {"auxiliary": "delta", "auxiliary_coefficient": 0.1}
    assert asks_teacher(OPID(w_episode=0.0, w_step=0.0, **delta), INFO)


def test_a_group_without_a_spread_still_learns_from_its_skills():
    # skills-and-routing 7.6, invariant 5
    logits, batch = some(rewards=torch.full((3,), 0.7))
    objective = OPID(kl_coefficient=0.0)
    prepared, _ = objective.prepare(batch, INFO, {})
    assert not bool(prepared.signals["opid"].any())
    slope = both(objective, logits, batch)[1]
    assert bool(slope[:2].any())
    assert not bool(slope[2].any())  # no skill and no spread
    assert not bool(both(replace(PUBLISHED, kl_coefficient=0.0), logits, batch)[1].any())


def test_the_advantage_carries_no_gradient_although_it_may_read_the_live_student():
    # skills-and-routing 7.6, invariant 3
    objective = OPID(w_episode=0.1, **RAW)
    batch = published(behaviour_logprobs=None, rewards=f64([0.9]))
    expected = -(0.9 + 0.1 * f64([GAP])) / 4
    close(coefficients(objective, STUDENT, batch), expected)


@pytest.mark.parametrize(
    "options", [{}, {"over": "skilled", "normalize": True}, {"clip_skill": 0.1}]
)
def test_the_gradient_agrees_with_finite_differences(options):
    logits, batch = some()
    batch = replace(batch, behaviour_logprobs=batch.behaviour_logprobs.double())
    objective = OPID(w_episode=0.5, **LARGE, **options)

    def loss(at):
        return objective_loss(objective, at, batch)

    close(gradient(loss, logits.double()), numeric_gradient(loss, logits.double()), 1e-8)


@pytest.mark.parametrize("over", ["all", "skilled"])
def test_with_one_update_per_batch_the_signed_gate_of_seed_is_the_same_method(over):
    # world-agents A4.6
    logits, batch = some(behaviour_logprobs=None)
    opid = both(OPID(w_episode=0.1, over=over), logits, batch)[1]
    seed = both(SEED(gate="signed", skill_coefficient=0.1, over=over), logits, batch)[1]
    close(opid, seed, 1e-7)
    assert float((opid - both(PUBLISHED, logits, batch)[1]).abs().max()) > 1e-3


def test_parts_and_shares_of_the_advantage_are_reported():
    batch = published(2, step=[0.0, 1.0], rewards=f64([0.9, 0.9]))
    found = metrics_of(OPID(w_episode=0.1, w_step=0.05, **RAW), batch)
    sizes = {"outcome": 0.9, "episode": 0.1 * 1.5 / 8, "step": 0.05 * 1.5 / 8}
    for name, size in sizes.items():
        close(found[f"opid/{name}_size"], size)
        close(found[f"opid/{name}_share"], size / sum(sizes.values()))
    close(found["opid/episode_advantage"], 0.1 * 0.9 / 8)
    close([found["opid/step_gap"], found["opid/step_gap_size"]], [0.225, 0.375])
    close([found["opid/episode_token_share"], found["opid/step_token_share"]], [0.5, 0.5])
    close(found["opid/teacher_logprob"], -2.9 / 4)


def test_a_rare_token_moves_an_advantage_by_a_hundredth_and_by_ten_at_the_weight_of_the_yaml():
    # skills-and-routing 2.8
    batch = published()
    batch.targets["teacher"].logprobs.copy_(prompted(STUDENT - 10.0))
    close(advantages(OPID(**RAW), batch), [[-0.01] * 4])
    close(advantages(OPID(w_episode=1.0, **LARGE, **RAW), batch), [[-10.0] * 4])


@pytest.mark.parametrize("options", [{"w_episode": 1.0}, {"w_step": 0.5}, {"w_episode": 0.101}])
def test_a_weight_of_the_yaml_file_is_refused_unless_it_is_meant(options):
    with pytest.raises(ConfigError, match=r"0\.001 in the paper, .* 1,000 times"):
        OPID(**options)
    OPID(**options, **LARGE)
    OPID(w_episode=0.1, w_step=0.1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"routing": "both"}, "routing"),
        ({"over": "rows"}, "over"),
        ({"auxiliary": "k3"}, "auxiliary"),
        ({"w_episode": -0.1}, "w_episode"),
        ({"w_step": -0.1}, "w_step"),
        ({"clip_skill": -1.0}, "clip_skill"),
        ({"auxiliary_coefficient": 0.1}, 'auxiliary is "none"'),
        ({"ddof": 3}, "ddof"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        OPID(**options)


def told_batch(rollouts):
    """Rows with skills of both levels and rows without any, scored by three models."""
    views = [
        (tuple(r.token_ids), [i for i, m in enumerate(r.completion_mask) if m]) for r in rollouts
    ]
    generator = torch.Generator().manual_seed(4)
    roles = {}
    for role in ("teacher", "step_skill", "reference"):
        draws = [-3 * torch.rand(len(places), generator=generator) for _, places in views]
        roles[role] = [
            Scores(logprobs=tuple(d.tolist()), source=role, view_id=str(i))
            for i, d in enumerate(draws)
        ]
    viewed = [i % 3 != 0 for i in range(len(rollouts))]
    batch = collate(rollouts, roles, viewed=viewed)
    where = torch.arange(len(rollouts))[:, None].expand(batch.input_ids.shape)
    signals = {"skill.step": (where % 2).float(), "step_skill.viewed": (where % 4 == 1).float()}
    old = -2 * torch.rand(batch.input_ids.shape, generator=generator)
    return replace(
        batch, signals=signals, behaviour_logprobs=old.masked_fill(~batch.completion_mask, 0.0)
    )


SPLIT = [
    SEED(skill_coefficient=0.5),
    SEED(skill_coefficient=0.5, gate="signed", over="all", failed_only=True),
    OPID(w_episode=0.5, w_step=0.2, **LARGE),
    OPID(w_episode=0.5, w_step=0.2, over="skilled", normalize=True, **LARGE),
    OPID(w_episode=0.5, routing="additive", auxiliary="delta", auxiliary_coefficient=0.1, **LARGE),
]


@pytest.mark.parametrize("objective", SPLIT, ids=lambda o: f"{o.name}-{SPLIT.index(o)}")
def test_micro_batches_change_nothing_with_rows_of_every_kind(objective):
    found = []
    for tokens in (0, 25):
        policy, kept = make_policy(), {}
        options = TrainerOptions(num_steps=1, lr=0.0, grad_clip=0.0, micro_batch_tokens=tokens)
        trainer = Trainer(policy, options)
        trainer.optimizer.step = lambda p=policy, k=kept: k.update(
            {n: x.grad.clone() for n, x in p.trainable().items()}
        )
        report = trainer.update(told_batch(random_rollouts(9)), objective, INFO)
        found.append((report, kept))
    (whole, expected), (split, grads) = found
    assert split.loss == pytest.approx(whole.loss, abs=1e-5)
    assert split.metrics == pytest.approx(whole.metrics, abs=1e-4)
    assert any(bool(g.any()) for g in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-5, rtol=1e-4)
