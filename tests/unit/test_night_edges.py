"""What must hold around a night: its draws, its start, its cache keys, and who may be replaced."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from distill.checkpoint import write_manifest
from distill.config import Config, Layer, load
from distill.errors import CheckpointError, ConfigError
from distill.models import ADAPTER_WEIGHTS, FULL_WEIGHTS, new_adapter, save_weights, weights_file
from distill.policy import AdapterSpec, Policy
from distill.rundir import RunDir, digest_file, write_json
from distill.types import CheckpointRef, DomainResult, Verdict
from flows import judging, registry, teaching, wiring
from flows.night import Night, Student, begin, prepare_start, register_start
from flows.progress import NoProgress
from flows.stages import cache_key, run_stage
from flows.training import StageResult
from helpers import make_chat, make_model, make_policy

SELF_TAUGHT = """
[run]
preset = "edges"
orchestrator = "none"
[model]
name = "toy"
max_length = 96
[model.build]
hidden_size = 32
num_layers = 1
num_kv_heads = 1
head_dim = 16
intermediate_size = 64
[data]
name = "world"
domains = ["sort"]
[sampling]
num_samples = 2
max_new_tokens = 6
[teacher]
name = "self_teacher"
[view]
name = "with_answer"
[objective]
name = "gkd"
[trainer]
steps = 6
batch = 2
lr = 1e-2
[checkpoint]
every_steps = 2
every_seconds = 1000
[[stage]]
name = "self"
kind = "on_policy"
target = "student"
"""


def make_night(home: Path, config: Config) -> Night:
    run = RunDir.create(home, config.run.preset, "20260101")
    run.write_config(config, "")
    return Night(config=config, run=run, progress=NoProgress())


def self_taught(*overrides: str) -> Config:
    return load([Layer(origin="test", text=SELF_TAUGHT)], overrides)


class Killed(Exception):
    pass


class KilledAt(NoProgress):
    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, stage: str, step: int, metrics: object) -> None:
        if step == self.last:
            raise Killed


METHODS = {
    "a self-teacher of full weights": (),
    "a gate, and rows without a view": (
        *("objective.name=anti_sd", "objective.warmup_steps=2", "teacher.weights=ema"),
        *("teacher.rate=0.3", "view.name=with_peer_success"),
    ),
    "a snapshot under an adapter, read at the student's entries": (
        *("objective.name=opd", "objective.support=top_k", "objective.k=4", "model.kind=adapter"),
        *("model.rank=4", "teacher.weights=snapshot", "teacher.every=2"),
    ),
    "several updates of refilled groups": (
        *("objective.name=dapo", "teacher.name=", "view.name=plain"),
        *("trainer.epochs=2", "trainer.minibatches=2"),
    ),
}


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS.keys())
def test_a_stage_is_the_same_after_a_resume(changes, tmp_path):
    digests = []
    for name, stops in (("whole", ()), ("broken", (3, 5))):
        night = make_night(tmp_path / name, self_taught(*changes))
        begin(night)
        prepare_start(night)
        (stage,) = night.student_stages
        for stop in stops:
            with pytest.raises(Killed):
                run_stage(dataclasses.replace(night, progress=KilledAt(stop)), stage)
        run_stage(night, stage)
        digests.append(digest_file(weights_file(night.final(stage.name))))
    assert digests[0] == digests[1]


def test_every_night_draws_other_tasks_even_after_one_that_was_held(tmp_path):
    keys = []
    for _ in range(3):
        night = make_night(tmp_path, self_taught())
        begin(night)
        register_start(night)
        keys.append(night.key("self"))
        begin(night)
        assert night.key("self") == keys[-1], "a resumed night keeps its draws"
    assert len(set(keys)) == 3


def test_a_damaged_champion_is_not_continued(tmp_path):
    first = make_night(tmp_path, self_taught())
    begin(first)
    register_start(first)
    champion = registry.current(tmp_path, "toy")
    assert champion is not None
    with (champion.path / FULL_WEIGHTS).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"oops")
    second = make_night(tmp_path, self_taught())
    begin(second)
    with pytest.raises(CheckpointError, match="damaged"):
        prepare_start(second)
    assert not second.start.exists()


def finish(night: Night, content: str) -> CheckpointRef:
    """A finished student with these bytes as weights, and a verdict that promotes it."""
    final = night.final("self")
    final.mkdir(parents=True)
    (final / FULL_WEIGHTS).write_text(content)
    write_json(
        final / "stage.json",
        StageResult(name="self", objective="gkd", steps=6, tokens=9, seconds=1.0),
    )
    write_manifest(final)
    ref = judging.candidate(night)
    result = DomainResult(
        teacher=None, before=0.1, after=0.9, difference=0.8, low=0.7, high=0.9, n=10
    )
    write_json(
        night.run.gate_path(),
        Verdict(
            decision="promote",
            reasons=(),
            candidate=ref.digest,
            incumbent="start",
            domains={},
            overall=result,
            detectable=0.1,
        ),
    )
    return ref


def test_a_night_that_another_one_overtook_is_held_and_promotes_nothing(tmp_path):
    old, new = (make_night(tmp_path, self_taught()) for _ in range(2))
    begin(old)
    register_start(old)
    begin(new)
    register_start(new)
    finish(old, "old")
    newer = finish(new, "new")
    judging.promote(new)
    judging.promote(old)
    champion = registry.current(tmp_path, "toy")
    assert champion is not None
    assert champion.digest == newer.digest
    verdict = judging.judge(old)
    assert verdict.decision == "hold"
    assert newer.digest[:12] in verdict.reasons[-1].text


def test_a_promotion_is_not_repeated_when_the_champion_moved_on(tmp_path):
    old, new = (make_night(tmp_path, self_taught()) for _ in range(2))
    begin(old)
    register_start(old)
    finish(old, "old")
    judging.promote(old)
    begin(new)
    prepare_start(new)
    newer = finish(new, "new")
    judging.promote(new)
    judging.promote(old)
    champion = registry.current(tmp_path, "toy")
    assert champion is not None
    assert champion.digest == newer.digest
    assert judging.judge(old).decision == "promote", "its own promotion did happen"


def test_the_cache_key_of_a_stage_follows_the_content_of_its_data_and_its_start(tmp_path):
    data = tmp_path / "q.jsonl"
    changes = ("data.name=jsonl", f"data.path={data}", "data.split=split", "stage.self.cache=true")

    def key() -> str:
        data.write_text(
            "".join(
                f'{{"prompt": "{name}", "answer": "{answer}", "split": "{name}"}}\n'
                for name in ("train", "gate")
            )
        )
        return cache_key(night, night.student_stages[0])

    answer = "1"
    night = make_night(tmp_path, self_taught(*changes))
    begin(night)
    prepare_start(night)
    before = key()
    assert key() == before
    answer = "2"
    assert key() != before
    answer = "1"
    with (night.start / FULL_WEIGHTS).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"else")
    assert key() != before


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTeacher:
    name: str = "own"
    capabilities: frozenset[str] = frozenset({"logprobs"})

    def score(self, views, want):
        raise AssertionError("a refused teacher is never asked")

    def distribution(self, views):
        raise AssertionError("a refused teacher is never asked")


def own_teacher(objective: str) -> Config:
    name = f"teacher.name={__name__}:OwnTeacher"
    return self_taught(name, "view.name=plain", f"objective.name={objective}")


def test_ones_own_teacher_is_loaded_and_what_it_cannot_do_is_refused(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())
    with pytest.raises(ConfigError, match="needs distribution from its teacher"):
        wiring.check(own_teacher("gkd"))
    config = own_teacher("opd")
    wiring.check(config)
    teacher = teaching.build_teacher(
        config, Student(policy=make_policy(), chat=make_chat()), lambda p, r: Path(p)
    )
    assert teacher is not None
    assert teacher.name == "own"


def _this_module():
    import types

    module = types.ModuleType(__name__)
    module.OwnTeacher = OwnTeacher
    return module


def test_an_adapter_teacher_may_lie_in_any_folder(tmp_path):
    def adapter() -> Policy:
        model = new_adapter(make_model(), AdapterSpec(rank=2), seed=1)
        return Policy(model, base="b", kind="adapter")

    save_weights(adapter(), make_chat().tokenizer, tmp_path / "expert")
    assert (tmp_path / "expert" / ADAPTER_WEIGHTS).is_file()
    changes = ("teacher.name=local", f"teacher.adapter={tmp_path / 'expert'}", "view.name=plain")
    config = self_taught(*changes, "model.kind=adapter")

    def locate(path: str, revision: str | None) -> Path:
        raise AssertionError("an adapter is no model")

    student = Student(policy=adapter(), chat=make_chat())
    teacher = teaching.build_teacher(config, student, locate)
    assert teacher is not None
    assert teacher.name == str(tmp_path / "expert")
