"""The teacher behind a stock server agrees with the same model in this process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distill.divergence import DivergenceSpec, divergence
from distill.errors import ConfigError, TeacherError
from distill.models import char_tokenizer
from distill.objectives import GKD
from distill.policy import Policy
from distill.step import Parts, on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import ScoreRequest, TeacherView
from helpers import ALPHABET, make_chat, make_model, make_policy, random_rollouts
from openai_server import NAME, ModelServer
from teachers.local import LocalTeacher
from teachers.server import ServerTeacher, ServerTeacherOptions, require_temperature
from teachers.views import Plain

FAST = {"timeout": 5.0, "deadline": 20.0, "retries": 2, "backoff": 0.02}


@pytest.fixture
def server():
    with ModelServer(seed=1) as running:
        yield running


def teacher_of(*servers, options=None, **changes):
    values = {"urls": tuple(s.url for s in servers), "model": NAME, **FAST, **(options or {})}
    chosen = ServerTeacherOptions(**values)
    settings = {"num_ids": 48, "k": 5, "tokenizer": make_chat().tokenizer}
    return ServerTeacher(chosen, **(settings | changes))


def local(seed=1, **options):
    return LocalTeacher(Policy(make_model(seed), base="t", trainable=False), name="t", **options)


def views_of(rollouts):
    return [v for v in Plain().build(rollouts, {}) if v is not None]


def test_scores_are_those_of_the_same_model_in_this_process(server):
    views = views_of(random_rollouts())
    teacher = teacher_of(server)
    ours = teacher.score(views, ScoreRequest())
    theirs = local().score(views, ScoreRequest())
    for a, b, view in zip(ours, theirs, views, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert (a.candidate_ids, a.entropy, a.view_id) == (None, None, view.id)
    assert teacher.capabilities == {"logprobs", "own_top_k"}
    assert teacher.tokens_scored == sum(len(v.positions) for v in views)
    assert teacher.bytes_received > 1000


def test_its_own_best_ids_are_read_by_id_and_never_by_rank(server):
    """A server puts the token's own entry first, whatever its rank is, as one of k + 1."""
    views = views_of(random_rollouts())
    ours = teacher_of(server).score(views, ScoreRequest(candidates=5))
    theirs = local().score(views, ScoreRequest(candidates=5))
    outside = 0
    for a, b, view in zip(ours, theirs, views, strict=True):
        assert a.candidate_ids == b.candidate_ids
        for x, y in zip(a.candidate_logprobs, b.candidate_logprobs, strict=True):
            assert x == pytest.approx(y, abs=1e-5)
        for place, ids in zip(view.positions, a.candidate_ids, strict=True):
            outside += view.token_ids[place] not in ids
    assert outside > 0, "tokens beyond the best five are scored too"


def test_the_first_token_has_no_score_and_shifts_nothing(server):
    """The entry of the first token is null; entry t describes token t."""
    teacher = teacher_of(server)
    view = TeacherView(token_ids=(5, 6, 7, 8), positions=(1, 3), kind="x", id="x")
    (found,) = teacher.score([view], ScoreRequest())
    with torch.no_grad():
        logits = make_model(1)(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    expected = [float(logits[0, 6]), float(logits[2, 8])]
    assert found.logprobs == pytest.approx(expected, abs=1e-5)
    assert all(math.isfinite(x) for x in found.logprobs)


def test_a_row_without_trained_tokens_is_not_asked_for(server):
    teacher = teacher_of(server)
    before = len(server.completions)
    empty = TeacherView(token_ids=(5, 6), positions=(), kind="x", id="e")
    full = TeacherView(token_ids=(5, 6, 7), positions=(1,), kind="x", id="f")
    found = teacher.score([empty, full, empty], ScoreRequest(candidates=2))
    assert [len(s.logprobs) for s in found] == [0, 1, 0]
    assert len(server.completions) == before + 1
    assert server.completions[-1]["prompt"] == [5, 6], "nothing behind the last trained token"
    assert teacher.score([], ScoreRequest()) == []


def test_the_order_of_the_views_changes_no_score_over_several_servers():
    with ModelServer(seed=1) as first, ModelServer(seed=1) as second:
        teacher, views = teacher_of(first, second), views_of(random_rollouts(12))
        forward = teacher.score(views, ScoreRequest(candidates=3))
        assert forward == teacher.score(views[::-1], ScoreRequest(candidates=3))[::-1]
        assert min(len(first.completions), len(second.completions)) > 4


def test_ids_that_only_a_wider_teacher_has_are_left_out(server):
    views = views_of(random_rollouts())
    narrow = teacher_of(server, num_ids=41).score(views, ScoreRequest(candidates=20))
    wide = teacher_of(server).score(views, ScoreRequest(candidates=20))
    shortened = 0
    for a, b in zip(narrow, wide, strict=True):
        assert a.logprobs == b.logprobs
        for ids, values, all_ids in zip(
            a.candidate_ids, a.candidate_logprobs, b.candidate_ids, strict=True
        ):
            real = [i for i, x in zip(ids, values, strict=True) if x > -math.inf]
            assert len(ids) == len(values) == 20
            assert [i for i in all_ids if i < 41] == real[: sum(i < 41 for i in all_ids)]
            assert max(real) < 41
            shortened += len(real) < 20
    assert shortened > 0, "short rows are filled with what counts as absent"


def test_a_sampled_id_beyond_the_vocabulary_of_the_student_is_an_error(server):
    view = TeacherView(token_ids=(5, 45), positions=(1,), kind="x", id="x")
    with pytest.raises(TeacherError, match=r"the id 45 stands at token 2.* has 41 entries"):
        teacher_of(server, num_ids=41).score([view], ScoreRequest())


@pytest.mark.parametrize(
    "want",
    [ScoreRequest(entropy=True), ScoreRequest(candidate_ids=[[[5]]])],
    ids=["entropy", "ids of the student"],
)
def test_what_no_stock_server_gives_is_refused(server, want):
    teacher = teacher_of(server)
    with pytest.raises(ConfigError, match="distill teacher serve"):
        teacher.score([TeacherView(token_ids=(5, 6), positions=(1,), kind="x", id="x")], want)
    with pytest.raises(ConfigError, match="no whole distributions"):
        teacher.distribution([])


def test_more_candidates_than_the_vocabulary_has_are_refused(server):
    with pytest.raises(ConfigError, match=r"500 candidates .* lower objective\.k"):
        teacher_of(server).score(views_of(random_rollouts()), ScoreRequest(candidates=500))


def test_another_temperature_than_one_is_refused(server):
    with pytest.raises(ConfigError, match=r"sampling\.temperature = 1, or use `distill teacher"):
        teacher_of(server, temperature=0.6)
    require_temperature(1.0)


def test_a_text_that_does_not_fit_is_named_before_it_is_sent(server):
    teacher = teacher_of(server)
    before = len(server.completions)
    view = TeacherView(token_ids=(5,) * 64, positions=(63,), kind="x", id="x")
    with pytest.raises(ConfigError, match="--max-model-len 65"):
        teacher.score([view], ScoreRequest())
    assert len(server.completions) == before


def test_a_server_with_the_weights_of_the_student_moves_nothing():
    """Equal models have divergence 0 on the served path too: top k and tail."""
    with ModelServer(seed=0) as server:
        policy, objective = make_policy(), GKD(beta=0.0, support="top_k", k=5)
        parts = Parts(
            tasks=lambda step: [],
            rows=lambda tasks, step: random_rollouts(),
            policy=policy,
            objective=objective,
            trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=0.0)),
            teacher=teacher_of(server),
            view=Plain(),
        )
        report = on_policy_step(parts, 1)
    assert report.update.loss == pytest.approx(0.0, abs=1e-6)
    assert report.update.grad_norm == pytest.approx(0.0, abs=1e-4)


def test_filled_rows_add_no_mass_to_a_divergence(server):
    (view,) = views_of(random_rollouts(1))
    (short,) = teacher_of(server, num_ids=41).score([view], ScoreRequest(candidates=20))
    from distill.divergence import Candidates

    ids, known = torch.tensor(short.candidate_ids), torch.tensor(short.candidate_logprobs)
    student = torch.randn(len(ids), 48, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    spec = DivergenceSpec(name="x", beta=0.0, support="top_k", chosen_by="teacher", k=20)
    found = divergence(student, Candidates(ids=ids, logprobs=known), spec).per_token
    real = [[x for x in row if x > -math.inf] for row in short.candidate_logprobs]
    for row, values in enumerate(real):
        mine = [float(student[row, i]) for i in short.candidate_ids[row][: len(values)]]
        rest = [math.log1p(-min(sum(map(math.exp, v)), 1 - 1e-7)) for v in (values, mine)]
        expected = sum(
            math.exp(t) * (t - s) for t, s in zip([*values, rest[0]], [*mine, rest[1]], strict=True)
        )
        assert float(found[row]) == pytest.approx(expected, abs=1e-3)


# -- what is found out before training ---------------------------------------------------------


def test_a_server_whose_cap_is_below_k_is_named_at_once(server):
    with pytest.raises(TeacherError, match=r"greater than max allowed: 20.*--max-logprobs 40"):
        teacher_of(server, k=40)
    with ModelServer(seed=1, cap=-1) as open_one:
        teacher_of(open_one, k=40)


def test_a_model_that_is_not_served_is_named_with_those_that_are(server):
    with pytest.raises(ConfigError, match=r"teacher.model is 'other', but .* serves 'tiny'"):
        teacher_of(server, options={"model": "other"})


def test_another_tokenizer_is_refused_with_the_first_difference():
    swapped = char_tokenizer(ALPHABET.replace("ab", "ba"))
    with (
        ModelServer(tokenizer=swapped) as server,
        pytest.raises(ConfigError, match=r"another tokenizer: of .* token \d+ is \d+ here and \d+"),
    ):
        teacher_of(server)


def test_a_probe_scores_the_longest_text_and_every_order_and_server():
    with ModelServer(seed=1) as first, ModelServer(seed=1) as second:
        report = teacher_of(first, second).probe(60, 5)
        assert report.longest == 60
        assert report.seconds > 0
        assert report.largest_gap < 1e-4
        assert max(len(b["prompt"]) for b in second.completions) == 60
        with pytest.raises(ConfigError, match="--max-model-len 65"):
            teacher_of(first).probe(64, 5)


def test_a_probe_finds_servers_that_disagree():
    with (
        ModelServer(seed=1) as first,
        ModelServer(seed=2) as second,
        pytest.raises(TeacherError, match="scores that differ by"),
    ):
        teacher_of(first, second).probe(10, 5)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"urls": ("nowhere",)}, r"teacher\.urls"),
        ({"model": ""}, r"teacher\.model"),
        ({"retries": -1}, r"teacher\.retries"),
        ({"api_key_env": "sk-1"}, r"teacher\.api_key_env"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, word):
    options = ServerTeacherOptions(urls=("http://127.0.0.1:8000",), model="m")
    with pytest.raises(ConfigError, match=word):
        replace(options, **changes)
