"""The engine behind HTTP keeps every promise of an engine, over a real server on the loopback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.engines.hf import HFEngine
from distill.engines.publishing import publish
from distill.engines.server import ServerEngine, ServerOptions, seed_of
from distill.errors import ConfigError, EngineError
from distill.models import new_adapter
from distill.policy import AdapterSpec, Policy
from distill.types import CheckpointRef, Sampling, StopReason
from helpers import make_chat, make_model, make_policy
from openai_server import NAME, ModelServer

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14)]
KEYS = ("a", "b", "c")
STOPS = (1, 20, 21)
FAST = {"timeout": 5.0, "deadline": 20.0, "retries": 2, "backoff": 0.02}


@pytest.fixture
def server():
    with ModelServer() as running:
        yield running


def engine_of(*servers, **changes):
    options = ServerOptions(urls=tuple(s.url for s in servers), model=NAME, **(FAST | changes))
    return ServerEngine(options, vocab_size=48, tokenizer=make_chat().tokenizer)


def sampling(**changes):
    values = {"num_samples": 3, "max_new_tokens": 6, "stop_token_ids": STOPS, "keys": KEYS}
    return Sampling(**(values | changes))


def adapter_policy(seed=3):
    policy = Policy(
        new_adapter(make_model(), AdapterSpec(rank=4, alpha=8), seed=seed),
        base="tiny",
        kind="adapter",
    )
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return policy


def published(policy, folder, version=1):
    tokenizer = make_chat().tokenizer
    return publish(policy, tokenizer, folder, step=version, policy_version=version)


def scores_of(policy, prompt, completion):
    """The trainer's log-probabilities of a completion."""
    from distill.types import TeacherView

    ids = (*prompt, *completion.token_ids)
    places = tuple(range(len(prompt), len(ids)))
    (found,) = policy.score([TeacherView(token_ids=ids, positions=places, kind="x", id="x")])
    return found.logprobs


def assert_agrees(engine, policy):
    for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, sampling()), strict=True):
        for completion in group:
            expected = scores_of(policy, prompt, completion)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


# -- what every engine promises --------------------------------------------------------------


def test_every_prompt_gets_its_completions_in_order_in_one_call(server):
    engine = engine_of(server)
    groups = engine.generate(PROMPTS, sampling())
    assert [len(g) for g in groups] == [3, 3, 3]
    assert len(server.completions) == 3, "one request per prompt, whatever the number of samples"
    assert server.most_at_once > 1, "all prompts of a window are under way together"
    assert engine.generate([], sampling(keys=())) == []


def test_the_log_probabilities_are_those_of_the_trainer(server):
    assert_agrees(engine_of(server), make_policy())


def test_a_completion_ends_at_its_first_stop_token_and_says_why(server):
    reasons = set()
    for group in engine_of(server).generate(PROMPTS, sampling(max_new_tokens=12)):
        for completion in group:
            *body, last = completion.token_ids
            assert not set(body) & set(STOPS)
            assert completion.stop == (StopReason.STOP if last in STOPS else StopReason.LENGTH)
            assert last in STOPS or len(completion.token_ids) == 12
            reasons.add(completion.stop)
    assert len(reasons) == 2


def test_the_stop_set_of_the_server_itself_does_not_apply(server):
    groups = engine_of(server).generate(PROMPTS, sampling(stop_token_ids=(), max_new_tokens=20))
    ids = [i for group in groups for c in group for i in c.token_ids[:-1]]
    assert 1 in ids, "the tokenizer's eos is an ordinary token where the student says so"


def test_equal_keys_give_equal_completions_whatever_stands_beside_them(server):
    engine = engine_of(server)
    alone = engine.generate(PROMPTS[1:2], sampling(keys=("b",), num_samples=1))
    together = engine.generate(PROMPTS, sampling())
    assert alone[0][0].token_ids == together[1][0].token_ids
    other = engine.generate(PROMPTS, sampling(keys=("x", "y", "z")))
    assert other != together
    assert len({c.token_ids for g in together for c in g}) > 3


def test_seeds_fit_into_what_servers_take():
    seeds = [seed_of(f"key {i}") for i in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_greedy_decoding_needs_no_keys_and_is_that_of_the_reference_engine(server):
    settings = sampling(temperature=0.0, keys=(), num_samples=2)
    ours = engine_of(server).generate(PROMPTS, settings)
    theirs = HFEngine(make_policy()).generate(PROMPTS, settings)
    assert [[c.token_ids for c in g] for g in ours] == [[c.token_ids for c in g] for g in theirs]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"keys": ("a",)}, "one key per prompt"),
        ({"temperature": 0.7}, "--logprobs-mode processed_logprobs"),
        ({"top_p": 0.9}, "--logprobs-mode processed_logprobs"),
        ({"max_new_tokens": 80}, "--max-model-len 85"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(server, changes, word):
    with pytest.raises(ConfigError, match=word):
        engine_of(server).generate(PROMPTS, sampling(**changes))


# -- choices ------------------------------------------------------------------------------------

CHOICES = (((5, 1), (6, 7, 1), (30, 1)), (), ((9, 1), (8, 1)))


def test_replies_are_chosen_as_the_reference_engine_chooses(server):
    settings = sampling(choices=CHOICES, num_samples=8)
    ours = engine_of(server).generate(PROMPTS, settings)
    theirs = HFEngine(make_policy()).generate(PROMPTS, settings)
    for i in (0, 2):
        assert [c.token_ids for c in ours[i]] == [c.token_ids for c in theirs[i]]
        for a, b in zip(ours[i], theirs[i], strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert len(ours[1]) == 8, "a prompt without choices is free beside them"
    best = engine_of(server).generate(PROMPTS, sampling(choices=CHOICES, temperature=0.0, keys=()))
    assert len(set(best[0])) == 1


def test_choices_at_another_temperature_are_refused():
    with ModelServer(logprobs_mode="processed_logprobs") as server:
        engine = engine_of(server, logprobs_mode="processed_logprobs")
        with pytest.raises(ConfigError, match="scores replies at temperature 1"):
            engine.generate(PROMPTS, sampling(choices=CHOICES, temperature=0.5))


# -- the mode of the log-probabilities --------------------------------------------------------


def test_a_temperature_is_recorded_where_the_server_is_started_for_it():
    with ModelServer(logprobs_mode="processed_logprobs") as server:
        engine = engine_of(server, logprobs_mode="processed_logprobs")
        cold = make_policy(temperature=0.5)
        groups = engine.generate(PROMPTS, sampling(temperature=0.5))
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                expected = scores_of(cold, prompt, completion)
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_server_that_was_started_otherwise_is_found_out(server):
    engine = engine_of(server, logprobs_mode="processed_logprobs")
    with pytest.raises(ConfigError, match="start it with --logprobs-mode processed_logprobs"):
        engine.generate(PROMPTS, sampling(temperature=0.5))


# -- weights ------------------------------------------------------------------------------------


def test_an_adapter_arrives_under_a_name_with_its_version(server, tmp_path):
    engine, policy = engine_of(server), adapter_policy()
    engine.load(published(policy, tmp_path / "1"))
    assert engine.policy_version == 1
    assert engine.model.startswith("distill-v1-")
    assert engine.gap < 1e-4
    assert_agrees(engine, policy)
    engine.load(published(adapter_policy(5), tmp_path / "2", version=2))
    assert engine.policy_version == 2
    assert_agrees(engine, adapter_policy(5))
    assert [n for n in server._policies if n != NAME] == [engine.model], "the old one is gone"
    engine.close()
    assert list(server._policies) == [NAME]


def test_the_same_weights_are_not_sent_twice(server, tmp_path):
    engine = engine_of(server)
    ref = published(adapter_policy(), tmp_path / "1")
    engine.load(ref)
    engine.load(ref)
    assert [path for path, _ in server.asked].count("/v1/load_lora_adapter") == 1


def test_full_weights_are_read_again_and_the_cache_is_emptied(server, tmp_path):
    engine, policy = engine_of(server, sync="reload"), make_policy(seed=7)
    engine.load(published(policy, tmp_path / "1", version=4))
    paths = [path for path, _ in server.asked]
    assert paths.index("/reset_prefix_cache") > paths.index("/collective_rpc")
    assert engine.policy_version == 4
    assert_agrees(engine, policy)


def test_weights_that_arrive_by_themselves_are_compared_all_the_same(server, tmp_path):
    engine = engine_of(server, sync="none")
    engine.load(published(make_policy(), tmp_path / "1", version=2))
    assert engine.policy_version == 2
    with pytest.raises(EngineError, match="does not have the weights"):
        engine.load(published(make_policy(seed=7), tmp_path / "2", version=3))
    assert engine.policy_version == 2, "the version moves only with the weights"


def test_every_replica_gets_the_weights(tmp_path):
    with ModelServer() as first, ModelServer() as second:
        engine, policy = engine_of(first, second), adapter_policy()
        engine.load(published(policy, tmp_path / "1"))
        prompts = PROMPTS * 6
        keys = tuple(map(str, range(len(prompts))))
        groups = engine.generate(prompts, sampling(keys=keys))
        assert min(len(first.completions), len(second.completions)) > 6
        for prompt, group in zip(prompts, groups, strict=True):
            expected = scores_of(policy, prompt, group[0])
            assert group[0].logprobs == pytest.approx(expected, abs=1e-4)


def test_a_folder_is_named_as_the_server_sees_it(server, tmp_path):
    (tmp_path / "there").symlink_to(tmp_path / "here")
    (tmp_path / "here").mkdir()
    engine = engine_of(server, path_here=str(tmp_path / "here"), path_there=str(tmp_path / "there"))
    engine.load(published(adapter_policy(), tmp_path / "here" / "1"))
    (body,) = [b for p, b in server.asked if p == "/v1/load_lora_adapter"]
    assert body["lora_path"] == str(tmp_path / "there" / "1")
    with pytest.raises(ConfigError, match=r"does not lie in engine\.path_here"):
        engine.load(published(adapter_policy(), tmp_path / "elsewhere"))


def test_weights_that_cannot_be_delivered_are_refused(server, tmp_path):
    engine = engine_of(server)
    with pytest.raises(ConfigError, match=r'engine\.sync = "reload"'):
        engine.load(published(make_policy(), tmp_path / "full"))
    ref = CheckpointRef(
        path=Path("live"), step=7, policy_version=7, base="b", kind="adapter", digest="live"
    )
    with pytest.raises(EngineError, match="holds no probe"):
        engine.load(ref)
    assert engine.policy_version == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"urls": ()}, r"engine\.urls"),
        ({"model": ""}, r"engine\.model"),
        ({"path_here": "/x"}, "go together"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"timeout": 0.0}, r"engine\.timeout must be positive"),
        ({"api_key_env": "sk-1"}, r"engine\.api_key_env"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, word):
    options = ServerOptions(urls=("http://127.0.0.1:8000",), model="m")
    with pytest.raises(ConfigError, match=word):
        replace(options, **changes)


def test_the_address_of_v1_is_as_good_as_that_of_the_server(server):
    options = ServerOptions(urls=(f"{server.url}/v1",), model=NAME)
    assert ServerEngine(options, vocab_size=48).urls == (server.url,)
