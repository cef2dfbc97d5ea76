"""A served teacher gives what a local one gives: log-probabilities, entropies, candidates,
distributions, over a real connection."""

from __future__ import annotations

import pytest
import torch

from distill.errors import ConfigError
from distill.models import char_tokenizer
from distill.objectives import GKD
from distill.policy import Policy
from distill.step import Parts, on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import ScoreRequest, TeacherView
from helpers import ALPHABET, make_model, make_policy, random_rollouts
from scoring_endpoint import WIDTH, make_scorer, serving, teacher_at
from teachers.local import LocalTeacher
from teachers.views import Plain

EXACT = {"atol": 1e-6, "rtol": 0.0}


@pytest.fixture(scope="module")
def endpoint():
    with serving(make_scorer()) as found:
        yield found


def local(temperature=1.0, num_ids=None, model=None):
    policy = Policy(model or make_model(1), base="t", trainable=False, temperature=temperature)
    return LocalTeacher(policy, name="t", num_ids=num_ids)


def views_of(rollouts):
    return [v for v in Plain().build(rollouts, {}) if v is not None]


def same(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **EXACT)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("batch_tokens", [16384, 20])
def test_log_probabilities_and_entropies_equal_those_of_the_local_teacher(
    endpoint, temperature, batch_tokens
):
    views = views_of(random_rollouts(12))
    want = ScoreRequest(entropy=True)
    remote = endpoint.teacher(temperature=temperature, batch_tokens=batch_tokens)
    found, expected = remote.score(views, want), local(temperature).score(views, want)
    for mine, theirs, view in zip(found, expected, views, strict=True):
        same(mine.logprobs, theirs.logprobs)
        same(mine.entropy, theirs.entropy)
        assert (mine.view_id, mine.candidate_ids) == (view.id, None)


def test_requests_of_the_default_size_give_the_very_same_numbers(endpoint):
    views = views_of(random_rollouts(12))
    found = endpoint.teacher().score(views, ScoreRequest())
    expected = local().score(views, ScoreRequest())
    assert [s.logprobs for s in found] == [s.logprobs for s in expected]


@pytest.mark.parametrize("batch_tokens", [16384, 20])
def test_own_candidates_and_those_of_the_student_equal_the_local_ones(endpoint, batch_tokens):
    views = views_of(random_rollouts())
    asked = [[[5, 7 + len(v.positions), 47]] * len(v.positions) for v in views]
    remote = endpoint.teacher(batch_tokens=batch_tokens)
    for want in (ScoreRequest(candidates=3), ScoreRequest(candidate_ids=asked)):
        found, expected = remote.score(views, want), local().score(views, want)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.candidate_ids == tuple(map(tuple, theirs.candidate_ids))
            same(mine.candidate_logprobs, theirs.candidate_logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_distribution_is_the_local_one_also_in_half_precision(dtype):
    model = make_model(1).to(dtype)
    views = views_of(random_rollouts())
    rows = torch.arange(sum(len(v.positions) for v in views))
    with serving(make_scorer(model)) as endpoint:
        remote = endpoint.teacher(temperature=0.7)
        found = remote.distribution(views).log_probs(rows)
        expected = local(0.7, model=model).distribution(views).log_probs(rows)
        torch.testing.assert_close(found, expected, **EXACT)
        small = endpoint.teacher(temperature=0.7, batch_tokens=20)
        again = small.distribution(views).log_probs(rows)
        torch.testing.assert_close(
            again, expected, atol=1e-6 if dtype.itemsize > 2 else 0.1, rtol=0
        )


def test_a_head_with_bias_scale_and_cap_is_read_in_parts(monkeypatch):
    import teachers.remote

    monkeypatch.setattr(teachers.remote, "HEAD_PART", 7 * 32 * 4)
    model = make_model(1, tie_embeddings=False)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, WIDTH))
    model.config.logit_scale, model.config.final_logit_softcapping = 0.5, 9.0
    views = views_of(random_rollouts())
    rows = torch.arange(sum(len(v.positions) for v in views))
    with serving(make_scorer(model)) as endpoint:
        remote = endpoint.teacher()
        found = remote.distribution(views).log_probs(rows)
        assert remote.head() is remote.head()
    torch.testing.assert_close(found, local(model=model).distribution(views).log_probs(rows))


def test_a_student_with_a_wider_vocabulary_is_scored_over_the_shared_ids(endpoint):
    remote, expected = endpoint.teacher(num_ids=64), local(num_ids=len(ALPHABET))
    views = views_of(random_rollouts())
    asked = ScoreRequest(candidate_ids=[[[3, 60]] * len(v.positions) for v in views])
    for mine, theirs in zip(remote.score(views, asked), expected.score(views, asked), strict=True):
        same(mine.candidate_logprobs, theirs.candidate_logprobs)
        assert mine.candidate_logprobs[0][1] == -float("inf")
    top = ScoreRequest(candidates=len(ALPHABET))
    for mine, theirs in zip(remote.score(views, top), expected.score(views, top), strict=True):
        same(mine.candidate_logprobs, theirs.candidate_logprobs)
    rows = torch.arange(3)
    torch.testing.assert_close(
        remote.distribution(views).log_probs(rows), expected.distribution(views).log_probs(rows)
    )


def test_views_without_a_trained_token_keep_their_places(endpoint):
    first, *rest = views_of(random_rollouts())
    empty = TeacherView(token_ids=(5, 6), positions=(), kind="plain", id="empty")
    found = endpoint.teacher().score([first, empty, *rest], ScoreRequest(entropy=True))
    assert [s.view_id for s in found] == [first.id, "empty", *(v.id for v in rest)]
    assert (found[1].logprobs, found[1].entropy, found[1].candidate_ids) == ((), (), None)
    nothing = endpoint.teacher().distribution([empty])
    assert nothing.log_probs(torch.zeros(0, dtype=torch.long)).shape == (0, WIDTH)
    assert endpoint.teacher().score([], ScoreRequest()) == []


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_one_step_with_a_served_teacher_is_the_step_with_a_local_one(endpoint, beta):
    def step(teacher):
        policy = make_policy()
        parts = Parts(
            tasks=lambda step: [],
            rows=lambda tasks, step: random_rollouts(),
            policy=policy,
            objective=GKD(beta=beta),
            trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=0.01)),
            teacher=teacher,
            view=Plain(),
        )
        report = on_policy_step(parts, 1).update
        return report, torch.cat([p.detach().flatten() for p in policy.model.parameters()])

    (ours, after), (theirs, expected) = step(endpoint.teacher()), step(local())
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-7)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    torch.testing.assert_close(after, expected, **EXACT)


def test_more_candidates_than_the_vocabulary_has_are_refused_before_anything_is_sent(endpoint):
    remote = endpoint.teacher()
    before = remote.num_bytes
    with pytest.raises(ConfigError, match=r"500 candidates .* lower objective\.k"):
        remote.score(views_of(random_rollouts()), ScoreRequest(candidates=500))
    assert remote.num_bytes == before


@pytest.mark.parametrize(
    ("want", "bytes_per_token"),
    [
        (ScoreRequest(), 8),
        (ScoreRequest(entropy=True), 12),
        (ScoreRequest(candidates=16), 8 + 6 * 16),
        ("asked", 8 + 4 * 16),
    ],
    ids=["plain", "entropy", "own top 16", "16 of the student"],
)
def test_the_traffic_per_scored_token_is_what_it_should_be(endpoint, want, bytes_per_token):
    views = views_of(random_rollouts(60))
    if want == "asked":
        want = ScoreRequest(candidate_ids=[[list(range(16))] * len(v.positions) for v in views])
    remote = endpoint.teacher()
    before = remote.num_bytes
    remote.score(views, want)
    assert remote.num_tokens == sum(len(v.positions) for v in views)
    overhead = 400  # one head and its padding
    spent = remote.num_bytes - before
    assert 0 < spent - bytes_per_token * remote.num_tokens < overhead


def test_equal_scores_have_equal_identities_and_others_have_not(endpoint):
    one = endpoint.teacher().identity
    assert endpoint.teacher().identity == one
    assert (
        len(
            {one, endpoint.teacher(temperature=0.5).identity, endpoint.teacher(num_ids=64).identity}
        )
        == 3
    )
    with serving(make_scorer(weights="w2")) as other:
        assert other.teacher().identity != one


def test_a_server_with_another_tokenizer_is_refused(endpoint):
    with pytest.raises(ConfigError, match=r"another tokenizer .* student \(41 tokens"):
        endpoint.teacher(tokenizer=char_tokenizer(ALPHABET[:3] + ALPHABET[:2:-1]))


def test_a_server_with_another_model_is_refused(endpoint):
    assert endpoint.teacher(model="tiny").served.model == "tiny"
    with pytest.raises(ConfigError, match="should have the model 'large', it has 'tiny'"):
        endpoint.teacher(model="large")


def test_servers_with_different_weights_are_refused(endpoint):
    with (
        serving(make_scorer(make_model(2), weights="w2")) as other,
        pytest.raises(ConfigError, match="must name equal servers"),
    ):
        teacher_at(endpoint.url, other.url)
    with serving(make_scorer()) as twin:
        found = teacher_at(endpoint.url, twin.url).score(
            views_of(random_rollouts()), ScoreRequest()
        )
        assert len(found) == 6
