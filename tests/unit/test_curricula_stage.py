"""Where routing logs meet a night: what is taken in, what fits, and what is refused at load."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from distill.checkpoint import verify_manifest, write_manifest
from distill.config import Layer, load
from distill.curriculum.examples import (
    BATCH_ROWS,
    Example,
    ExampleReader,
    ExampleWriter,
    Place,
    write_plan,
)
from distill.curriculum.prepare import Source
from distill.curriculum.store import LogStore
from distill.errors import CheckpointError, ConfigError, DataError
from distill.rundir import RunDir, digest_file, read_json, write_json
from distill.types import Message, Task
from evals.report_routed import read_routed
from flows import curricula_intake, recorded, wiring
from flows.curricula import StudentFits, _Chats
from flows.night import Night
from flows.progress import NoProgress
from flows.stages import cache_key, run_stage
from helpers import make_chat
from log_rows import row, write

NIGHT = """
[model]
name = "m"
path = "nowhere"
max_length = 64

[data]
name = "world"
domains = ["sort"]

[[stage]]
name = "base"
kind = "sft"
target = "base"
objective.name = "sft"

[[stage]]
name = "traffic"
kind = "serve"
target = "data"
teacher = { name = "local", path = "stage:base" }

[[stage]]
name = "curriculum"
kind = "curriculum"
target = "data"

[[stage.curriculum.sources]]
path = "stage:traffic"

[[stage]]
name = "sft"
kind = "sft"
target = "student"
model.path = "stage:base"
objective.name = "sft"
data = { name = "routing", path = "stage:curriculum", use = "turns" }

[[stage]]
name = "opd"
kind = "on_policy"
target = "student"
model.path = "stage:base"
objective.name = "gkd"
teacher = { name = "local", path = "stage:base" }
data = { name = "routing", path = "stage:curriculum", use = "contexts" }
"""


def config(*changes: str, text: str = NIGHT):
    return load([Layer(origin="night.toml", text=text)], changes)


def night(home: Path, *changes: str) -> Night:
    return Night(
        config=config(*changes), run=RunDir(path=home / "runs" / "n-1"), progress=NoProgress()
    )


# -- taking in ------------------------------------------------------------------------------------


def taken(folder: Path, *sources: Source):
    said: list[str] = []
    with LogStore.open(folder / "store", create=True) as store:
        found = curricula_intake.take(
            store, sources, redact=None, record=folder / "taken.json", tell=said.append
        )
    return found, said


def source(path: Path | str, name: str = "log") -> Source:
    return Source(name=name, path=str(path))


def test_rows_that_could_not_be_used_are_counted_by_reason_and_the_rest_goes_on(tmp_path) -> None:
    log = write(tmp_path / "a.jsonl", [row(1), "{no json", row(2), {"what": 1}])
    found, _ = taken(tmp_path, source(log), source(tmp_path / "no.jsonl", "gone"))
    assert found.new == 2
    told = "\n".join(found.warnings)
    assert "log source 'log': 2 of 4 rows were not used" in told
    assert "1: not valid JSON" in told
    assert "log source 'gone' could not be read" in told


def test_a_file_that_ends_in_the_middle_of_a_row_says_where_the_next_import_goes_on(tmp_path):
    log = write(tmp_path / "a.jsonl", [row(1)])
    with log.open("a") as file:
        file.write('{"source_id": "id2", ')
    found, _ = taken(tmp_path, source(log))
    (told,) = [text for text in found.warnings if "goes on at" in text]
    assert str(log) in told


def test_a_night_without_any_log_that_can_be_read_stops_also_when_the_store_has_calls(tmp_path):
    log = write(tmp_path / "a.jsonl", [row(1)])
    taken(tmp_path, source(log))
    (tmp_path / "taken.json").unlink()  # another night
    with pytest.raises(DataError, match=r"no source.*nowhere.*no file there"):
        taken(tmp_path, source(tmp_path / "nowhere" / "*.jsonl"))


def test_a_log_that_nobody_recognises_stops_the_night_and_its_resume(tmp_path) -> None:
    log = write(tmp_path / "a.jsonl", [{"what": n} for n in range(3)])
    for _ in range(2):
        with pytest.raises(DataError, match=r"none of 3 rows could be used.*no importer"):
            taken(tmp_path, source(log))


def test_a_log_without_anything_new_is_no_fault_and_is_said(tmp_path) -> None:
    log = write(tmp_path / "a.jsonl", [row(1)])
    taken(tmp_path, source(log))
    (tmp_path / "taken.json").unlink()
    found, _ = taken(tmp_path, source(log))
    assert found.new == 0
    assert any("nothing was new" in text for text in found.warnings)


@pytest.mark.parametrize("recorded_first", [True, False])
def test_a_night_that_was_killed_after_its_import_still_says_what_was_new(
    recorded_first, tmp_path, monkeypatch
) -> None:
    """Whether the first import came to write down what it did, or was killed just before."""
    log = write(tmp_path / "a.jsonl", [row(1), row(2), "{no json"])
    write(tmp_path / "b.jsonl", [row(7)])
    with LogStore.open(tmp_path / "store", create=True) as store:  # an earlier night
        store.ingest([source(tmp_path / "b.jsonl")], redact=None, now_ms=int(time.time() * 1000))
    if recorded_first:
        taken(tmp_path, source(log))
    else:
        with monkeypatch.context() as patch:

            def killed(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(curricula_intake, "_with_earlier", killed)
            with pytest.raises(KeyboardInterrupt):
                taken(tmp_path, source(log))
    write(log, [row(3)], mode="a")
    found, _ = taken(tmp_path, source(log))
    (own,) = found.sources
    assert (own.stored, own.dropped["bad_json"], own.read) == (3, 1, 4)
    again, _ = taken(tmp_path, source(log))
    assert (again.new, again.sources[0].read) == (3, 4)


def test_a_night_waits_for_another_import_and_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(curricula_intake, "LOOK_AGAIN", 0.02)
    log = write(tmp_path / "a.jsonl", [row(1)])
    held, done = threading.Event(), threading.Event()

    def other() -> None:
        with LogStore.open(tmp_path / "store", create=True) as store, store.lock():
            held.set()
            time.sleep(0.2)
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()
    found, said = taken(tmp_path, source(log))
    assert done.is_set()
    thread.join()
    assert found.new == 1
    assert len(said) == 1
    assert "waiting" in said[0]


def test_a_night_does_not_wait_for_ever_nor_for_a_fault_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(curricula_intake, "PATIENCE", 0.05)
    monkeypatch.setattr(curricula_intake, "LOOK_AGAIN", 0.02)
    log = write(tmp_path / "a.jsonl", [row(1)])
    with pytest.raises(ConfigError, match="two sources"):
        taken(tmp_path, source(log), source(log))
    with (
        LogStore.open(tmp_path / "store") as store,
        store.lock(),
        pytest.raises(ConfigError, match="another import"),
    ):
        taken(tmp_path, source(log))


def test_a_report_says_how_many_calls_were_new_tonight() -> None:
    known = {"stage": "curriculum", "counts": {"calls": 1200}, "stages": [{"n": 3}]}
    (told,) = read_routed({"curricula": [known | {"new": 34}]})
    assert "1,200 calls of the log (34 new tonight)" in told
    (told,) = read_routed({"curricula": [known]})
    assert "tonight" not in told


# -- what fits ------------------------------------------------------------------------------------

ASKS = ({"role": "user", "content": "a" * 10},)
TURN = (
    {"role": "assistant", "content": "b" * 5},
    {"role": "tool", "content": "c" * 20},
    {"role": "assistant", "content": "d" * 4},
)
# The plain template: contents as they are, one end token behind each answer.
FIRST, SECOND, WHOLE = 10, 10 + 6 + 20, 10 + 6 + 20 + 5


def chat_of(max_length: int):
    chat = make_chat()
    chat.max_length = max_length
    return chat


@pytest.mark.parametrize(
    ("turns", "contexts", "sft", "opd"),
    [
        (WHOLE, SECOND, True, True),
        (WHOLE - 1, SECOND, False, True),
        (WHOLE, SECOND - 1, True, False),
        (WHOLE, FIRST, True, False),
        (FIRST, FIRST, False, False),
    ],
)
def test_every_context_of_a_turn_must_fit_and_not_only_the_first(turns, contexts, sft, opd):
    fits = StudentFits(turns=(chat_of(turns),), contexts=(chat_of(contexts),))
    found = fits(ASKS, TURN, ())
    assert (found.sft, found.opd) == (sft, opd)
    assert found.reason == (None if opd else "too_long")


def test_of_stages_that_read_one_curriculum_the_narrowest_counts() -> None:
    chats = _Chats(make_chat())
    for changes in ("40", "30", "50"):
        chats.add(config(f"model.max_length={changes}").model)
    (own,) = chats.found
    assert own.max_length == 30


def tasks_of(*lengths: int) -> list[Task]:
    return [
        Task(
            id=f"t{i}",
            env="routing",
            domain="d",
            split="train",
            prompt=(Message(role="user", content="a" * length),),
            meta={"stage": i},
        )
        for i, length in enumerate(lengths)
    ]


class Staged(list):
    """Tasks that know their stages."""

    @property
    def stages(self) -> np.ndarray:
        return np.array([task.meta["stage"] for task in self])


def test_recorded_tasks_that_do_not_fit_are_left_out_and_the_others_keep_order_and_stages(
    tmp_path, caplog
) -> None:
    own = night(tmp_path)
    stage = own.config.stage("opd")
    tasks = Staged(tasks_of(5, 70, 64, 65, 9))
    found = recorded.fitting_tasks(own, stage, tasks, make_chat())
    assert [task.id for task in found] == ["t0", "t2", "t4"]
    assert found.stages.tolist() == [0, 2, 4]
    told = recorded.counted(lambda step: {"step": float(step)}, found)
    assert told(3) == {"step": 3.0, "turns/left_out": 2.0}
    assert recorded.counted(None, tasks) is None
    assert "2 of 5 recorded turns are left out (2 too long)" in caplog.text
    again = recorded.known_tasks(own, stage, tasks)
    assert [task.id for task in again] == ["t0", "t2", "t4"]
    with pytest.raises(DataError, match="5 recorded turns, but there are 4"):
        recorded.known_tasks(own, stage, tasks[:4])
    with pytest.raises(DataError, match=r"none of 2 recorded turns.*2 too long"):
        recorded.fitting_tasks(own, stage, tasks_of(70, 71), make_chat())


def test_all_that_fits_is_taken_as_it_is_and_nothing_is_written(tmp_path) -> None:
    own = night(tmp_path)
    tasks = tasks_of(5, 64)
    assert recorded.fitting_tasks(own, own.config.stage("opd"), tasks, make_chat()) is tasks
    assert not own.run.path.exists()


def test_a_whole_turn_must_fit_where_it_is_imitated() -> None:
    left_out: Counter[str] = Counter()
    short, long = tasks_of(5, 5)
    said = (Message(role="assistant", content="b" * 5),)
    short = Task(**{**_fields(short), "meta": {"turn": said}})
    long = Task(
        **{**_fields(long), "meta": {"turn": (Message(role="assistant", content="b" * 60),)}}
    )
    found = recorded.readable([long, short], make_chat(), worked=True, left_out=left_out)
    assert list(found) == [1]
    assert left_out == {"turns/too_long": 1}


def _fields(task: Task) -> dict[str, object]:
    return {name: getattr(task, name) for name in Task.__dataclass_fields__}


# -- files ----------------------------------------------------------------------------------------


def curriculum(folder: Path, *, count: int = 6, sft: bool = True) -> Path:
    examples = [
        Example(
            id=f"{i:016x}",
            session_id=None,
            source="log",
            scene="sort",
            prompt=[{"role": "user", "content": f"question {i} " * 9}],
            turn=[{"role": "assistant", "content": f"answer {i}"}],
        )
        for i in range(count)
    ]
    with ExampleWriter(folder) as writer:
        places = writer.add(examples)
    columns = {
        "id": [e.id for e in examples],
        "stage": [1] * count,
        "position": np.arange(count),
        "file": [p.file for p in places],
        "row": [p.row for p in places],
        "score": [0.0] * count,
        "scene": ["sort"] * count,
        "band": [0] * count,
        "tier": [0] * count,
        "use_sft": [sft] * count,
        "use_opd": [True] * count,
        "num_spans": [1] * count,
    }
    write_plan(folder, columns)
    return folder


def test_a_manifest_covers_files_in_folders_and_old_ones_stay_valid(tmp_path) -> None:
    folder = curriculum(tmp_path / "c")
    write_manifest(folder)
    assert set(read_json(folder / "manifest.json")["files"]) == {"plan.arrow", "examples/000.arrow"}
    verify_manifest(folder)
    place = folder / "examples" / "000.arrow"
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"examples/000\.arrow is damaged"):
        verify_manifest(folder)
    old = {"format": 1, "files": {"plan.arrow": digest_file(folder / "plan.arrow")}}
    write_json(folder / "manifest.json", old)
    verify_manifest(folder)


def test_a_damaged_curriculum_is_refused_before_a_stage_reads_it(tmp_path) -> None:
    own = night(tmp_path)
    folder = curriculum(own.final("curriculum"))
    stage = own.config.for_stage(own.config.stage("opd"))
    recorded.require_undamaged(own, stage)  # nothing says what it should be
    write_manifest(folder)
    recorded.require_undamaged(own, stage)
    (folder / "examples" / "000.arrow").write_bytes(b"other")
    with pytest.raises(DataError, match=r"not what was built.*000\.arrow"):
        recorded.require_undamaged(own, stage)


def test_any_flipped_bit_gives_the_same_example_or_an_error_that_names_the_file(tmp_path) -> None:
    folder = curriculum(tmp_path, count=2 * BATCH_ROWS)
    path = folder / "examples" / "000.arrow"
    good = path.read_bytes()
    places = [Place(0, row) for row in range(0, 2 * BATCH_ROWS, 9)]
    draw, errors = np.random.default_rng(0), 0
    for _ in range(150):
        bad = bytearray(good)
        bad[draw.integers(8, len(bad))] ^= 1 << draw.integers(8)
        path.write_bytes(bad)
        reader = ExampleReader(folder)
        try:
            for place in places:
                reader(place)
        except DataError as error:
            errors += 1
            assert "000.arrow" in str(error)  # noqa: PT017
    assert errors > 20


# -- nothing to imitate ---------------------------------------------------------------------------


def begun(home: Path, **plan: bool) -> Night:
    own = night(home)
    curriculum(own.final("curriculum"), **plan)
    for place, text in ((own.start, b"start"), (own.final("base"), b"base")):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(text)
        write_manifest(place)
    return own


def test_a_stage_without_a_turn_to_imitate_hands_its_weights_on(tmp_path, caplog) -> None:
    own = begun(tmp_path, sft=False)
    result = run_stage(own, own.config.stage("sft"))
    assert (result.steps, result.tokens) == (0, 0)
    assert "nothing to learn" in caplog.text
    assert result.warnings
    final = own.final("sft")
    assert (final / "model.safetensors").read_bytes() == b"start"
    verify_manifest(final)
    assert run_stage(own, own.config.stage("sft")) == result


def test_only_a_curriculum_of_the_run_without_any_use_counts_as_empty(tmp_path) -> None:
    own = begun(tmp_path, sft=False)
    sft, opd = (own.config.for_stage(own.config.stage(name)) for name in ("sft", "opd"))
    assert recorded.is_empty(own, sft)
    assert not recorded.is_empty(own, opd)
    shutil.rmtree(own.final("curriculum"))
    curriculum(own.final("curriculum"))
    assert not recorded.is_empty(own, sft)


# -- the cache ------------------------------------------------------------------------------------


def test_a_stage_of_recorded_turns_has_a_key_that_depends_on_the_turns(tmp_path) -> None:
    own = begun(tmp_path)
    stage = own.config.stage("sft")
    write_json(own.run.path / "night.json", {"number": 1})
    key = cache_key(own, stage)
    assert key == cache_key(own, stage)
    shutil.rmtree(own.final("curriculum"))
    curriculum(own.final("curriculum"), count=5)
    assert cache_key(own, stage) != key


def test_a_stage_whose_name_begins_another_name_is_no_input_of_it(tmp_path) -> None:
    own = begun(tmp_path)
    longer = NIGHT.replace('name = "base"', 'name = "base-2"').replace("stage:base", "stage:base-2")
    extra = '[[stage]]\nname = "base"\nkind = "sft"\ntarget = "base"\nobjective.name = "sft"\n\n'
    text = longer.replace("[[stage]]", extra + "[[stage]]", 1)
    own = Night(config=config(text=text), run=own.run, progress=own.progress)
    own.final("base").rename(own.final("base").with_name("elsewhere"))
    folder = own.final("base-2")
    shutil.copytree(own.final("base").with_name("elsewhere"), folder)
    write_json(own.run.path / "night.json", {"number": 1})
    assert cache_key(own, own.config.stage("sft"))  # `base` has no weights, and nobody asks


# -- refused at load ------------------------------------------------------------------------------


def moved(first: str, before: str) -> str:
    """The night with one of its stages before another one."""
    head, *stages = NIGHT.split("[[stage]]")
    named = {text.split('"')[1]: text for text in stages}
    order = [name for name in named if name != first]
    order.insert(order.index(before), first)
    return "[[stage]]".join([head, *(named[name] for name in order)])


def test_the_night_of_these_tests_is_legal() -> None:
    wiring.check(config())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            moved("traffic", "base").replace('path = "stage:base" }', 'path = "x" }', 1),
            "'traffic' of kind 'serve' needs the student.*'base'",
        ),
        (
            moved("curriculum", "base").replace('path = "stage:traffic"', 'path = "x.jsonl"'),
            "'curriculum' of kind 'curriculum' needs the student.*'base'",
        ),
        (NIGHT.replace('path = "stage:traffic"', 'path = "stage:base"'), "kind 'serve'.*'sft'"),
        (NIGHT.replace('"stage:curriculum"', '"stage:traffic"', 1), "kind 'curriculum'.*'serve'"),
        (
            NIGHT.replace('path = "stage:base" }\ndata', 'path = "stage:traffic" }\ndata'),
            "trains weights",
        ),
    ],
)
def test_what_runs_too_early_or_names_another_kind_of_stage_is_refused(text, told) -> None:
    with pytest.raises(ConfigError, match=told):
        config(text=text)


def test_shared_sources_concern_stages_of_kind_curriculum_alone() -> None:
    shared = NIGHT.replace("[[stage.curriculum.sources]]", "[[curriculum.sources]]")
    wiring.check(config(text=shared))


def test_two_sources_of_one_name_are_refused() -> None:
    more = '[[stage.curriculum.sources]]\nname = "traffic"\npath = "x"\n\n[[stage]]\nname = "sft"'
    text = NIGHT.replace('[[stage]]\nname = "sft"', more)
    with pytest.raises(ConfigError, match=r"two of curriculum\.sources are called 'traffic'"):
        wiring.check(config(text=text))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("stage.sft.data.use=contexts", 'data.use = "contexts" has none'),
        ("stage.opd.objective.on_policy_share=0.5", "on_policy_share = 0.5.*has none"),
        ("stage.opd.view.name=with_answer", "view 'with_answer'"),
        ("stage.opd.view.name=with_solution", "view 'with_solution'"),
        ("stage.opd.view.name=with_verdict", "view 'with_verdict'"),
        ("stage.opd.view.name=with_feedback", "view 'with_feedback'"),
        ("stage.sft.analyst.name=rules", "analyst"),
    ],
)
def test_what_recorded_turns_cannot_give_is_refused(change, told) -> None:
    with pytest.raises(ConfigError, match=told):
        wiring.check(config(change))


def test_recorded_answers_may_be_learnt_for_a_share_of_the_turns() -> None:
    share = ("stage.opd.data.use=turns", "stage.opd.objective.on_policy_share=0.5")
    wiring.check(config(*share))
