"""What is known of the engine vllm without starting it; most of this runs where it is absent."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from distill.engines import vllm_options
from distill.engines.publishing import publish
from distill.engines.vllm import VLLMEngine, read_probe
from distill.engines.vllm_options import VLLMOptions, prepare_environment, slot_rank
from distill.engines.vllm_requests import seed_of
from distill.engines.vllm_weights import check_adapter, check_full, full_tensors, weight_shapes
from distill.errors import ConfigError, EngineError, MissingExtra
from distill.models import char_tokenizer
from flows.bench_engines import DIRECT, OURS, REFERENCE, RolloutWork, bench_engines, bench_lines
from helpers import ALPHABET
from real.vllm_parts import make_adapter, make_full

HAS_VLLM = importlib.util.find_spec("vllm") is not None
SMALL = RolloutWork(num_prompts=2, num_samples=2, prompt_length=4, new_tokens=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_gib", -1.0),
        ("max_length", -1),
        ("max_batch", 0),
        ("tensor_parallel", 0),
        ("tolerance", -0.1),
        ("tolerance", float("nan")),
        ("dtype", "int8"),
    ],
)
def test_a_wrong_option_is_named_by_its_key(key, value):
    with pytest.raises(ConfigError, match=rf"^engine\.{key} "):
        VLLMOptions(**{key: value})


def test_what_needs_a_gpu_is_refused_without_one():
    for options in (VLLMOptions(sleep=True), VLLMOptions(tensor_parallel=2)):
        options.require_device("cuda")
        with pytest.raises(ConfigError, match=r"^engine\."):
            options.require_device("cpu")
    VLLMOptions().require_device("cpu")


def test_the_allowed_gap_follows_the_dtype_unless_it_is_given():
    on_cpu, on_gpu = (VLLMOptions().on(kind) for kind in ("cpu", "cuda"))
    assert (on_cpu.dtype, on_cpu.tolerance) == ("float32", 1e-3)
    assert on_gpu.dtype == "bfloat16"
    assert on_gpu.tolerance > on_cpu.tolerance
    assert VLLMOptions(dtype="bfloat16", tolerance=0.2).on("cpu").tolerance == 0.2


def test_an_adapter_gets_the_smallest_slot_that_holds_it():
    assert [slot_rank(rank) for rank in (1, 2, 8, 9, 33, 512)] == [1, 8, 8, 16, 64, 512]
    with pytest.raises(ConfigError, match=r"model\.rank is 513"):
        slot_rank(513)


def test_the_environment_is_set_where_the_user_has_not_set_it(monkeypatch):
    for name in vllm_options.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment()
    assert os.environ["VLLM_NO_USAGE_STATS"] == os.environ["DO_NOT_TRACK"] == "1"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_importing_the_engine_does_not_import_vllm():
    code = "import sys, distill.engines.vllm, flows.bench_engines; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_seeds_of_keys_fit_vllm_and_differ():
    seeds = {seed_of(f"k{i}") for i in range(1000)}
    assert len(seeds) == 1000
    assert 0 <= min(seeds) <= max(seeds) < 2**56


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_a_missing_package_is_named_with_the_two_ways_to_get_it(tmp_path):
    publish(make_full(), char_tokenizer(ALPHABET), tmp_path / "m", step=0, policy_version=0)
    with pytest.raises(MissingExtra, match=r"make vllm-env .*distill-nightly\[vllm]"):
        VLLMEngine(tmp_path / "m", VLLMOptions())


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_the_bench_measures_what_is_there_and_says_what_is_not():
    found = bench_engines(SMALL)
    assert [speed.engine for speed in found.speeds] == [REFERENCE]
    assert found.share is None
    assert "only the engine hf was measured" in bench_lines(found)[-1]


@pytest.mark.real
@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed: make vllm-env")
def test_the_bench_compares_our_engine_with_direct_calls():
    found = bench_engines(SMALL)
    assert {speed.engine for speed in found.speeds} == {REFERENCE, OURS, DIRECT}
    assert all(len(speed.seconds) == 3 for speed in found.speeds)
    assert found.share is not None
    assert "of direct calls" in bench_lines(found)[-1]


def test_a_bench_of_fewer_than_three_rounds_or_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 3 rounds"):
        replace(SMALL, rounds=2)
    with pytest.raises(ConfigError, match="new_tokens must be at least 1"):
        replace(SMALL, new_tokens=0)


def test_weights_are_compared_with_the_base_by_name_and_shape(tmp_path):
    tokenizer = char_tokenizer(ALPHABET)
    for name, policy in (
        ("base", make_full()),
        ("untied", make_full(tie_embeddings=False)),
        ("wider", make_full(max_positions=64, num_heads=4)),
        ("fits", make_adapter()),
        ("deep", make_adapter(num_layers=3)),
        ("other", make_adapter(num_heads=4)),
    ):
        publish(policy, tokenizer, tmp_path / name, step=0, policy_version=0)
    base = weight_shapes(tmp_path / "base")
    check_full(tmp_path / "untied", base)
    check_adapter(tmp_path / "fits", base, max_rank=8)
    with pytest.raises(EngineError, match="belong to another model"):
        check_full(tmp_path / "wider", base)
    for name in ("deep", "other"):
        with pytest.raises(EngineError, match="made for another base"):
            check_adapter(tmp_path / name, base, max_rank=8)
    nested = {f"language_model.{name}": shape for name, shape in base.items()}
    check_adapter(tmp_path / "fits", nested, max_rank=8)
    with pytest.raises(EngineError, match="at most 3"):
        check_adapter(tmp_path / "fits", base, max_rank=3)
    assert dict(full_tensors(tmp_path / "base")).keys() == base.keys()
    assert read_probe(tmp_path / "fits") is not None
