"""What a step asks of the models, also where the teacher has no view of a row, or of any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from distill.correction import Correction
from distill.errors import ConfigError
from distill.followers import FollowerSpec
from distill.objectives import GKD, GOPD, GRPO, OPD, OPSD, SDPO, AntiSD
from distill.objectives.base import Objective, num_candidates
from distill.objectives.terms import Sum
from distill.policy import Policy
from distill.rows import keep_mixed_groups
from distill.step import Parts, StepReport, on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import Rollout
from helpers import make_model, make_policy, make_rollout, random_rollouts
from teachers.local import LocalTeacher
from teachers.views import Plain

TOP_4 = OPD(support="top_k", k=4)


@dataclass
class Without:
    """The plain view, which the first rows lack."""

    missing: int
    kind: str = "plain"

    def build(self, rollouts, contexts):
        built = Plain().build(rollouts, contexts)
        return [None] * self.missing + built[self.missing :]


def frozen(seed: int = 1) -> LocalTeacher:
    return LocalTeacher(Policy(make_model(seed), base="t", trainable=False), name="t")


def step(
    objective: Objective,
    missing: int = 0,
    rows: Sequence[Rollout] = (),
    *,
    minibatches: int = 1,
    correction: Correction | None = None,
) -> StepReport:
    policy = make_policy()
    options = TrainerOptions(num_steps=1, lr=0.0, minibatches=minibatches)
    parts = Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: list(rows) or random_rollouts(),
        policy=policy,
        objective=objective,
        trainer=Trainer(policy, options),
        teacher=frozen(),
        view=Without(missing),
        reference=frozen(2),
        correction=correction or Correction(),
    )
    return on_policy_step(parts, 1)


@pytest.mark.parametrize("objective", [AntiSD(), SDPO(hybrid_lambda=0.9)])
def test_a_step_without_any_view_still_trains_on_the_group_advantages(objective):
    found = step(objective, missing=6)
    assert found.num_dropped == 0
    assert found.update.grad_norm > 0


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (OPSD(), {"minibatches": 2}),
        (OPD(discount=0.5), {}),
        (TOP_4, {}),
        (OPD(), {"correction": Correction(level="token")}),
        (GOPD(), {}),
    ],
)
def test_a_step_without_any_view_of_rows_that_need_one_is_empty_and_no_error(objective, options):
    found = step(objective, missing=6, **options)
    assert found.num_dropped == 6
    assert found.update.loss == 0.0


def test_an_objective_that_reads_no_teacher_loses_no_row_to_a_view():
    assert step(GRPO(), missing=2) == step(GRPO(), missing=0)


@pytest.mark.parametrize("other", [OPD(), TOP_4, GKD()])
@pytest.mark.parametrize("keeper", [AntiSD(), GRPO()])
def test_a_term_does_not_learn_from_rows_that_another_one_keeps_without_a_view(keeper, other):
    kept, alone = step(keeper, missing=2), step(other, missing=2)
    both = step(Sum(parts=((keeper, 1.0), (other, 1.0))), missing=2)
    expected = kept.update.loss + alone.update.loss
    assert both.update.loss == pytest.approx(expected, abs=1e-5)


def test_a_group_that_a_view_shrank_to_one_row_is_counted():
    assert [step(OPSD(), missing=n).sampled["group/lone"] for n in (0, 1, 2)] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("objective", [AntiSD(warmup_steps=1), SDPO(hybrid_lambda=0.5)])
def test_the_gap_of_a_step_is_that_of_the_rows_with_a_view(objective):
    name = "anti_sd/gap" if objective.name == "anti_sd" else "sdpo/reverse_kl"
    found = step(objective, missing=2).update.metrics[name]
    assert found == pytest.approx(step(objective, rows=random_rollouts()[2:]).update.metrics[name])


def test_the_gap_to_the_sampler_is_that_of_sampled_rows():
    def sampled(row):
        return replace(row, logprobs=tuple(-0.5 * m for m in row.completion_mask))

    rows = [sampled(row) for row in random_rollouts(4)]
    worked = random_rollouts(2, seed=3, worked=True)
    name = "sampler_gap/mean"
    found = step(GKD(), rows=[*rows, *worked]).update.metrics[name]
    assert found == pytest.approx(step(GKD(), rows=rows).update.metrics[name])


def test_a_sum_lists_the_entries_of_the_term_that_reads_them():
    assert num_candidates(Sum(parts=((GKD(), 1.0), (TOP_4, 1.0)))) == 4
    assert num_candidates(GKD()) == 0


@pytest.mark.parametrize("k", [4, 6])
def test_terms_that_need_different_lists_of_entries_are_refused(k):
    with pytest.raises(ConfigError, match=f"opd: 4 of the student, gkd: {k} of the teacher"):
        Sum(parts=((TOP_4, 1.0), (GKD(support="top_k", k=k), 1.0)))


def test_two_self_teachers_cannot_follow_the_student_at_different_rates():
    policy = make_policy()
    role = policy.add_follower(FollowerSpec(name="ema", rate=0.1))
    assert policy.add_follower(FollowerSpec(name="ema", rate=0.1)) == role
    with pytest.raises(ConfigError, match=r"rate=0.1.*rate=0.5"):
        policy.add_follower(FollowerSpec(name="ema", rate=0.5))


def test_an_average_of_half_precision_weights_moves_at_a_small_rate():
    policy = Policy(make_model().bfloat16(), base="b")
    policy.add_follower(FollowerSpec(name="ema", rate=0.02))
    (name, student), *_ = policy.trainable().items()
    start = student.detach().clone()
    with torch.no_grad():
        student.mul_(1.05)
    for number in range(200):
        policy.after_step(number + 1)
    role, target = policy.followers["ema"], student.detach().float()
    kept = role.tensors()
    gap = (kept[name] - target).norm() / (start.float() - target).norm()
    assert float(gap) == pytest.approx(0.98**200, rel=0.1)
    role.load(kept)
    assert torch.equal(role.tensors()[name], kept[name])
    read = dict(role.model.named_parameters())[name]
    assert torch.equal(read, kept[name].bfloat16())


def test_a_row_without_trained_tokens_is_not_read():
    policy, widths = make_policy(), []
    embed = policy.model.get_input_embeddings()
    embed.register_forward_hook(lambda module, ids, out: widths.append(ids[0].shape))
    views = Plain().build([make_rollout([5, 6], [7, 8])], {})
    long = replace(views[0], token_ids=(5,) * 30, positions=())
    scores = policy.score([long, *views])
    assert widths == [torch.Size([1, 4])]
    assert [len(s.logprobs) for s in scores] == [0, 2]


def test_worked_solutions_stay_when_a_refill_found_enough_groups():
    replies = random_rollouts(6)  # three groups with different rewards
    worked = random_rollouts(1, seed=3, worked=True)
    worked = [replace(r, traj_id="worked", group_id="worked") for r in worked]
    kept = keep_mixed_groups([*replies, *worked], wanted=3)
    assert [bool(r.num_trained) for r in kept] == [True] * 4 + [False] * 2 + [True]


def as_sampled(rows: Sequence[Rollout], shift: float = 0.0) -> list[Rollout]:
    """The rows with the student's own log-probabilities, off by `shift` each."""
    scores = make_policy().score(Plain().build(rows, {}))
    return [
        replace(
            row,
            logprobs=(
                *(0.0 for m in row.completion_mask if not m),
                *(x + shift for x in score.logprobs),
            ),
        )
        for row, score in zip(rows, scores, strict=True)
    ]


def test_a_row_that_a_correction_masks_leaves_the_mean_over_rows():
    first, *rest = random_rollouts()
    rows = [*as_sampled([first], shift=-5.0), *as_sampled(rest)]
    rule = Correction(level="sequence", mode="mask", cap=1.5, low=0.5)
    objective = OPD(aggregate="sequence_sum")
    found = step(objective, rows=rows, correction=rule)
    expected = step(objective, rows=rows[1:], correction=rule)
    assert found.update.loss == pytest.approx(expected.update.loss, abs=1e-5)


def test_worked_solutions_leave_the_mean_over_the_rows_that_the_student_wrote():
    worked = random_rollouts(2, seed=3, worked=True)
    worked = [
        replace(row, task_id="w", group_id="w", traj_id=f"w{i}") for i, row in enumerate(worked)
    ]
    objective = OPD(aggregate="sequence_sum")
    found = step(objective, rows=[*random_rollouts(), *worked])
    assert found.update.loss == pytest.approx(step(objective).update.loss, abs=1e-5)
