"""`distill logs` and `distill curriculum` as a person and as a program use them."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from distill.curriculum.examples import read_plan
from distill.curriculum.ingest import Progress
from distill.curriculum.store import LogStore
from distill.errors import ConfigError
from flows import cli, logs_taking
from flows.cli import main
from flows.curricula_reading import find_curriculum
from flows.logs_redaction import mask
from flows.logs_showing import clipped, when
from logged_homes import built, call, calls, filled_store, id_of, light_app, write_log

HOSTILE = "\x1b[2J\u202eevil\x07"


@pytest.fixture(autouse=True)
def _only_commands_about_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", light_app())


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows: list[Any] = calls()
    path = write_log(tmp_path / "gateway.jsonl", rows)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"broken": \n{"request_id": 5}\n')
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a store `main` and a curriculum `mine` of it. Tests only read it."""
    home = tmp_path_factory.mktemp("home")
    filled_store(home / "logs" / "main", write_log(home / "gateway.jsonl", calls()))
    built(home / "curricula" / "mine", home / "logs" / "main")
    return home


def run(home: Path, *words: str | Path) -> int:
    return main([*map(str, words), "--home", str(home)])


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_the_commands_stand_in_the_help_of_distill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("logs", "curriculum", "forget"))


# -- import ---------------------------------------------------------------------------------------


def test_an_import_says_what_was_read_stored_and_dropped_and_where(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "logs", "import", log, "--tier", "small=0", "--tier", "large=2") == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["gateway", "14", "12", "2", "1", "0", "litellm"] in lines
    assert "not valid JSON" in out
    assert "gateway.jsonl, row 13: EOF" in out
    assert "gateway.jsonl, row 14: fields request_id" in out
    with LogStore.open(tmp_path / "logs" / "main") as store:
        served = {(t.served.model, t.served.tier) for b in range(store.num_buckets)
                  for t in store.turns(b) if t.served}  # fmt: skip
    assert served == {("small", 0), ("large", 2)}


def test_an_import_with_nothing_new_is_no_failure(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("logs", "import", log, "--store", "s", "--json")
    assert run(tmp_path, *words) == 0
    first = told(capsys)
    assert run(tmp_path, *words) == 0
    again = told(capsys)
    assert (first["turns"], again["turns"]) == (12, 12)
    (source,) = first["sources"]
    assert (source["read"], source["stored"], source["dropped"]) == (
        14,
        12,
        {"bad_json": 1, "unknown_format": 1},
    )
    assert {(one["reason"], one["row"]) for one in first["first"]} == {
        ("bad_json", 13),
        ("unknown_format", 14),
    }
    (source,) = again["sources"]
    assert (source["read"], source["skipped"], source["files"]) == (0, 1, 0)


def test_several_files_under_one_name_are_one_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_log(tmp_path / "one.jsonl", calls()[:4])
    two = write_log(tmp_path / "two.jsonl", calls()[4:])
    assert run(tmp_path, "logs", "import", one, two, "--name", "gateway", "--json") == 0
    (source,) = told(capsys)["sources"]
    assert (source["source"], source["stored"], source["files"]) == ("gateway", 12, 2)
    assert run(tmp_path, "logs", "import", one, two, "--store", "b", "--json") == 0
    assert [s["source"] for s in told(capsys)["sources"]] == ["one", "two"]


def test_a_cut_file_says_where_the_next_import_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in calls()).encode()
    path = tmp_path / "gateway.jsonl.gz"
    path.write_bytes(gzip.compress(text)[:-200])
    assert run(tmp_path, "logs", "import", path) == 0
    out = capsys.readouterr().out
    assert "stopped at" in out
    assert "the next import goes on there" in out


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (None, [], "nothing could be read"),
        ("not json\nnor this\n", [], "none of 2 rows could be used; 2 of them: not valid JSON"),
        ('{"a": 1}\n', [], "no importer recognises the row"),
        ("", ["--tier", "small"], "--tier expects NAME=VALUE"),
        ("", ["--tier", "small=9"], "'small': expected a tier from 0 to 3, found 9"),
        ("", ["--format", "odd"], "'odd' is unknown"),
        ("", ["--store", "a/b"], "plain folder name"),
        ("", ["--redact", "none", "--entities", "a:b"], "on top of the rules"),
    ],
)
def test_what_cannot_be_imported_ends_with_two(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: list[str],
    said: str,
) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    assert run(tmp_path, "logs", "import", path, *words) == 2
    assert said in capsys.readouterr().err


def test_an_empty_log_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("")
    assert run(tmp_path, "logs", "import", path) == 0
    assert "0 rows read" in capsys.readouterr().out
    assert run(tmp_path, "logs", "inspect") == 0
    assert "no call yet" in capsys.readouterr().err


def test_personal_data_is_taken_out_before_it_is_stored_unless_it_is_asked_for(
    tmp_path: Path,
) -> None:
    said = json.dumps([{"role": "user", "content": "I am zoe@example.com"}])
    path = write_log(tmp_path / "g.jsonl", [call(1, 0, user="zoe@example.com", messages=said)])
    for store, words in (("a", []), ("b", ["--redact", "none"])):
        assert run(tmp_path, "logs", "import", path, "--store", store, *words) == 0
        with LogStore.open(tmp_path / "logs" / store) as held:
            (turn,) = [t for b in range(held.num_buckets) for t in held.turns(b)]
        assert ("zoe@example.com" in str(turn)) is (store == "b")


def test_without_consent_nothing_is_stored(tmp_path: Path, log: Path) -> None:
    assert run(tmp_path, "logs", "import", log, "--no-consent") == 0
    with LogStore.open(tmp_path / "logs" / "main") as held:
        assert held.num_turns == 0
        assert held.drop_counts()["gateway"]["no_consent"] >= 12


def test_a_mapping_reads_a_log_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"n": "x1", "who": "ann", "ask": "hi", "at": 1788228780}) + "\n")
    words = ["--format", "mapped", "--map", "source_id=n", "--map", "user=who", "--map", "ts=at"]
    assert run(tmp_path, "logs", "import", path, *words) == 0
    capsys.readouterr()
    assert run(tmp_path, "logs", "inspect", "x1", "--json") == 0
    turn = told(capsys)
    assert (turn["source_id"], turn["ts"]) == ("x1", 1788228780_000)


def test_a_configuration_names_the_sources(tmp_path: Path, log: Path) -> None:
    config = tmp_path / "logs.toml"
    config.write_text(
        f'[curriculum]\nstore = "kept"\n[[curriculum.sources]]\nname = "gw"\npath = "{log}"\n'
        "tiers = { small = 0 }\n"
    )
    assert run(tmp_path, "logs", "import", "--config", config) == 0
    with LogStore.open(tmp_path / "logs" / "kept") as held:
        assert {f.source for f in held.files()} == {"gw"}
    assert run(tmp_path, "logs", "import", log, "--config", config) == 2
    config.write_text('[[curriculum.sources]]\npath = "stage:traffic"\n')
    assert run(tmp_path, "logs", "import", "--config", config) == 2


def test_progress_tells_rows_and_speed_and_no_steering_signs() -> None:
    out = io.StringIO()
    with logs_taking.open_bar(out) as bar:
        assert isinstance(bar, logs_taking._Lines)
        bar._last -= 60
        bar(Progress(source=HOSTILE, file="/x/y.jsonl", rows=1500, position=50, size=200))
        bar(Progress(source="s", file="/x/y.jsonl", rows=1600, position=90, size=200))
    (line,) = out.getvalue().splitlines()
    assert "1,500 rows, 25% of y.jsonl" in line
    assert "\x1b" not in line


def test_names_of_sources_come_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "logs.d").mkdir()
    for path, name in (
        ("a/gateway.jsonl.gz", "gateway"),
        ("gate.way", "gate"),
        (str(tmp_path / "logs.d"), "logs.d"),
        ("day/*.jsonl", "day"),
    ):
        assert logs_taking.source_name(path) == name
    assert logs_taking.tiers_of(["a=b=1", "x=simple"]) == {"a=b": 1, "x": "simple"}


# -- looking --------------------------------------------------------------------------------------


def test_a_store_is_counted_and_its_newest_calls_are_shown(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(finished, "logs", "inspect", "--json", "-n", "3") == 0
    facts = told(capsys)
    assert (facts["turns"], facts["sessions"]) == (12, 6)
    source = facts["sources"]["gateway"]
    assert (source["turns"], source["sessions"], source["formats"]) == (12, 6, {"litellm": 12})
    assert when(source["first"]) == "2026-09-01 00:00:00"
    assert [c["source_id"] for c in facts["newest"]] == ["g-5-1", "g-5-0", "g-4-1"]
    assert run(finished, "logs", "inspect") == 0
    out = capsys.readouterr().out
    assert "12 calls in 6 sessions" in out
    assert id_of("gateway", 5, 1) in out


def test_one_call_is_shown_in_four_layers(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = id_of("gateway", 2, 1)
    for words in (name, name[:9], "g-2-1"):
        assert run(finished, "logs", "inspect", words) == 0
        out = capsys.readouterr().out
        assert "source id: g-2-1" in out
        assert "prediction: not logged" in out
        assert "served: model large; tier 2" in out
        assert "graded" in out
        assert "[assistant] answer\n  reply 2-1" in out
    assert run(finished, "logs", "inspect", "zzz") == 2
    assert run(finished, "logs", "inspect", "") == 0


def test_coverage_names_models_that_no_tier_is_known_of(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "logs", "import", log, "--tier", "small=0") == 0
    capsys.readouterr()
    assert run(tmp_path, "logs", "coverage", "--json") == 0
    found = told(capsys)
    assert found["sources"]["gateway"]["layers"]["served"] == 12
    assert found["sources"]["gateway"]["layers"]["outcome"] == 12
    assert found["models_without_tier"] == {"gateway": {"large": 6}}
    assert run(tmp_path, "logs", "coverage") == 0
    out = capsys.readouterr().out
    assert "no tier is known for large (6)" in out
    assert "--tier large=0" in out


def test_dropped_rows_are_listed_with_their_place(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "logs", "import", log) == 0
    capsys.readouterr()
    assert run(tmp_path, "logs", "drops", "--json", "--reason", "bad_json") == 0
    found = told(capsys)
    assert found["total"] == {"bad_json": 1}
    (row,) = found["rows"]
    assert (row["number"], row["reason"]) == (13, "bad_json")
    assert run(tmp_path, "logs", "drops", "-n", "1") == 0
    both = capsys.readouterr()
    assert "1: no importer recognises the row (unknown_format)" in both.out
    assert "1 of 2 shown" in both.err
    assert run(tmp_path, "logs", "drops", "--reason", "bad_jsn") == 2
    assert "did you mean 'bad_json'" in capsys.readouterr().err


def test_redaction_is_shown_masked_and_written_as_rows_that_can_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.dumps([{"role": "user", "content": "I am zoe@example.com, again zoe@example.com"}])
    log = write_log(tmp_path / "g.jsonl", [call(1, 0, user="zoe", messages=said), *calls()[:2]])
    out = tmp_path / "clean.jsonl"
    assert main(["logs", "redact", str(log), "--out", str(out), "--json"]) == 0
    found = told(capsys)
    assert (found["rows"], found["records"], found["touched"]) == (3, 3, 1)
    assert found["counts"]["EMAIL"] >= 1
    assert found["examples"]["EMAIL"] == ["z**@e******.c**"]
    assert "zoe@example.com" not in out.read_text()
    assert "[EMAIL_1]" in out.read_text()
    assert main(["logs", "redact", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "an e-mail address" in shown
    assert "zoe@example.com" not in shown
    assert run(tmp_path, "logs", "import", out) == 0
    with LogStore.open(tmp_path / "logs" / "main") as held:
        assert held.num_turns == 3
    assert main(["logs", "redact", str(log), "--out", str(log)]) == 2
    assert main(["logs", "redact", str(tmp_path / "none")]) == 2


def test_a_mask_keeps_the_shape_and_no_more() -> None:
    assert mask("zoe.miller@example.com") == "z**.m*****@e******.c**"
    assert mask("4111 1111") == "4*** 1***"
    assert len(mask("x" * 99)) == 28


def test_hostile_words_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.dumps([{"role": "user", "content": f"hello {HOSTILE}"}])
    rows = [call(1, 0, user=HOSTILE, messages=said, model=HOSTILE, session_id=HOSTILE)]
    log = write_log(tmp_path / "g.jsonl", rows)
    assert run(tmp_path, "logs", "import", log, "--redact", "none") == 0
    assert run(tmp_path, "logs", "inspect") == 0
    assert run(tmp_path, "logs", "inspect", "g-1-0") == 0
    assert run(tmp_path, "logs", "coverage") == 0
    out = capsys.readouterr().out
    assert "evil" in out
    assert not set(out) & set(HOSTILE[:1] + "\u202e\x07")


def test_a_store_that_is_not_there_is_named_with_those_that_are(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(finished, "logs", "coverage", "--store", "x") == 2
    assert "stores: main" in capsys.readouterr().err
    assert run(tmp_path, "logs", "inspect") == 2
    assert "distill logs import" in capsys.readouterr().err


def test_long_texts_say_how_much_is_left_out() -> None:
    assert clipped("a" * 4100).endswith("... 100 more characters; see --json")
    assert when(None) is None
    assert when(10**20) == f"{10**20} ms"


# -- curriculum -----------------------------------------------------------------------------------


def test_a_curriculum_is_built_into_a_new_folder_with_its_page(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "built"
    words = ("curriculum", "build", "--store", "main", "--out", out)
    assert run(finished, *words) == 0
    said = capsys.readouterr()
    assert "12 calls, 12 turns of 6 sessions" in said.out
    assert f"page: {out / 'curriculum.html'}" in said.out
    assert "no [data] is named" in said.err
    assert "<!doctype html>" in (out / "curriculum.html").read_text()[:20]
    assert run(finished, *words) == 2
    assert "exists already" in capsys.readouterr().err


def test_values_of_the_command_line_reach_the_curriculum(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("curriculum", "build", "curriculum.examples=4", "curriculum.near_duplicate=0")
    assert run(finished, *words, "--out", tmp_path / "few", "--json") == 0
    table = told(capsys)
    assert table["summary"]["counts"]["examples"] == 4
    assert read_plan(tmp_path / "few").num_rows == 4
    assert run(finished, "curriculum", "build", "curriculum.exmples=4") == 2


def test_a_turn_is_explained_whole(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = id_of("gateway", 1, 0)
    assert run(finished, "curriculum", "explain", name[:10], "--json") == 0
    table = told(capsys)
    assert (table["id"], table["session_id"], table["served"]) == (name, "g-s1", 0)
    assert (table["result"], table["rung"]) == ("success", "program")
    assert [c["source_id"] for c in table["calls"]] == ["g-1-0"]
    assert table["example"]["messages"][-1]["content"] == "reply 1-0"
    assert table["example"]["messages"][-1]["trained"] is True
    assert run(finished, "curriculum", "explain", name) == 0
    out = capsys.readouterr().out
    for words in ("in: stage", "demand: score", "outcome: success, a program checked it",
                  "profile: goal attainment PASS", "<- learnt word for word"):  # fmt: skip
        assert words in out
    failed = id_of("gateway", 0, 0)
    assert run(finished, "curriculum", "explain", failed) == 0
    out = capsys.readouterr().out
    assert "outcome: failure" in out
    assert "learnt word for word" not in out
    assert run(finished, "curriculum", "explain", "zz") == 2
    assert run(finished, "curriculum", "explain", "") == 2


def test_a_preview_shows_the_first_examples_of_each_stage_in_order(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan(finished / "curricula" / "mine")
    pairs = list(zip(plan["stage"].to_pylist(), plan["id"].to_pylist(), strict=True))
    assert run(finished, "curriculum", "preview", "-n", "2", "--json") == 0
    table = told(capsys)
    expected = [name for s in (1, 2, 3) for name in [n for t, n in pairs if t == s][:2]]
    assert [one["id"] for one in table["examples"]] == expected
    assert run(finished, "curriculum", "preview", "--stage", "2", "-n", "1", "--in", "mine") == 0
    out = capsys.readouterr().out
    assert out.count("== stage 2") == 1
    assert "== stage 1" not in out
    assert "[user]" in out
    assert run(finished, "curriculum", "preview", "--stage", "9") == 2


def test_a_curriculum_is_found_by_folder_name_and_run(finished: Path, tmp_path: Path) -> None:
    mine = finished / "curricula" / "mine"
    assert find_curriculum(finished) == mine
    assert find_curriculum(finished, "mine") == mine
    assert find_curriculum(tmp_path, str(mine)) == mine
    final = tmp_path / "runs" / "r" / "stages" / "c" / "final"
    final.mkdir(parents=True)
    (final / "plan.arrow").touch()
    assert find_curriculum(tmp_path, "r") == final
    for words, said in (("no", "no folder of a curriculum"), ("", "")):
        if words:
            with pytest.raises(ConfigError, match=said):
                find_curriculum(finished, words)
    with pytest.raises(ConfigError, match="no curriculum in"):
        find_curriculum(tmp_path / "empty")
