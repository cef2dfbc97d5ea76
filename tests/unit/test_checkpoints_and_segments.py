"""Durable points of a stage, the rollouts beside them, and the sampler of tasks."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch

from distill.batch import collate
from distill.checkpoint import (
    Progress,
    list_checkpoints,
    load_newest,
    prune,
    save_checkpoint,
    verify_manifest,
)
from distill.curriculum.samplers import EPOCH_LIMIT, TaskSampler
from distill.errors import CheckpointError, DataError, DistillError, PreflightError
from distill.followers import FollowerSpec
from distill.models import checkpoint_ref, load_model, load_trained_weights, new_adapter
from distill.objectives import SFT
from distill.policy import AdapterSpec, Policy
from distill.segments import Segments, stored
from distill.trainer import Trainer, TrainerOptions
from distill.types import Rollout, Scores
from helpers import INFO, make_chat, make_model, make_policy, random_rollouts

OPTIONS = TrainerOptions(num_steps=6, lr=0.01, warmup_steps=2, schedule="linear")


def make_adapter_policy():
    return Policy(new_adapter(make_model(), AdapterSpec(rank=4), seed=3), base="b", kind="adapter")


def train(policy, trainer, steps):
    for step in steps:
        batch = collate(random_rollouts(seed=step, worked=True))
        info = type(INFO)(stage="s", step=step, num_steps=6, seed=0)
        trainer.update(batch, SFT(), info)


@pytest.mark.parametrize("make", [make_policy, make_adapter_policy], ids=["full", "adapter"])
def test_a_resumed_run_ends_bit_identical_to_an_unbroken_one(make, tmp_path):
    whole = make()
    train(whole, Trainer(whole, OPTIONS), range(1, 7))

    first = make()
    trainer = Trainer(first, OPTIONS)
    train(first, trainer, range(1, 4))
    trainer.state = {"gate": [1.5, 2]}
    tokenizer = make_chat().tokenizer
    save_checkpoint(tmp_path, first, trainer, tokenizer, Progress(step=3, tokens=9))

    second = make()
    trainer = Trainer(second, OPTIONS)
    progress = load_newest(tmp_path, second, trainer)
    assert (progress.step, progress.tokens, trainer.state) == (3, 9, {"gate": [1.5, 2]})
    train(second, trainer, range(4, 7))

    for name, parameter in whole.trainable().items():
        assert torch.equal(parameter, second.trainable()[name]), name


@pytest.mark.parametrize("make", [make_policy, make_adapter_policy], ids=["full", "adapter"])
@pytest.mark.parametrize("role", ["ema", "snapshot"])
def test_weights_that_follow_the_student_are_part_of_a_checkpoint(make, role, tmp_path):
    def following():
        policy = make()
        policy.add_follower(FollowerSpec(name=role, rate=0.2, every=2))
        return policy

    def told(policy):
        return policy.followers[role].tensors()

    whole = following()
    train(whole, Trainer(whole, OPTIONS), range(1, 7))
    first = following()
    trainer = Trainer(first, OPTIONS)
    train(first, trainer, range(1, 4))
    save_checkpoint(tmp_path, first, trainer, make_chat().tokenizer, Progress(step=3))

    second = following()
    trainer = Trainer(second, OPTIONS)
    load_newest(tmp_path, second, trainer)
    assert all(torch.equal(x, told(first)[name]) for name, x in told(second).items())
    assert any(
        not torch.equal(x, p)
        for x, p in zip(told(second).values(), second.trainable().values(), strict=True)
    )
    train(second, trainer, range(4, 7))
    assert all(torch.equal(x, told(whole)[name]) for name, x in told(second).items())
    assert not any(p.requires_grad for _, p in second.followers[role]._pairs.values())


def test_a_checkpoint_without_the_followers_of_a_stage_is_refused_by_name(tmp_path):
    policy = make_policy()
    trainer = Trainer(policy, OPTIONS)
    save_checkpoint(tmp_path, policy, trainer, make_chat().tokenizer, Progress(step=1))
    policy.add_follower(FollowerSpec(name="ema"))
    with pytest.raises(CheckpointError, match="role_ema"):
        load_newest(tmp_path, policy, trainer)


def test_a_role_is_left_again_when_something_fails_inside_it():
    policy = make_adapter_policy()
    policy.add_follower(FollowerSpec(name="ema"))
    names = set(policy.trainable())

    def fail_inside():
        with policy.as_role("ema") as model:
            assert model.active_adapter == "ema"
            assert not any(p.requires_grad for n, p in model.named_parameters() if ".ema." in n)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert policy.model.active_adapter == "default"
    assert set(policy.trainable()) == names
    assert all(".default." in name for name in names)


def test_a_self_teacher_of_an_adapter_costs_no_second_copy_of_the_base():
    policy = make_adapter_policy()
    base = {p.data_ptr() for p in policy.model.parameters()}
    size = sum(p.numel() for p in policy.model.parameters())
    policy.keep_start()
    policy.add_follower(FollowerSpec(name="ema"))
    adapter = sum(p.numel() for p in policy.trainable().values())
    assert sum(p.numel() for p in policy.model.parameters()) == size + adapter
    assert base <= {p.data_ptr() for p in policy.model.parameters()}


def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(tmp_path):
    policy, tokenizer = make_policy(), make_chat().tokenizer
    trainer = Trainer(policy, OPTIONS)
    for step in (1, 2):
        train(policy, trainer, [step])
        save_checkpoint(tmp_path, policy, trainer, tokenizer, Progress(step=step))
    path = list_checkpoints(tmp_path)[-1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        verify_manifest(path.parent)
    assert load_newest(tmp_path, make_policy(), Trainer(make_policy(), OPTIONS)).step == 1
    save_checkpoint(tmp_path, policy, trainer, tokenizer, Progress(step=2))
    assert load_newest(tmp_path, make_policy(), Trainer(make_policy(), OPTIONS)).step == 2


def test_without_a_checkpoint_a_stage_starts_at_zero(tmp_path):
    policy = make_policy()
    assert load_newest(tmp_path, policy, Trainer(policy, OPTIONS)) == Progress()


def test_old_checkpoints_are_removed_and_the_newest_are_kept(tmp_path):
    policy = make_policy()
    trainer = Trainer(policy, OPTIONS)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, policy, trainer, make_chat().tokenizer, Progress(step=step))
    prune(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["000002", "000003"]


def test_a_checkpoint_is_an_ordinary_model_folder(tmp_path):
    policy = make_policy()
    path = save_checkpoint(
        tmp_path, policy, Trainer(policy, OPTIONS), make_chat().tokenizer, Progress(step=1)
    )
    loaded = Policy(load_model(str(path)), base="x")
    for name, parameter in policy.model.state_dict().items():
        assert torch.equal(parameter, loaded.model.state_dict()[name])
    assert checkpoint_ref(path, base="x").kind == "full"


def test_weights_of_another_model_are_refused(tmp_path):
    policy = make_policy()
    path = save_checkpoint(
        tmp_path, policy, Trainer(policy, OPTIONS), make_chat().tokenizer, Progress(step=1)
    )
    other = Policy(make_model(num_layers=1), base="x")
    with pytest.raises(CheckpointError, match="does not have"):
        load_trained_weights(other, path)
    with pytest.raises(DistillError, match="does not have"):
        Trainer(other, OPTIONS).load_state_tensors({"step/nonsense": torch.zeros(())})


def test_stored_rollouts_come_back_exactly_and_are_not_made_again(tmp_path):
    rollouts = [*random_rollouts()]
    scores = [Scores(logprobs=(-0.1234567, -1e-9), source="t", view_id="v")]
    segments = Segments(tmp_path, 1)
    assert segments.at(1)("rollouts", Rollout, lambda: rollouts) == rollouts
    assert segments.at(1)("teacher", Scores, lambda: scores) == scores
    segments.sync()
    segments.close()

    again = Segments(tmp_path, 1)
    assert again.at(1)("rollouts", Rollout, lambda: pytest.fail("made again")) == rollouts
    assert again.at(1)("teacher", Scores, lambda: pytest.fail("made again")) == scores
    assert again.num_reused == 2
    again.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_clearly_when_the_rest_is_written_at_the_end(tmp_path):
    segments = Segments(tmp_path, 1)
    segments.close()
    segments._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    segments._file.write("a line that waits in the buffer")
    with pytest.raises(PreflightError, match="no space left"):
        segments.close()


def test_an_unfinished_line_of_a_killed_writer_is_made_again(tmp_path):
    rollouts = random_rollouts()
    segments = Segments(tmp_path, 1)
    segments.at(1)("rollouts", Rollout, lambda: rollouts)
    segments.at(2)("rollouts", Rollout, lambda: rollouts)
    segments.close()
    (path,) = (tmp_path / "segments").glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-40])

    again = Segments(tmp_path, 1)
    calls = []
    again.at(1)("rollouts", Rollout, lambda: pytest.fail("made again"))
    again.at(2)("rollouts", Rollout, lambda: calls.append(2) or rollouts)
    assert calls == [2]
    again.close()


def test_what_is_stored_is_found_by_step_the_last_of_a_repeated_one(tmp_path):
    first, second = random_rollouts(seed=1), random_rollouts(seed=2)
    segments = Segments(tmp_path, 1)
    for step in (1, 2, 3):
        segments.at(step)("rollouts", Rollout, lambda: first)
        segments.at(step)("teacher", Scores, lambda: [])
    segments.close()
    (path,) = (tmp_path / "segments").glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-10])  # what a kill leaves
    again = Segments(tmp_path, 4)
    again._path.write_text(' {"name": "teacher", "step": 5, "rows": []}\n')  # written by hand
    again.close()
    for step in (3, 2):
        later = Segments(tmp_path, 9)
        later.at(step)("rollouts", Rollout, lambda: second)
        later.close()
    assert dict(stored(tmp_path, "rollouts", Rollout)) == {1: first, 2: second, 3: second}
    assert dict(stored(tmp_path, "teacher", Scores)) == {1: [], 2: [], 5: []}
    assert list(stored(tmp_path, "rollouts", Rollout)) == [1, 2, 3]
    assert not stored(tmp_path, "notes", Rollout)
    assert not stored(tmp_path / "none", "rollouts", Rollout)


def test_a_broken_line_of_a_segment_is_an_error_with_its_place(tmp_path):
    (tmp_path / "segments").mkdir()
    path = tmp_path / "segments" / "000001-1.jsonl"
    path.write_text(
        '{"step":1,"name":"rollouts","rows":[\n{"step":2,"name":"rollouts","rows":[]}\n'
    )
    found = stored(tmp_path, "rollouts", Rollout)
    assert found[2] == []
    with pytest.raises(DataError, match=r"000001-1.jsonl, byte 0: not a line of valid JSON"):
        found[1]
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match=r"000001-1.jsonl, byte 0"):
        stored(tmp_path, "rollouts", Rollout)


def test_walking_through_the_steps_of_a_stage_holds_one_at_a_time(tmp_path):
    rows = random_rollouts(count=300)

    def peak(steps: int) -> int:
        folder = tmp_path / str(steps)
        segments = Segments(folder, 1)
        for step in range(1, steps + 1):
            segments.at(step)("rollouts", Rollout, lambda: rows)
        segments.close()
        tracemalloc.start()
        found = stored(folder, "rollouts", Rollout)
        assert sum(len(found[step]) for step in found) == 300 * steps
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(1)  # what is imported on first use
    assert peak(12) < 1.5 * peak(2)


def test_a_finite_list_is_seen_once_per_epoch_in_an_order_of_its_own():
    tasks = list(range(10))
    sampler = TaskSampler(tasks, batch=4, key="a")
    seen = [t for step in range(1, 6) for t in sampler(step)]
    assert Counter(seen) == Counter(dict.fromkeys(tasks, 2))
    assert seen[:10] != seen[10:]
    assert TaskSampler(tasks, batch=4, key="a")(5) == seen[16:]
    assert [t for s in range(1, 6) for t in TaskSampler(tasks, batch=4, key="b")(s)] != seen


def test_a_huge_list_is_drawn_from_without_an_order():
    tasks = range(EPOCH_LIMIT + 1)
    sampler = TaskSampler(tasks, batch=100, key="a")
    assert sampler(1) == TaskSampler(tasks, batch=100, key="a")(1) != sampler(2)


def test_an_empty_list_is_refused():
    with pytest.raises(DataError, match="no tasks to train on"):
        TaskSampler([], batch=1, key="a")
