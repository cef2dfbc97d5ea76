"""A checkpoint of any number of processes is continued by any other number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from distill import parallel
from distill.checkpoint import Progress, load_newest
from distill.errors import CheckpointError
from distill.rundir import read_json
from distill.shards import load_tensors
from distill.trainer import Trainer, TrainerOptions
from parallel_worker import Scenario, gaps, make_student, outcome, run, torchrun

KINDS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "float64", "follower": "ema"},
    "adapter": {"kind": "adapter", "follower": "snapshot"},
}
FIRST, REST = {"last": 2}, {"first": 3, "last": 4}


def scenario(kind: str, **changes: Any) -> Scenario:
    return Scenario(**{**KINDS[kind], **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of step 2 in `one/KIND` and `two/KIND`, by one process and by two; and what two
    processes made of those of one, in `KIND.json`."""
    out = tmp_path_factory.mktemp("saved")
    scenarios = {}
    for kind, options in KINDS.items():
        run(scenario(kind, **FIRST, save=str(out / "one" / kind)), parallel.single())
        two, one = str(out / "two" / kind), str(out / "one" / kind)
        scenarios[f"save {kind}"] = {**options, **FIRST, "save": two}
        scenarios[kind] = {**options, **REST, "load": one}
    asked = out / "scenarios.json"
    asked.write_text(json.dumps({"out": str(out), "scenarios": scenarios}))
    done = torchrun(asked)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def unbroken(kind: str) -> dict[str, Any]:
    """The end of a training that was never interrupted."""
    tensors = run(scenario(kind), parallel.single()).tensors
    return {
        name: t for name, t in tensors.items() if not name.startswith(("gradient1", "gradient2"))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_where_one_stopped(kind, saved):
    found = gaps(outcome(saved, kind).tensors, unbroken(kind))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_where_two_stopped(kind, saved):
    rest = run(scenario(kind, **REST, load=str(saved / "two" / kind)), parallel.single())
    found = gaps(rest.tensors, unbroken(kind))
    assert max(found.values()) < 1e-5, found


def test_four_processes_go_on_where_two_stopped(saved, tmp_path):
    options = {**KINDS["full"], **REST, "load": str(saved / "two" / "full")}
    asked = tmp_path / "scenarios.json"
    asked.write_text(json.dumps({"out": str(tmp_path), "scenarios": {"full": options}}))
    done = torchrun(asked, processes=4)
    assert done.returncode == 0, done.stderr[-4000:]
    found = gaps(outcome(tmp_path, "full").tensors, unbroken("full"))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_lie_in_the_same_files_whoever_wrote_them(kind, saved):
    one, two = (saved / place / kind / "checkpoints" / "000002" for place in ("one", "two"))
    names = {path.name for path in one.iterdir()}
    others = {path.name for path in two.iterdir()}
    role = KINDS[kind]["follower"]
    assert names - others == {"optimizer.safetensors", f"role_{role}.safetensors"}
    assert {n for n in others - names if n.startswith("optimizer")} == {
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
        "optimizer.index.json",
    }
    file = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    ours, theirs = load_file(str(one / file)), load_file(str(two / file))
    assert max(gaps(theirs, ours).values()) < 1e-5
    assert set(read_json(two / "manifest.json")["files"]) == others - {"manifest.json"}


def test_no_process_stores_what_another_one_stores(saved):
    folder = saved / "two" / "full" / "checkpoints" / "000002"
    index = read_json(folder / "optimizer.index.json")["tensors"]
    entry = index["exp_avg/model.layers.0.mlp.up_proj.weight"]
    assert entry["shape"] == [64, 32]
    assert entry["pieces"] == [
        {"file": 1, "start": 0, "stop": 32},
        {"file": 2, "start": 32, "stop": 64},
    ]
    stored = load_file(str(folder / "optimizer-00002-of-00002.safetensors"))
    assert stored["exp_avg/model.layers.0.mlp.up_proj.weight"].shape == (32, 32)
    assert "step/model.layers.0.mlp.up_proj.weight" not in stored


def test_a_damaged_part_of_one_process_spoils_the_checkpoint(saved, caplog):
    folder = saved / "two" / "adapter"
    path = folder / "checkpoints" / "000002" / "optimizer-00002-of-00002.safetensors"
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        policy = make_student(scenario("adapter"), parallel.single())
        trainer = Trainer(policy, TrainerOptions(num_steps=4, lr=1e-3))
        assert load_newest(folder, policy, trainer) == Progress()
        assert "is damaged" in caplog.text
    finally:
        path.write_bytes(kept)


def test_a_missing_part_is_named(saved):
    folder = saved / "two" / "full" / "checkpoints" / "000002"
    path = folder / "optimizer-00001-of-00002.safetensors"
    hidden = path.rename(path.with_suffix(".hidden"))
    try:
        with pytest.raises(CheckpointError, match="optimizer-00001-of-00002"):
            load_tensors(folder, "optimizer", lambda key: None, parallel.single())
    finally:
        hidden.rename(path)
