"""What every teacher promises, and what a view guarantees about the tokens it shows."""

from __future__ import annotations

import pytest
import torch

from distill.batch import collate
from distill.errors import ConfigError, DataError
from distill.followers import FollowerSpec
from distill.models import new_adapter
from distill.objectives import GKD, OPD
from distill.policy import AdapterSpec, Policy
from distill.step import Parts, on_policy_step
from distill.tokens import require_same_tokenizer
from distill.trainer import Trainer, TrainerOptions
from distill.types import Message, ScoreRequest, Task
from helpers import make_chat, make_model, make_policy, make_rollout, random_rollouts
from teachers.local import LocalTeacher
from teachers.mixture import MixtureTeacher, RoutedTeacher, TrustRegionTeacher
from teachers.self_teacher import self_teacher
from teachers.views import Plain, Shuffled, WithAnswer


def frozen(seed=1):
    return LocalTeacher(Policy(make_model(seed), base="t", trainable=False), name="t")


def adapter_policy():
    policy = Policy(
        new_adapter(make_model(), AdapterSpec(rank=4), seed=3), base="b", kind="adapter"
    )
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return policy


def following(policy, name):
    return self_teacher(policy, role=policy.add_follower(FollowerSpec(name=name)))


def trust_region():
    policy = adapter_policy()
    parts = self_teacher(policy), self_teacher(policy, role="student")
    return TrustRegionTeacher(*parts, mix=0.3, name="trust")


TEACHERS = {
    "local": frozen,
    "self, adapter off": lambda: self_teacher(adapter_policy()),
    "self, full weights": lambda: self_teacher(make_policy()),
    "moving average of an adapter": lambda: following(adapter_policy(), "ema"),
    "snapshot of full weights": lambda: following(make_policy(), "snapshot"),
    "trust region": trust_region,
    "mixture": lambda: MixtureTeacher([frozen(1), frozen(2)], weights=[0.25, 0.75], name="mix"),
    "routed": lambda: RoutedTeacher(teachers={"other": frozen(1)}, default=frozen(2)),
}


@pytest.fixture(params=TEACHERS.values(), ids=TEACHERS.keys())
def teacher(request):
    return request.param()


def views_of(rollouts):
    return [v for v in Plain().build(rollouts, {}) if v is not None]


def test_scores_cover_exactly_the_trained_tokens(teacher):
    rollouts = random_rollouts()
    scores = teacher.score(views_of(rollouts), ScoreRequest(entropy=True))
    for rollout, score in zip(rollouts, scores, strict=True):
        assert len(score.logprobs) == len(score.entropy) == rollout.num_trained
        assert all(x < 0 for x in score.logprobs)
        assert all(x > 0 for x in score.entropy)


def test_the_distribution_agrees_with_the_scores(teacher):
    rollouts = random_rollouts()
    views = views_of(rollouts)
    batch = collate(rollouts)
    dist = teacher.distribution(views).log_probs(torch.arange(batch.num_tokens))
    ids = batch.input_ids[batch.completion_mask]
    flat = [x for s in teacher.score(views, ScoreRequest()) for x in s.logprobs]
    torch.testing.assert_close(
        dist.gather(-1, ids[:, None])[:, 0], torch.tensor(flat), atol=1e-5, rtol=1e-5
    )
    assert not dist.requires_grad


def test_the_order_of_the_views_changes_no_score(teacher):
    views = views_of(random_rollouts())
    forward = teacher.score(views, ScoreRequest())
    backward = teacher.score(views[::-1], ScoreRequest())[::-1]
    for left, right in zip(forward, backward, strict=True):
        torch.testing.assert_close(
            torch.tensor(left.logprobs), torch.tensor(right.logprobs), atol=1e-5, rtol=1e-5
        )


def test_candidates_are_read_off_the_same_distribution(teacher):
    rollouts = random_rollouts()
    views = views_of(rollouts)
    dist = teacher.distribution(views).log_probs(torch.arange(collate(rollouts).num_tokens))
    best = dist.topk(3, dim=-1)

    own = teacher.score(views, ScoreRequest(candidates=3))
    ids = torch.tensor([row for s in own for row in s.candidate_ids])
    known = torch.tensor([row for s in own for row in s.candidate_logprobs])
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(known, best.values, atol=1e-5, rtol=1e-5)

    asked = [[[5, 7]] * len(v.positions) for v in views]
    given = teacher.score(views, ScoreRequest(candidate_ids=asked))
    found = torch.tensor([row for s in given for row in s.candidate_logprobs])
    torch.testing.assert_close(found, dist[:, [5, 7]], atol=1e-5, rtol=1e-5)


def test_more_candidates_than_the_vocabulary_has_are_refused(teacher):
    with pytest.raises(ConfigError, match=r"500 candidates .* lower objective\.k"):
        teacher.score(views_of(random_rollouts()), ScoreRequest(candidates=500))


def test_a_teacher_can_do_what_it_says(teacher):
    assert teacher.capabilities >= {"logprobs", "entropy", "candidates", "distribution"}


@pytest.mark.parametrize("objective", [OPD(), GKD(beta=0.0), GKD(beta=0.5), GKD(beta=1.0)])
def test_a_teacher_with_the_weights_of_the_student_moves_nothing(objective):
    twin, own = make_policy(), make_policy()
    local = LocalTeacher(Policy(make_model(), base="t", trainable=False), name="t")
    for policy, teacher in ((twin, local), (own, self_teacher(own))):
        parts = Parts(
            tasks=lambda step: [],
            rows=lambda tasks, step: random_rollouts(),
            policy=policy,
            objective=objective,
            trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=0.0)),
            teacher=teacher,
            view=Plain(),
        )
        report = on_policy_step(parts, 1)
        assert report.update.loss == pytest.approx(0.0, abs=1e-6)
        assert report.update.grad_norm == pytest.approx(0.0, abs=1e-5)


def test_a_self_teacher_keeps_still_while_the_student_moves():
    policy = adapter_policy()
    teacher = self_teacher(policy)
    views = views_of(random_rollouts())
    before = teacher.score(views, ScoreRequest())
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
    after = teacher.score(views, ScoreRequest())
    assert [s.logprobs for s in before] == [s.logprobs for s in after]
    assert not any("base_layer" in name for name in policy.trainable())


def test_an_adapter_teacher_shares_the_base_and_is_never_trained(tmp_path):
    expert = adapter_policy()
    expert.model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    views = views_of(random_rollouts())
    expected = expert.score(views)
    student = Policy(
        new_adapter(make_model(), AdapterSpec(rank=4), seed=9), base="b", kind="adapter"
    )
    names = set(student.trainable())
    teacher = LocalTeacher(student, name="expert", role=student.add_adapter("teacher", tmp_path))
    found = teacher.score(views, ScoreRequest())
    assert set(student.trainable()) == names
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(left.logprobs), torch.tensor(right.logprobs), atol=1e-5, rtol=1e-5
        )


def task(content="ab=", answer="ba", **meta):
    return Task(
        id="t0",
        env="e",
        domain="d",
        split="train",
        prompt=(Message(role="user", content=content),),
        answer=answer,
        meta=meta,
    )


def test_a_privileged_view_shows_the_answer_and_the_same_response():
    chat = make_chat()
    rollout = make_rollout(chat.prompt(task().prompt), [5, 6, 1])
    view = WithAnswer(chat=chat, task_of=lambda _: task(), template="answer:{answer}")
    (built,) = view.build([rollout], {})
    assert chat.decode(built.token_ids[: built.positions[0]]) == "ab=answer:ba"
    assert [built.token_ids[p] for p in built.positions] == [5, 6, 1]


def test_a_task_with_its_own_privileged_prompt_uses_it():
    chat = make_chat()
    own = task(views={"answer": "ab:ba="})
    rollout = make_rollout(chat.prompt(own.prompt), [5, 1])
    (built,) = WithAnswer(chat=chat, task_of=lambda _: own).build([rollout], {})
    assert chat.decode(built.token_ids[: built.positions[0]]) == "ab:ba="


def test_a_view_that_does_not_fit_is_dropped_and_never_cut():
    chat = make_chat()
    rollout = make_rollout(chat.prompt(task().prompt), [5, 6, 1])
    view = WithAnswer(
        chat=chat, task_of=lambda _: task(answer="b" * 30), template="{answer}", max_length=20
    )
    assert view.build([rollout], {}) == [None]


def test_a_privileged_prompt_over_the_limit_of_the_student_does_not_stop_the_night():
    chat = make_chat()  # at most 64 tokens
    view = WithAnswer(chat=chat, task_of=lambda _: task(answer="b" * 70), max_length=64)
    assert view.build([make_rollout((5, 6), (7, 1))], {}) == [None]


def test_a_view_without_an_answer_names_the_task():
    chat = make_chat()
    rollout = make_rollout(chat.prompt(task().prompt), [5, 1])
    with pytest.raises(DataError, match="t0"):
        WithAnswer(chat=chat, task_of=lambda _: task(answer=None)).build([rollout], {})


def test_the_shuffled_view_shows_every_response_under_another_prompt():
    rollouts = [make_rollout([5 + i, 6], [9, i + 10], name=f"t{i}") for i in range(3)]
    for rollout, view in zip(rollouts, Shuffled().build(rollouts, {}), strict=True):
        assert view.token_ids[:2] != rollout.token_ids[:2]
        assert view.token_ids[2:] == rollout.token_ids[2:]
    with pytest.raises(ConfigError, match="two prompts"):
        Shuffled().build(rollouts[:1], {})


def test_a_dropped_view_empties_the_row_and_keeps_the_others_aligned():
    class DropFirst:
        kind = "plain"

        def build(self, rollouts, contexts):
            return [None, *Plain().build(rollouts, contexts)[1:]]

    policy, rollouts = make_policy(), random_rollouts()

    def update(view, rows, objective):
        parts = Parts(
            tasks=lambda step: [],
            rows=lambda tasks, step: rows,
            policy=make_policy(),
            objective=objective,
            trainer=None,
            teacher=frozen(),
            view=view,
        )
        from dataclasses import replace

        parts = replace(parts, trainer=Trainer(parts.policy, TrainerOptions(num_steps=1, lr=0.0)))
        return on_policy_step(parts, 1)

    assert policy.kind == "full"
    for objective in (OPD(), GKD()):
        dropped = update(DropFirst(), rollouts, objective)
        without = update(Plain(), rollouts[1:], objective)
        assert dropped.num_dropped == 1
        assert dropped.update.loss == pytest.approx(without.update.loss, abs=1e-5)


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_difference():
    from distill.models import char_tokenizer

    ours, theirs = char_tokenizer("_$^abc"), char_tokenizer("_$^acb")
    require_same_tokenizer(ours, char_tokenizer("_$^abc"), "t")
    with pytest.raises(ConfigError, match="first difference: 'b' is 4 here and 5 there"):
        require_same_tokenizer(ours, theirs, "t")


def padded(num_ids):
    """A teacher over the 48 entries of the tiny model, of which only the first are tokens."""
    return LocalTeacher(frozen().policy, name="t", num_ids=num_ids)


def test_a_teacher_scores_over_the_ids_that_both_sides_share():
    teacher, views = padded(41), views_of(random_rollouts())
    log_probs = teacher.distribution(views).log_probs(
        torch.arange(sum(len(v.positions) for v in views))
    )
    known = [((3, 47),) * len(v.positions) for v in views]
    scores = teacher.score(views, ScoreRequest(entropy=True, candidate_ids=known))
    ids = torch.tensor([v.token_ids[p] for v in views for p in v.positions])
    found = torch.tensor([x for s in scores for x in s.logprobs])
    torch.testing.assert_close(found, log_probs.gather(1, ids[:, None])[:, 0])
    listed = torch.tensor([x for s in scores for x in s.candidate_logprobs])
    torch.testing.assert_close(listed[:, 0], log_probs[:, 3])
    assert bool(listed[:, 1].isneginf().all()), "an id that only one side has"
    top = teacher.score(views, ScoreRequest(candidates=41))
    assert max(i for s in top for row in s.candidate_ids for i in row) < 41


def test_a_mixture_of_teachers_whose_widths_differ_by_padding_is_over_the_shared_ids():
    views = views_of(random_rollouts())
    rows = torch.arange(sum(len(v.positions) for v in views))

    def mixed(*parts):
        teacher = MixtureTeacher(parts, weights=[0.5, 0.5], name="mix")
        return teacher.distribution(views).log_probs(rows)

    torch.testing.assert_close(mixed(frozen(), padded(41)), mixed(padded(41), padded(41)))
