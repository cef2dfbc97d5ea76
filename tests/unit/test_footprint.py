"""Bytes and seconds of a stage, from configuration files alone, against what is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.autograd.graph import saved_tensors_hooks

from distill import logprobs
from distill.body import backbone
from distill.config import Config
from distill.devices import DEVICES, GIB, Device, find_device, measure_cpu
from distill.errors import ConfigError
from distill.footprint import HEAD_CHUNK, floor, footprint
from distill.models import new_adapter
from distill.policy import AdapterSpec
from distill.sections import ModelBuild
from distill.workload import Shape, Workload, built_shape, read_shape, shape_of, workload_of
from helpers import ALPHABET, make_model

ROOT = Path(__file__).resolve().parents[2]
H200 = find_device("NVIDIA H200")


def qwen3(hidden, layers, heads, inner, *, tied=True):
    """The shapes of the Qwen3 family: eight KV heads of 128, 151936 tokens."""
    return shape_of(
        {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": inner,
            "vocab_size": 151936,
            "tie_word_embeddings": tied,
        }
    )


Q06, Q17, Q4 = qwen3(1024, 28, 16, 3072), qwen3(2048, 28, 16, 6144), qwen3(2560, 36, 32, 9728)
Q8, Q32 = qwen3(4096, 36, 32, 12288, tied=False), qwen3(5120, 64, 64, 25600, tied=False)


def work(student, teacher=None, reply=1024, **changes):
    values = {
        "student": student,
        "teacher": teacher,
        "rollouts": 128,
        "prompt": 256,
        "reply": reply,
        "micro_tokens": 16384,
        "recompute": True,
    }
    return Workload(**(values | changes))


@pytest.mark.parametrize(
    ("shape", "billions"), [(Q06, 0.596), (Q17, 1.72), (Q4, 4.02), (Q8, 8.19), (Q32, 32.76)]
)
def test_known_models_have_their_known_number_of_weights(shape, billions):
    assert shape.num_weights == pytest.approx(billions * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ("step", "billions", "replies", "teacher", "training", "total"),
    [
        (work(Q06, Q4), 4.0, 2.7, 1.3, 0.8, 4.8),
        (work(Q17, Q8), 8.0, 3.1, 2.7, 2.3, 8.0),
        (work(Q17, Q17, rank=32, teacher_at="own"), 1.7, 3.1, 0.6, 1.7, 5.4),
        (work(Q17, Q8, 8192), 8.0, 115, 17.5, 14.9, 147),
        (work(Q4, Q32, 4096), 32.0, 44, 36, 18, 98),
    ],
    ids=["0.6B-4B", "1.7B-8B", "1.7B-self", "1.7B-8B-long", "4B-32B"],
)
def test_the_least_times_are_those_of_the_worked_table(
    step, billions, replies, teacher, training, total
):
    """One H200, from published notes. They count the teacher in round billions, of which 0.6 of
    the eight are an embedding that is in no product."""
    found = floor(step, H200)
    assert found.replies == pytest.approx(replies, rel=0.01, abs=0.05)
    assert found.training == pytest.approx(training, rel=0.015, abs=0.05)
    round_size = found.teacher * billions * 1e9 / step.teacher.matmul_weights
    assert round_size == pytest.approx(teacher, rel=0.005, abs=0.051)
    assert found.teacher == pytest.approx(teacher, rel=0.08)
    assert found.total == pytest.approx(total, rel=0.025)
    assert found.sync == 0.0


def test_times_at_a_share_of_the_peak_are_those_of_the_worked_table():
    found = floor(work(Q06, Q4), H200).at(0.4)
    assert (found.teacher, found.training) == pytest.approx((3.3, 2.0), abs=0.06)
    assert found.replies == floor(work(Q06, Q4), H200).replies


def test_the_least_time_follows_what_a_step_does():
    base = floor(work(Q06, Q4, recompute=False), H200)
    assert floor(work(Q06, Q4), H200).training == pytest.approx(base.training * 8 / 6)
    assert floor(work(Q06, Q4, recompute=False, rank=8), H200).training == pytest.approx(
        base.training * 4 / 6
    )
    assert floor(work(Q06, Q4, recompute=False, epochs=3), H200).training == (
        pytest.approx(3 * base.training)
    )
    waves = floor(work(Q06, Q4, concurrent=32), H200).replies - base.replies
    assert waves == pytest.approx(3 * 1024 * Q06.matmul_weights * 2 / 4.8e12)
    away = work(Q06, Q4, engine="served", teacher_at="served", candidates=64)
    assert floor(away, H200).sync == pytest.approx(2 * Q06.num_weights / H200.link)
    assert floor(away, H200).teacher == pytest.approx(128 * 1024 * 388 / H200.link)
    adapter = replace(away, rank=32)
    assert floor(adapter, H200).sync == pytest.approx(2 * Q06.adapter_weights(32) / H200.link)
    none = replace(away, engine="none", teacher=None)
    assert (floor(none, H200).replies, floor(none, H200).teacher) == (0.0, 0.0)
    # Many short replies to few prompts are bound by arithmetic, not by memory.
    busy = work(Q06, rollouts=4096, prompt=2048, reply=8)
    bound = 2 * Q06.matmul_weights * 4096 * (2048 + 8) / 989e12
    assert floor(busy, H200).replies == pytest.approx(bound)
    assert floor(replace(busy, samples=8), H200).replies < bound


def size(found, name):
    return sum(item.size for item in found.items if item.name == name)


def test_full_weights_in_half_precision_take_the_known_bytes_per_weight():
    n = Q4.num_weights
    found = footprint(work(Q4))
    assert size(found, "student weights") == 2 * n
    assert size(found, "optimizer") == 12 * n  # two moments and the float32 copy
    assert size(found, "gradients") == 6 * n
    moved = footprint(work(Q4, offload=True))
    assert size(moved, "optimizer") == 0
    assert (moved.host, found.host) == (16 * n, 0)
    single = footprint(work(Q4, width=4))
    assert (size(single, "optimizer"), size(single, "gradients")) == (8 * n, 4 * n)


def test_an_adapter_takes_two_bytes_per_frozen_and_sixteen_per_trained_weight():
    found, trained = footprint(work(Q4, rank=16)), Q4.adapter_weights(16)
    state = sum(size(found, name) for name in ("student weights", "optimizer", "gradients"))
    assert state == 2 * Q4.num_weights + 16 * trained
    assert size(found, "logits") < size(footprint(work(Q4)), "logits")  # no gradient of the head


def test_teachers_engines_and_copies_are_counted_where_they_are():
    local = footprint(work(Q06, Q4))
    assert size(local, "teacher weights") == 2 * Q4.num_weights
    kept = 128 * 1024 * 2560 * 2
    assert [i.size for i in local.items if i.name == "hidden states of the teacher"] == [kept] * 2
    own = footprint(work(Q06, Q06, teacher_at="own", exact=False))
    assert size(own, "teacher weights") == size(own, "hidden states of the teacher") == 0
    assert not any("teacher" in i.name for i in footprint(work(Q06, Q4, teacher_at="served")).items)
    copied = footprint(work(Q06, engine="copy", concurrent=16, copies=2))
    assert size(copied, "engine weights") == 2 * Q06.num_weights
    assert size(copied, "copies of the student") == 4 * Q06.num_weights
    assert size(copied, "key-value cache") == 16 * 1280 * 2 * 28 * 8 * 128 * 2
    assert size(footprint(work(Q06, engine="served")), "key-value cache") == 0


def test_the_largest_micro_batch_holds_at_least_a_row_and_at_most_a_step():
    assert work(Q06, micro_tokens=1).at_most == 1280
    assert work(Q06, micro_tokens=10**9).at_most == 128 * 1280
    found = [footprint(work(Q06, micro_tokens=n)) for n in (128 * 1280, 10**9)]
    assert found[0].items == found[1].items


def test_activations_with_layers_computed_again_are_about_two_bytes_per_layer_and_value():
    again = size(footprint(work(Q4)), "activations")
    entering = 2 * 36 * 2560 * 16384
    assert entering < again < 2.5 * entering
    assert size(footprint(work(Q4, recompute=False)), "activations") > 10 * again
    assert size(footprint(work(Q4, eager=True)), "activations") > again


@pytest.mark.parametrize(
    ("step", "name", "advice"),
    [
        (work(Q17, recompute=False), "activations", "trainer.gradient_checkpointing = true"),
        (work(Q8, micro_tokens=2048), "optimizer", 'trainer.offload = "optimizer"'),
        (work(Q06, Q32, micro_tokens=2048), "teacher weights", "serve the teacher"),
        (work(Q4, reply=8192, rank=16), "key-value cache", "sampling.max_new_tokens"),
        (work(Q32, rank=16), "student weights", "smaller model"),
        (work(Q8, micro_tokens=2048, offload=True, concurrent=8), "student weights", "smaller"),
    ],
)
def test_what_does_not_fit_is_told_with_its_biggest_part_and_what_to_lower(step, name, advice):
    verdict = footprint(step).fits(24 * GIB)
    assert not verdict.fits
    assert verdict.biggest.name == name
    assert advice in verdict.text
    assert f"{verdict.need / GIB:.1f} GiB" in verdict.text
    assert footprint(step).fits(10_000 * GIB).fits


def test_what_fits_is_told_without_advice():
    verdict = footprint(work(Q06, Q4, rank=16, micro_tokens=2048, concurrent=32)).fits(H200.memory)
    assert verdict.fits
    assert "trainer." not in verdict.text
    assert verdict.need < verdict.usable < H200.memory


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_built_model_are_counted(tied, tmp_path):
    build = ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64, tie_embeddings=tied)
    model = make_model(tie_embeddings=tied)
    shape = built_shape(build, len(ALPHABET))
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert shape.num_weights == sum(p.numel() for p in model.parameters()) - vectors
    model.config.save_pretrained(str(tmp_path))
    assert read_shape(tmp_path) == shape
    adapter = new_adapter(model, AdapterSpec(rank=4), seed=0)
    trained = sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    assert shape.adapter_weights(4) == trained


@pytest.mark.parametrize(("rank", "half"), [(None, False), (None, True), (4, False), (4, True)])
def test_a_layer_keeps_about_the_bytes_that_are_measured(rank, half):
    import torch

    sizes, ids = {}, torch.randint(3, 40, (2, 100))
    for layers in (1, 3):
        model = make_model(num_layers=layers)
        model = model.to(torch.bfloat16) if half else model
        if rank:
            model = new_adapter(model, AdapterSpec(rank=rank), seed=0)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen = {}

        def note(tensor, weights=weights, seen=seen):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            out = backbone(model)(input_ids=ids, use_cache=False)
            sizes[layers] = sum(seen.values())
            del out
    measured = (sizes[3] - sizes[1]) / 2 / ids.numel()
    shape = built_shape(
        ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64), len(ALPHABET)
    )
    estimate = shape.layer_bytes(2 if half else 4, adapter=rank is not None)
    assert 1 / 1.5 < estimate / measured < 1.5


_RUN = """
import json, sys
import torch
sys.path.insert(0, "tests")
from helpers import INFO, ALPHABET, make_rollout
from distill.batch import collate
from distill.models import build_model, char_tokenizer
from distill.objectives import SFT
from distill.policy import Policy
from distill.sections import ModelBuild
from distill.trainer import Trainer, TrainerOptions
torch.set_num_threads(1)
build = ModelBuild(**json.loads(sys.argv[1]))
small = ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64)

def train(build, length):
    policy = Policy(build_model(build, char_tokenizer(ALPHABET), seed=0), base="b")
    rows = [make_rollout([5], [6] * length, name=f"t{i}", policy_version=-1) for i in range(4)]
    options = TrainerOptions(num_steps=1, lr=1e-3, micro_batch_tokens=4 * (length + 1))
    trainer = Trainer(policy, options)
    trainer.update(collate(rows[:1]), SFT(), INFO)  # makes the optimizer's state
    trainer.update(collate(rows), SFT(), INFO)

def peak():
    # What getrusage tells includes the process that started this one.
    lines = open("/proc/self/status", encoding="ascii").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

train(small, 4)
before = peak()
train(build, 255)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells no peak of memory")
def test_the_memory_of_a_run_is_within_a_factor_of_two_of_the_estimate():
    build = {
        "hidden_size": 512,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_positions": 512,
    }
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(build)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = int(done.stdout.split()[-1])
    step = Workload(
        student=built_shape(ModelBuild(**build), len(ALPHABET)),
        rollouts=4,
        prompt=1,
        reply=255,
        micro_tokens=4 * 256,
        width=4,
        engine="none",
        exact=False,
    )
    need = footprint(step).need
    assert measured > 200e6  # else the baseline is what was measured
    assert 0.5 < need / measured < 2.0


def test_the_chunks_of_the_head_are_those_of_the_head():
    assert HEAD_CHUNK == logprobs.CHUNK_ELEMENTS


def config_of(kind="on_policy", **sections):
    stage = [{"name": "s", "kind": kind, "target": "student"}]
    objective = {"name": "sft"} if kind == "sft" else {"name": "opd", "support": "top_k", "k": 8}
    model = {"path": "x", **sections.pop("model", {})}
    config = Config.from_dict(
        {"objective": objective, "model": model, "data": {"name": "world"}, "stage": stage}
        | sections
    )
    return config.for_stage(config.stages[0])


def test_a_step_is_read_from_a_configuration():
    config = config_of(
        model={"dtype": "bfloat16", "kind": "adapter", "rank": 8, "attention": "eager"},
        teacher={"name": "self_teacher", "weights": "ema"},
        engine={"name": "hf", "max_batch": 24},
        sampling={"num_samples": 4, "max_new_tokens": 100, "refresh": 5},
        trainer={
            "batch": 16,
            "micro_batch_tokens": 2000,
            "epochs": 2,
            "gradient_checkpointing": True,
            "offload": "optimizer",
        },
    )
    found = workload_of(config, Q06, prompt=50)
    assert found == Workload(
        student=Q06,
        teacher=Q06,
        teacher_at="own",
        teacher_width=4,
        rollouts=64,
        samples=4,
        prompt=50,
        reply=100,
        micro_tokens=2000,
        epochs=2,
        rank=8,
        recompute=True,
        offload=True,
        eager=True,
        concurrent=24,
        copies=2,
        candidates=8,
    )
    assert workload_of(config, Q06, prompt=50, reply=30).reply == 30


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"teacher": {"name": "self_teacher"}}, (1, "own")),
        ({"teacher": {"name": "self_teacher", "weights": "live"}}, (0, "own")),
        ({"teacher": {"name": "self_teacher"}, "model": {"kind": "adapter"}}, (0, "own")),
        ({"teacher": {"name": "local", "path": "x"}}, (0, "local")),
        ({"teacher": {"name": "local", "adapter": "x"}}, (0, "own")),
        ({"teacher": {"name": "server"}}, (0, "served")),
    ],
)
def test_copies_and_teachers_are_read_from_a_configuration(sections, expected):
    found = workload_of(config_of(**sections), Q06, prompt=50, teacher=Q4)
    assert (found.copies, found.teacher_at) == expected


def test_a_stage_of_worked_solutions_writes_no_replies():
    found = workload_of(config_of("sft"), Q06, prompt=50)
    assert (found.engine, found.rollouts) == ("none", 16)
    assert config_of().engine.name == "hf"
    assert workload_of(config_of(engine={"name": "vllm"}), Q06, prompt=50).engine == "copy"
    assert workload_of(config_of(engine={"name": "server"}), Q06, prompt=50).engine == "served"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model_type": "gpt2", "n_embd": 768}, r"gpt2.*hidden_size, num_hidden_layers"),
        ({"num_experts": 8}, "experts"),
        ({"text_config": {"num_local_experts": 8}}, "experts"),
    ],
)
def test_a_configuration_that_is_not_understood_is_an_error(table, words):
    with pytest.raises(ConfigError, match=words):
        shape_of(table)


def test_a_nested_configuration_and_its_defaults_are_read():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    found = shape_of({"text_config": text})
    assert found == Shape(
        hidden=64, layers=1, heads=4, kv_heads=4, head_dim=16, inner=128, vocab=100, tied=True
    )
    assert not shape_of({**text, "model_type": "llama"}).tied
    plain = shape_of({**text, "model_type": "gpt_neox"})
    assert plain.matmul_weights == 4 * 64 * 64 + 2 * 64 * 128 + 100 * 64


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"),
        ("L4", "L4"),
    ],
)
def test_devices_are_found_by_the_name_that_their_driver_gives(name, expected):
    assert find_device(name).name == expected


def test_an_unknown_device_is_an_error_that_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'Voodoo 2'.*cpu.*H200"):
        find_device("Voodoo 2")


def test_the_rates_of_the_table_are_of_the_right_order():
    for device in DEVICES:
        assert 5e13 < device.half < 5e15
        assert device.single < device.half
        assert 1e11 < device.bandwidth < 1e13
        assert 20 * GIB < device.memory < 200 * GIB
        assert device.flops(2) == device.half
        assert device.flops(4) == device.single


def test_the_processor_is_measured_within_a_moment():
    began = time.perf_counter()
    cpu = measure_cpu(0.1)
    assert time.perf_counter() - began < 5.0
    assert isinstance(cpu, Device)
    assert 1e8 < cpu.single < 1e14
    assert 1e8 < cpu.bandwidth < 1e13
    assert cpu.memory > 2**28
    assert floor(work(Q06, width=4), cpu).total > floor(work(Q06, width=4), H200).total


def test_the_estimate_needs_no_torch():
    code = "import sys, distill.footprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
