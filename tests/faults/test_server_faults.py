"""What a server can do wrong: each is survived, or named by an error that says what to do."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from distill.engines.publishing import publish
from distill.engines.server import ServerEngine, ServerOptions
from distill.errors import ConfigError, EngineError, TeacherError
from distill.models import char_tokenizer, new_adapter
from distill.policy import AdapterSpec, Policy
from distill.types import Sampling, ScoreRequest
from helpers import ALPHABET, make_chat, make_model, make_policy, random_rollouts
from openai_server import NAME, ModelServer
from teachers.server import ServerTeacher, ServerTeacherOptions
from teachers.views import Plain

FAST = {"timeout": 5.0, "deadline": 20.0, "retries": 2, "backoff": 0.02}
PROMPTS = [(5 + i, 6, 7) for i in range(8)]
KEYS = tuple(f"key {i}" for i in range(8))
SAMPLING = Sampling(num_samples=2, max_new_tokens=4, stop_token_ids=(1, 20, 21), keys=KEYS)
FOREVER = 1000


@pytest.fixture
def server():
    with ModelServer() as running:
        yield running


def engine_of(*servers, **changes):
    values = {"urls": tuple(s.url for s in servers), "model": NAME, **FAST, **changes}
    tokenizer = make_chat().tokenizer
    return ServerEngine(ServerOptions(**values), vocab_size=48, tokenizer=tokenizer)


def teacher_of(*servers, **changes):
    values = {"urls": tuple(s.url for s in servers), "model": NAME, **FAST, **changes}
    tokenizer = make_chat().tokenizer
    return ServerTeacher(ServerTeacherOptions(**values), num_ids=48, k=5, tokenizer=tokenizer)


def sample(engine, count=8):
    return engine.generate(PROMPTS[:count], replace(SAMPLING, keys=KEYS[:count]))


def views():
    return [v for v in Plain().build(random_rollouts(8), {}) if v is not None]


def score(teacher):
    return teacher.score(views(), ScoreRequest(candidates=5))


def adapter(tmp_path, version=1):
    policy = Policy(
        new_adapter(make_model(), AdapterSpec(rank=4, alpha=8), seed=3), base="t", kind="adapter"
    )
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.fill_(0.2 * version)
    return published(policy, tmp_path / str(version), version)


def published(policy, folder, version):
    tokenizer = make_chat().tokenizer
    return publish(policy, tokenizer, folder, step=version, policy_version=version)


def full(tmp_path):
    return published(make_policy(seed=7), tmp_path / "7", 7)


# -- answers that are no use -------------------------------------------------------------------

SAMPLES = {
    "null": "log-probability of token .* is None",
    "nan": "log-probability of token .* is nan",
    "impossible": "log-probability of token .* is -9999",
    "few": "log-probabilities for",
    "foreign": "sampled the id 53, but the student's vocabulary has 48 entries",
    "no_choices": "no list of choices",
    "not_json": "not JSON",
    "aborted": "finish_reason 'abort'",
    "other_prompt": "another prompt of 4 ids than the 3",
    "no_ids": "no token_ids",
    "error": "status 500",
    "busy_now": "status 429",
}
SCORES = {
    "null": "log-probability of id .* is None",
    "nan": "log-probability of id .* is nan",
    "impossible": "probability 0",
    "few": r"entries of prompt_logprobs for",
    "fewer_candidates": "1 of 5 candidates at token",
    "missing_token": "log-probability of token .* is missing",
    "no_choices": "no list of choices",
    "not_json": "not JSON",
    "error": "status 500",
    "busy_now": "status 429",
}
LASTING = ("foreign", "other_prompt")
"""What another try does not change."""


@pytest.mark.parametrize(("fault", "word"), SAMPLES.items(), ids=SAMPLES)
def test_a_sample_that_is_no_use_is_drawn_again_as_it_was_and_named_where_it_never_comes(
    server, fault, word
):
    engine = engine_of(server)
    good = sample(engine, 2)
    if fault not in LASTING:
        server.faults[fault] = 2
        assert sample(engine, 2) == good
        assert server.faults[fault] == 0
    server.faults[fault] = FOREVER
    with pytest.raises(EngineError, match=rf"engine at {server.url}/v1/completions .*{word}"):
        sample(engine, 1)


@pytest.mark.parametrize(("fault", "word"), SCORES.items(), ids=SCORES)
def test_scores_that_are_no_use_are_asked_for_again_and_named_where_they_never_come(
    server, fault, word
):
    teacher = teacher_of(server)
    good = score(teacher)
    server.faults[fault] = 2
    assert score(teacher) == good
    assert server.faults[fault] == 0
    server.faults[fault] = FOREVER
    with pytest.raises(TeacherError, match=rf"teacher at {server.url}/v1/completions .*{word}"):
        score(teacher)


def test_ids_beyond_the_vocabulary_are_no_candidates(server):
    teacher = teacher_of(server)
    good = score(teacher)
    server.faults["foreign"] = FOREVER
    for ours, theirs in zip(score(teacher), good, strict=True):
        assert ours.logprobs == theirs.logprobs
        assert all(i < 48 for row in ours.candidate_ids for i in row)


# -- servers that are away -------------------------------------------------------------------


def test_a_server_that_is_down_is_waited_for_and_then_named():
    with ModelServer() as server:
        pass
    words = rf"/v1/models within 0.3 s, .*{server.url}/v1/models: .*ConnectError"
    with pytest.raises(EngineError, match=words):
        engine_of(server, deadline=0.3)
    with pytest.raises(TeacherError, match=words):
        teacher_of(server, deadline=0.3)


def test_a_server_that_starts_after_the_night_is_waited_for():
    with ModelServer() as server:
        pass
    later = threading.Timer(0.5, server.start)
    later.start()
    try:
        assert sample(engine_of(server))
    finally:
        later.join()
        server.stop()


def test_a_server_that_goes_down_for_good_ends_the_window_at_the_deadline():
    with ModelServer() as server:
        engine = engine_of(server, deadline=0.5)
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"within 0.5 s, but only 0 .*engine\.deadline"):
        sample(engine)
    assert time.monotonic() - begun < 3


def test_a_server_that_is_too_slow_is_named_with_the_limit_to_raise(server):
    engine, teacher = engine_of(server, timeout=0.2), teacher_of(server, timeout=0.2)
    server.slow = 1.0
    with pytest.raises(EngineError, match=r"no answer within 0.2 s .*raise engine\.timeout"):
        sample(engine)
    with pytest.raises(TeacherError, match=r"no answer within 0.2 s .*raise teacher\.timeout"):
        score(teacher)


def restart_at(server, number):
    """Restart when the request with this number, counted from now, arrives."""
    before, once = len(server.completions), threading.Lock()

    def watch(count):
        if count >= before + number and once.acquire(blocking=False):
            server.restart_soon()

    server.on_request = watch


def test_a_window_survives_a_restart_and_is_the_unbroken_one(server):
    engine = engine_of(server)
    unbroken = sample(engine)
    restart_at(server, 5)
    assert sample(engine) == unbroken
    assert server.starts == 2


def test_scoring_survives_a_restart(server):
    teacher = teacher_of(server)
    unbroken = score(teacher)
    restart_at(server, 5)
    assert score(teacher) == unbroken
    assert server.starts == 2


def test_a_restart_that_loses_the_adapter_gets_it_again(server, tmp_path):
    engine = engine_of(server)
    engine.load(adapter(tmp_path))
    unbroken = sample(engine)
    restart_at(server, 5)
    assert sample(engine) == unbroken
    assert server.starts == 2


def test_a_restart_between_two_windows_loses_nothing_either(server, tmp_path):
    engine = engine_of(server)
    engine.load(adapter(tmp_path))
    unbroken = sample(engine)
    server.stop()
    server.start()
    assert sample(engine) == unbroken


@pytest.mark.parametrize("when", ["within a window", "between two windows"])
def test_a_restart_that_silently_undoes_full_weights_is_noticed(server, tmp_path, when):
    engine = engine_of(server, sync="reload")
    engine.load(full(tmp_path))
    unbroken = sample(engine)
    if when == "within a window":
        restart_at(server, 5)
    else:
        server.stop()
        server.start()
    assert sample(engine) == unbroken
    assert server.starts == 2


def test_the_others_take_over_from_a_replica_that_dies():
    with ModelServer() as first, ModelServer() as second:
        engine = engine_of(first, second, concurrency=2)
        unbroken = sample(engine)
        before, once = len(first.completions), threading.Lock()

        def die(count):
            if count >= before + 2 and once.acquire(blocking=False):
                first.stop()

        first.on_request = die
        assert sample(engine) == unbroken
        first.start()


# -- servers that serve something else --------------------------------------------------------


def test_another_model_is_named(server):
    with pytest.raises(ConfigError, match=r"engine\.model is 'big', but .* serves 'tiny'"):
        engine_of(server, model="big")


def test_another_tokenizer_is_named_with_the_first_difference():
    with ModelServer(tokenizer=char_tokenizer(ALPHABET[:3] + ALPHABET[:2:-1])) as server:
        for make in (engine_of, teacher_of):
            with pytest.raises(ConfigError, match=r"another tokenizer: of .* here and .* there"):
                make(server)


def test_an_adapter_that_never_arrives_is_noticed_by_its_name(server, tmp_path):
    engine = engine_of(server)
    server.faults["silent"] = 1
    with pytest.raises(EngineError, match=r"took the adapter distill-v1-.*, but lists only tiny"):
        engine.load(adapter(tmp_path))
    assert engine.policy_version == 0


@pytest.mark.parametrize("sync", ["adapter", "reload"])
def test_a_server_that_says_yes_and_keeps_its_weights_is_noticed(server, tmp_path, sync):
    engine = engine_of(server, sync=sync)
    server.faults["deaf"] = 1
    make = adapter if sync == "adapter" else full
    ref = make(tmp_path)
    with pytest.raises(EngineError, match=rf"engine at {server.url} does not have the weights"):
        engine.load(ref)
    assert engine.policy_version == 0


@pytest.mark.parametrize(
    ("sync", "word"),
    [
        ("adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ("reload", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_takes_no_weights_is_told_how_to_be_started(tmp_path, sync, word):
    with ModelServer(may_load=False) as server:
        engine = engine_of(server, sync=sync)
        ref = (
            adapter(tmp_path) if sync == "adapter" else published(make_policy(), tmp_path / "f", 1)
        )
        with pytest.raises(EngineError, match=word):
            engine.load(ref)


def test_a_cache_that_cannot_be_emptied_is_asked_again_and_named(server, tmp_path):
    engine = engine_of(server, sync="reload")
    ref = full(tmp_path)
    server.faults["busy"] = 1
    engine.load(ref)
    server.faults["busy"] = FOREVER
    with pytest.raises(EngineError, match="prefix cache could not be reset"):
        engine.load(ref)


def test_a_wrong_key_is_named_without_a_part_of_it(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sk-wrong")
    with (
        ModelServer(key="sk-right") as server,
        pytest.raises(TeacherError, match="check the key in the variable") as failed,
    ):
        teacher_of(server, api_key_env="SERVER_KEY")
    assert "sk-" not in str(failed.value)
    monkeypatch.setenv("SERVER_KEY", "sk-right")
    with ModelServer(key="sk-right") as server:
        assert score(teacher_of(server, api_key_env="SERVER_KEY"))
