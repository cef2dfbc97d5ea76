"""The engine and the teacher behind HTTP against a really started vLLM server, on a CPU."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from distill.engines.publishing import publish
from distill.engines.server import ServerEngine, ServerOptions
from distill.errors import ConfigError, EngineError, TeacherError
from distill.models import char_tokenizer
from distill.policy import Policy
from distill.types import Sampling, ScoreRequest, StopReason, TeacherView
from helpers import ALPHABET
from real.vllm_parts import make_adapter, make_full, make_model
from real.vllm_server import NAME, RealServer
from teachers.local import LocalTeacher
from teachers.server import ServerTeacher, ServerTeacherOptions

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm-env"
    ),
]

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14)]
KEYS = ("a", "b", "c")
STOPS = (1, 20, 21)
TOKENIZER = char_tokenizer(ALPHABET)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("vllm_server")
    make_model().save_pretrained(str(home / "base"))
    TOKENIZER.save_pretrained(str(home / "base"))
    running = RealServer(home / "base", home / "server.log")
    try:
        running.start()
        yield running
    finally:
        running.stop()


def engine_of(server, **changes):
    values = {"tolerance": 1e-3, "deadline": 60.0, "scoring_concurrency": 1, **changes}
    options = ServerOptions(urls=(server.url,), model=NAME, **values)
    return ServerEngine(options, vocab_size=48, tokenizer=TOKENIZER)


def teacher_of(server, k=20, **changes):
    # One at a time: this server has adapters, see ServerOptions.scoring_concurrency.
    options = ServerTeacherOptions(urls=(server.url,), model=NAME, deadline=60.0, concurrency=1)
    return ServerTeacher(options, num_ids=48, k=k, tokenizer=TOKENIZER, **changes)


def sampling(**changes):
    values = {"num_samples": 3, "max_new_tokens": 8, "stop_token_ids": STOPS, "keys": KEYS}
    return Sampling(**(values | changes))


def gap(policy, groups):
    """Mean difference between the sampler's log-probabilities and the trainer's."""
    views, known = [], []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            ids = (*prompt, *completion.token_ids)
            places = tuple(range(len(prompt), len(ids)))
            views.append(TeacherView(token_ids=ids, positions=places, kind="x", id="x"))
            known += completion.logprobs
    found = [x for scores in policy.score(views) for x in scores.logprobs]
    return sum(abs(a - b) for a, b in zip(found, known, strict=True)) / len(known)


def test_samples_carry_the_log_probabilities_of_the_trainer(server):
    engine = engine_of(server)
    groups = engine.generate(PROMPTS, sampling(num_samples=16))
    assert [len(g) for g in groups] == [16, 16, 16]
    assert gap(make_full(), groups) < 1e-4
    for completion in [c for group in groups for c in group]:
        *body, last = completion.token_ids
        assert not set(body) & set(STOPS)
        assert completion.stop == (StopReason.STOP if last in STOPS else StopReason.LENGTH)
    assert {c.stop for g in groups for c in g} == {StopReason.STOP, StopReason.LENGTH}


def test_a_sample_depends_on_its_key_and_number_only(server):
    engine = engine_of(server)
    many = engine.generate(PROMPTS, sampling(num_samples=8))
    few = engine.generate(PROMPTS[1:2], sampling(num_samples=2, keys=("b",)))
    assert [c.token_ids for c in few[0]] == [c.token_ids for c in many[1][:2]]
    assert len({c.token_ids for c in many[1]}) > 4


def test_greedy_replies_and_choices_are_those_of_the_reference_engine(server):
    from distill.engines.hf import HFEngine

    engine, reference = engine_of(server), HFEngine(make_full())
    greedy = sampling(temperature=0.0, keys=(), num_samples=1)
    ours, theirs = (e.generate(PROMPTS, greedy) for e in (engine, reference))
    assert [[c.token_ids for c in g] for g in ours] == [[c.token_ids for c in g] for g in theirs]
    bound = sampling(choices=(((5, 1), (9, 8, 7, 1), (6, 6, 1)), (), ((4, 20),)), num_samples=8)
    ours, theirs = (e.generate(PROMPTS, bound) for e in (engine, reference))
    for i in (0, 2):
        assert [c.token_ids for c in ours[i]] == [c.token_ids for c in theirs[i]]


def test_a_colder_temperature_is_refused_and_a_false_claim_found_out(server):
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engine_of(server).generate(PROMPTS, sampling(temperature=0.5))
    claimed = engine_of(server, logprobs_mode="processed_logprobs")
    with pytest.raises(ConfigError, match="start it with --logprobs-mode processed_logprobs"):
        claimed.generate(PROMPTS, sampling(temperature=0.5))


def test_adapters_arrive_and_leave(server, tmp_path):
    engine = engine_of(server)
    for version in (1, 2):
        policy = make_adapter(seed=version, scale=0.3)
        ref = publish(
            policy, TOKENIZER, tmp_path / str(version), step=version, policy_version=version
        )
        engine.load(ref)
        assert engine.policy_version == version
        groups = engine.generate(PROMPTS, sampling(num_samples=8))
        assert gap(policy, groups) < 1e-3
        assert gap(make_full(), groups) > 0.05
    engine.close()
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in listed] == [NAME]


def test_an_adapter_of_another_base_is_refused(server, tmp_path):
    policy = make_adapter(seed=1, rank=8, num_layers=3)
    ref = publish(policy, TOKENIZER, tmp_path / "a", step=1, policy_version=1)
    engine = engine_of(server, retries=0)
    with pytest.raises(EngineError, match="engine at"):
        engine.load(ref)
    assert engine.policy_version == 0


def test_full_weights_are_read_again_with_the_head_and_come_back(server, tmp_path):
    engine = engine_of(server, sync="reload")
    for version, seed in ((1, 7), (2, 0)):
        policy = make_full(seed)
        ref = publish(
            policy, TOKENIZER, tmp_path / str(version), step=version, policy_version=version
        )
        engine.load(ref)
        assert engine.gap < 1e-3
        assert gap(policy, engine.generate(PROMPTS, sampling())) < 1e-3


def test_scores_are_those_of_the_same_model_in_this_process(server):
    generator_ids = [[3 + (7 * i + 5 * j) % 41 for i in range(20 + j)] for j in range(6)]
    views = [
        TeacherView(token_ids=tuple(ids), positions=tuple(range(4, len(ids))), kind="x", id="x")
        for ids in generator_ids
    ]
    local = LocalTeacher(Policy(make_model(), base="t", trainable=False), name="t")
    want = ScoreRequest(candidates=8)
    for ours, theirs in zip(
        teacher_of(server).score(views, want), local.score(views, want), strict=True
    ):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        for a, b in zip(ours.candidate_logprobs, theirs.candidate_logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def test_the_cap_of_the_server_is_found_before_training(server):
    with pytest.raises(TeacherError, match=r"greater than max allowed: 20.*--max-logprobs 40"):
        teacher_of(server, k=40)
    report = teacher_of(server).probe(63, 20)
    assert report.largest_gap < 1e-3


def test_a_window_survives_a_restart_of_the_server_adapter_and_all(server, tmp_path):
    engine = engine_of(server, backoff=0.5, deadline=400.0)
    policy = make_adapter(seed=3, scale=0.3)
    engine.load(publish(policy, TOKENIZER, tmp_path / "3", step=3, policy_version=3))
    prompts = [(5 + i % 30, 6 + i % 7, 7) for i in range(96)]
    asked = sampling(
        num_samples=8,
        max_new_tokens=48,
        stop_token_ids=(1,),
        keys=tuple(f"key {i}" for i in range(len(prompts))),
    )
    begun = time.monotonic()
    before = engine.generate(prompts, asked)
    seconds = time.monotonic() - begun
    with ThreadPoolExecutor(1) as pool:
        window = pool.submit(engine.generate, prompts, asked)
        time.sleep(seconds / 3)
        assert not window.done()
        server.stop()
        server.start()
        after = window.result()
    rows = [(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)]
    equal = sum(a.token_ids == b.token_ids for a, b in rows)
    # Another batch rounds otherwise, which may tip a draw that was on the edge.
    assert equal >= 0.99 * len(rows), f"{equal} of {len(rows)}"
    assert gap(policy, engine.generate(PROMPTS, sampling())) < 1e-3
