"""Adapters inside vllm: that they arrive, that the right one answers, and that they go away."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from distill.engines.publishing import read_probe
from distill.engines.vllm import VLLMEngine
from distill.engines.vllm_options import VLLMOptions
from distill.errors import ConfigError, EngineError
from distill.models import ADAPTER_WEIGHTS
from distill.types import Sampling
from real.vllm_parts import LONG, MAX_RANK, Deaf, Holder, Sticky, expected, make_adapter, make_full

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm-env"
    ),
]

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14)]
ASKED = Sampling(num_samples=3, max_new_tokens=8, keys=("a", "b", "c"))


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    holder = Holder(tmp_path_factory.mktemp("vllm"))
    yield holder
    holder.close()


@pytest.fixture(scope="module")
def bare(holder):
    """The engine before any adapter was loaded."""
    engine = holder.engine("adapters")
    with pytest.raises(EngineError, match="would sample from the bare base"):
        engine.generate(PROMPTS, ASKED)
    return engine


@pytest.fixture(scope="module")
def first(holder):
    return holder.publish(make_adapter(1), "first", 1)


@pytest.fixture
def engine(bare, first):
    """An engine that serves version 1, and serves it again after a test."""
    if bare.policy_version != 1:
        bare.load(first)
    llm = bare.llm
    yield bare
    bare.llm = llm


def listed(engine):
    return engine.llm.llm_engine.list_loras()


def test_an_adapter_arrives_with_the_trainers_log_probabilities(engine):
    policy = make_adapter(1)
    assert engine.sync_gap < 1e-5
    for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, ASKED), strict=True):
        for c in group:
            by_hand = expected(policy, prompt, c.token_ids, Sampling())
            assert c.logprobs == pytest.approx(by_hand, abs=2e-5)
            with policy.model.disable_adapter():
                bare = expected(policy, prompt, c.token_ids, Sampling())
            assert c.logprobs != pytest.approx(bare, abs=1e-3)


def test_the_next_version_takes_the_place_of_the_one_before(engine, holder):
    prompts, asked = [*PROMPTS, LONG], replace(ASKED, keys=(*ASKED.keys, "d"))
    before, old = engine.generate(prompts, asked), listed(engine)
    engine.load(holder.publish(make_adapter(2), "second", 2))
    assert engine.policy_version == 2
    assert len(listed(engine)) == 1
    assert listed(engine) != old
    after = engine.generate(prompts, asked)
    assert after != before
    for c in after[3]:
        by_hand = expected(make_adapter(2), LONG, c.token_ids, Sampling())
        assert c.logprobs == pytest.approx(by_hand, abs=2e-5)


def test_many_versions_leave_one_adapter_behind(engine, holder):
    for version in range(3, 9):
        engine.load(holder.publish(make_adapter(version), "again", version))
        assert engine.policy_version == version
        assert engine.sync_gap < 1e-5
        assert len(listed(engine)) == 1


def test_an_adapter_that_vllm_no_longer_lists_is_not_sampled_from(engine, first):
    (number,) = listed(engine)
    engine.llm.llm_engine.remove_lora(number)
    with pytest.raises(EngineError, match=r"does not list the adapter 'policy-1-\d+'"):
        engine.generate(PROMPTS, ASKED)
    engine.load(first)
    engine.generate(PROMPTS, ASKED)


def test_a_version_that_was_not_loaded_is_not_sampled_from(engine):
    engine.policy_version = 2
    with pytest.raises(EngineError, match=r"version 1, and samples were asked of version 2"):
        engine.generate(PROMPTS, ASKED)
    engine.policy_version = 1


def test_an_adapter_that_vllm_takes_and_does_not_use_is_caught_by_the_probe(engine, holder):
    ref = holder.publish(make_adapter(9), "unused", 9)
    engine.llm = Deaf(engine.llm)
    with pytest.raises(EngineError, match="does not have the weights that were sent"):
        engine.load(ref)
    assert engine.policy_version == 1


def foreign(holder, name, **sizes):
    return holder.publish(make_adapter(5, **sizes), name, 5)


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(engine, holder):
    before = engine.generate(PROMPTS, ASKED)
    cut = foreign(holder, "cut")
    path = cut.path / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:-500])
    swapped = foreign(holder, "swapped")
    (foreign(holder, "other").path / "adapter_config.json").unlink()
    other = holder.publish(make_adapter(6), "wrong", 5)
    (other.path / ADAPTER_WEIGHTS).replace(swapped.path / ADAPTER_WEIGHTS)
    bare = foreign(holder, "bare")
    (bare.path / "probe.json").unlink()
    for ref, word in (
        (cut, "damaged or was cut off"),
        (foreign(holder, "deep", num_layers=3), r"layers\.2.* made for another base"),
        (foreign(holder, "narrow", num_heads=4), "was made for another base: .* wide"),
        (foreign(holder, "high", rank=16), "has rank 16, the engine was started for at most 8"),
        (swapped, "does not have the weights that were sent"),
        (replace(bare, path=holder.home / "other"), "is no adapter"),
        (bare, r"no probe\.json"),
        (holder.start, "started for adapters up to rank 8"),
        (replace(bare, base="another"), "belong to the base 'another'"),
    ):
        with pytest.raises(EngineError, match=word):
            engine.load(ref)
        assert engine.policy_version == 1
        assert len(listed(engine)) == 1
        assert engine.generate(PROMPTS, ASKED) == before


def test_the_canary_moves_the_output_and_leaves_nothing_behind(engine, first, holder):
    before = engine.generate(PROMPTS, ASKED)
    assert engine.canary(first.path) > 0.3
    untrained = holder.publish(make_adapter(3, scale=0.0), "untrained", 3)
    assert engine.canary(untrained.path) > 0.3
    assert len(listed(engine)) == 1
    assert engine.generate(PROMPTS, ASKED) == before


def test_the_canary_finds_an_engine_that_ignores_adapters(engine, first):
    engine.llm = Deaf(engine.llm)
    with pytest.raises(EngineError, match="adapters do not reach the model"):
        engine.canary(first.path)


def test_the_canary_finds_an_engine_that_keeps_something_of_an_adapter(engine, first, holder):
    from vllm.lora.request import LoRARequest

    stuck = holder.publish(make_adapter(4), "stuck", 4)
    engine.llm = Sticky(engine.llm, LoRARequest("stuck", 900, str(stuck.path)))
    with pytest.raises(EngineError, match="did not come back"):
        engine.canary(first.path)
    engine.llm.llm_engine.remove_lora(900)


def test_an_engine_started_awake_refuses_to_sleep_and_one_for_sleeping_wants_a_gpu(engine):
    with pytest.raises(EngineError, match=r"engine\.sleep = true"):
        engine.sleep()
    engine.wake()
    engine.generate(PROMPTS, ASKED)
    with pytest.raises(ConfigError, match=r"engine\.sleep = true frees the memory of a GPU"):
        VLLMOptions(sleep=True).require_device("cpu")


def test_a_second_engine_beside_the_first_is_refused_and_the_first_goes_on(engine, holder):
    with pytest.raises(EngineError, match="close the other engine first"):
        VLLMEngine(holder.start.path, VLLMOptions(max_length=32), max_rank=MAX_RANK)
    engine.generate(PROMPTS, ASKED)


def test_a_closed_engine_says_so_and_another_can_follow(holder, bare):
    bare.close()
    bare.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        bare.generate(PROMPTS, ASKED)
    full = holder.engine("full")
    full.load(holder.start)
    (score,) = full.logprobs_of([(5, 6, 7)])
    assert score == pytest.approx(expected(make_full(), (5,), (6, 7), Sampling()), abs=2e-5)
    assert read_probe(holder.start.path) is not None


def test_a_model_that_vllm_cannot_serve_is_named_with_what_to_change(holder, tmp_path):
    holder.close()
    with pytest.raises(EngineError, match=r"vllm could not start on .*; lower engine\.max_length"):
        VLLMEngine(holder.start.path, VLLMOptions(max_length=100_000))
    with pytest.raises(EngineError, match="holds no model"):
        VLLMEngine(tmp_path, VLLMOptions())
