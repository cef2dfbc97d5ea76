from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError, DataError
from distill.types import SPLITS, Task
from evals.envs import build_env
from evals.envs.base import check_disjoint, split_of
from evals.envs.table import Dataset, Jsonl, Parquet, Table

Row = dict[str, Any]


def questions(n: int = 300) -> list[Row]:
    return [
        {"question": f"{i} + 1 = ?", "gold": i + 1, "topic": ("add", "plus")[i % 2]}
        for i in range(n)
    ]


COLUMNS = {"prompt": "question", "answer": "gold", "domain": "topic"}


def write(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def every_task(env: Table) -> list[Task]:
    return [task for split in SPLITS for task in _split(env, split)]


def _split(env: Table, split: Any) -> list[Task]:
    return list(env.tasks(split))


def test_the_three_formats_give_the_same_tasks(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = questions()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "q")
    envs: list[Table] = [
        Jsonl(path=write(tmp_path / "q.jsonl", rows), columns=COLUMNS, grader="number"),
        Parquet(path=str(tmp_path / "q.parquet"), columns=COLUMNS, grader="number"),
        Dataset(path=str(tmp_path / "q"), columns=COLUMNS, grader="number"),
    ]
    contents = [
        {(task.prompt, task.answer, task.domain) for task in every_task(env)} for env in envs
    ]
    assert contents[0] == contents[1] == contents[2]
    assert len(contents[0]) == 300
    assert [env.domains for env in envs] == [("add", "plus")] * 3


def test_hash_splits_never_overlap_and_depend_on_the_prompt_alone(tmp_path: Path) -> None:
    env = Jsonl(path=write(tmp_path / "q.jsonl", questions()), columns=COLUMNS)
    splits = {split: env.tasks(split) for split in SPLITS}
    check_disjoint(splits)
    assert all(split_of(task.id) == split for split in SPLITS for task in splits[split])
    assert 200 < len(splits["train"]) < 270


def test_tasks_come_in_turn_over_the_domains_and_in_an_order_fixed_by_the_seed(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "q.jsonl", questions())
    first, again, other = (Jsonl(path=path, columns=COLUMNS, seed=seed) for seed in (1, 1, 2))
    assert [task.domain for task in first.tasks("train")[:4]] == ["add", "plus", "add", "plus"]
    assert first.tasks("train") == again.tasks("train")
    assert first.tasks("train") != other.tasks("train")
    assert set(map(id_of, first.tasks("train"))) == set(map(id_of, other.tasks("train")))


def id_of(task: Task) -> str:
    return task.id


def test_an_episode_grades_one_reply(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", questions())
    env = build_env("jsonl", {"path": path, "columns": COLUMNS, "grader": "number"}, seed=0)
    task = env.tasks("train")[0]
    episode = env.start(task)
    assert episode.reply(f"it is {task.answer}.0").done
    assert episode.reward().value == 1.0


def test_a_split_column_decides_and_other_names_are_mapped(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": "a", "part": ("train", "dev")[i > 5]} for i in range(9)]
    env = Jsonl(path=write(tmp_path / "q.jsonl", rows), split="part", splits={"dev": "gate"})
    assert (len(env.tasks("train")), len(env.tasks("gate")), len(env.tasks("test"))) == (6, 3, 0)
    unmapped = Jsonl(path=env.path, split="part")
    with pytest.raises(DataError, match=r"line 7: column 'part' holds 'dev'.*data\.splits"):
        unmapped.tasks("train")


def test_the_named_splits_of_a_dataset_are_a_column(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list([{"prompt": "a", "answer": "b"}]),
            "validation": datasets.Dataset.from_list([{"prompt": "c", "answer": "d"}]),
        }
    ).save_to_disk(tmp_path / "q")
    env = Dataset(path=str(tmp_path / "q"), split="split", splits={"validation": "gate"})
    assert [task.answer for task in env.tasks("gate")] == ["d"]


def test_messages_keep_their_roles_and_a_closing_assistant_message_is_the_solution(
    tmp_path: Path,
) -> None:
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    path = write(tmp_path / "q.jsonl", [{"talk": talk, "answer": "hello", "split": "gate"}])
    env = Jsonl(path=path, columns={"messages": "talk", "answer": "answer"}, split="split")
    (task,) = env.tasks("gate")
    assert [message.role for message in task.prompt] == ["system", "user"]
    assert task.meta == {"solution": "hello"}


def test_privileged_columns_become_views_and_never_the_prompt(tmp_path: Path) -> None:
    row = {"q": "1+1", "a": "2", "why": "count", "who": "maths", "split": "train"}
    columns: Mapping[str, str | Mapping[str, str]] = {
        "prompt": "Question: {q}",
        "answer": "a",
        "lesson": "why",
        "key": "who",
        "views": {"hint": "{prompt}\nHint: {why}", "bare": "why"},
    }
    env = Jsonl(path=write(tmp_path / "q.jsonl", [row]), columns=columns, split="split")
    (task,) = env.tasks("train")
    assert task.prompt[0].content == "Question: 1+1"
    assert task.domain == "q"
    assert task.meta == {
        "lesson": "count",
        "key": "maths",
        "views": {"hint": "Question: 1+1\nHint: count", "bare": "count"},
    }


def test_several_files_are_one_table(tmp_path: Path) -> None:
    rows = questions(40)
    write(tmp_path / "a.jsonl", rows[:20])
    write(tmp_path / "b.jsonl", rows[20:])
    for path in (tmp_path, tmp_path / "*.jsonl"):
        assert len(every_task(Jsonl(path=str(path), columns=COLUMNS))) == 40


def test_repeated_rows_are_used_once_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = Jsonl(path=write(tmp_path / "q.jsonl", questions(30) * 2), columns=COLUMNS)
    assert len(every_task(env)) == 30
    assert "30 repeated rows are used once" in caplog.text


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        pytest.param("", {}, "no row found", id="empty file"),
        pytest.param("\n\n", {}, "no row found", id="blank lines only"),
        pytest.param(
            '{"prompt": "a", "answer": "b"}\n{"prompt": "a", ',
            {},
            r"q\.jsonl line 2: not valid JSON",
            id="broken line",
        ),
        pytest.param("[1]\n", {}, "line 1: expected a JSON object", id="not an object"),
        pytest.param(b"\xff\xfe\n", {}, "line 1: not valid JSON", id="not UTF-8"),
        pytest.param(
            '{"prompts": "a", "answer": "b"}\n',
            {},
            "names the column 'prompt', which no row has; did you mean 'prompts'",
            id="missing column",
        ),
        pytest.param(
            '{"prompt": "a", "answer": "b"}\n',
            {"split": "splot"},
            "data.split names the column 'splot'",
            id="missing split column",
        ),
        pytest.param(
            '{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": null}\n',
            {},
            "line 2: 'answer' is missing or null",
            id="null answer",
        ),
        pytest.param(
            '{"prompt": "a", "answer": "so it is #### 4"}\n',
            {"grader": "number"},
            "line 1: grader 'number' expects a number as the answer",
            id="answer that is no number",
        ),
        pytest.param(
            '{"prompt": "a", "answer": " "}\n',
            {"grader": "contains"},
            "does not accept the answer ' ' itself",
            id="answer that no reply can match",
        ),
        pytest.param(
            '{"prompt": "", "answer": "b"}\n', {}, "prompt 'prompt' is missing", id="empty prompt"
        ),
        pytest.param(
            '{"prompt": ["a"], "answer": "b"}\n', {}, "must hold text or a number", id="list"
        ),
        pytest.param(
            '{"prompt": "\\ud800", "answer": "b"}\n', {}, "surrogate", id="half a character"
        ),
        pytest.param(
            '{"prompt": "a", "answer": "b", "s": "train"}\n'
            '{"prompt": "a", "answer": "b", "s": "gate"}\n',
            {"split": "s"},
            r"line 2: the same prompt as .*line 1, but split 'gate' instead of 'train'",
            id="one prompt in two splits",
        ),
        pytest.param(
            '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "c"}\n',
            {},
            "but answer 'c' instead of 'b'",
            id="one prompt with two answers",
        ),
        pytest.param(
            '{"m": [{"role": "robot", "content": "a"}], "answer": "b"}\n',
            {"columns": {"messages": "m", "answer": "answer"}},
            "a message of 'm' needs a role",
            id="unknown speaker",
        ),
        pytest.param(
            '{"m": [{"role": "assistant", "content": "a"}], "answer": "b"}\n',
            {"columns": {"messages": "m", "answer": "answer"}},
            "must end with a user message",
            id="no question",
        ),
    ],
)
def test_unusable_rows_are_one_line_errors(
    tmp_path: Path, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        Jsonl(path=str(path), **options).tasks("train")
    assert "\n" not in str(caught.value)


def test_an_empty_split_says_how_many_tasks_the_others_have(tmp_path: Path) -> None:
    env = Jsonl(path=write(tmp_path / "q.jsonl", questions(1)), columns=COLUMNS)
    with pytest.raises(DataError, match=r"no task in split '(train|gate)' \(tasks per split: "):
        [env.tasks(split) for split in ("train", "gate")]


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file at .*nowhere\.jsonl"):
        Jsonl(path=str(tmp_path / "nowhere.jsonl")).tasks("train")
    (tmp_path / "q.parquet").write_text("text")
    with pytest.raises(DataError, match=r"q\.parquet: not a readable Parquet file"):
        Parquet(path=str(tmp_path / "q.parquet")).tasks("train")
    with pytest.raises(DataError, match="save_to_disk"):
        Dataset(path=str(tmp_path)).tasks("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"promt": "a"}}, "unknown role 'promt'; did you mean 'prompt'"),
        ({"columns": {"answer": "a"}}, "either 'prompt' or 'messages'"),
        ({"columns": {"prompt": "a", "messages": "b"}}, "either 'prompt' or 'messages'"),
        ({"columns": {"prompt": "a"}}, "compares with an answer"),
        ({"columns": {"prompt": "a", "answer": "b", "views": "c"}}, "a table of views"),
        ({"columns": {"prompt": {"a": "b"}, "answer": "b"}}, "a column name"),
        ({"grader": "exakt"}, "did you mean 'exact'"),
        ({"splits": {"dev": "gait"}}, "unknown split 'gait'"),
    ],
)
def test_wrong_options_are_refused_before_any_file_is_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Jsonl(path="nowhere", **options)
