"""The gym: short prompts, our own solutions and graders over reasoning-gym generators."""

from __future__ import annotations

import pytest

from distill.errors import ConfigError, DataError, MissingExtra
from distill.types import SPLITS, Task
from evals.envs import build_env
from evals.envs.base import check_disjoint, split_of
from evals.envs.gym import GENERATORS, Gym, answer_of, grade

ALL = tuple(GENERATORS)


def reward(task: Task, text: str) -> float:
    episode = Gym().start(task)
    turn = episode.reply(text)
    assert turn.done
    assert turn.reward == episode.reward().value
    return turn.reward


def generator_score(task: Task) -> float:
    """What the generator's own grader says of our answer, for a question of our own wording."""
    from reasoning_gym.algorithmic import number_sorting

    numbers = task.prompt[-1].content.split(": ")[1].split(", ")
    direction = task.prompt[-1].content.split(":")[0].split(" ")[1]
    expected = sorted(numbers, key=int, reverse=direction == "descending")
    config = number_sorting.NumberSortingConfig(seed=0)
    entry = {"answer": str(expected), "metadata": {"direction": direction}}
    ours = str(str(task.answer).split(", "))
    return number_sorting.NumberSortingDataset(config).score_answer(ours, entry)


@pytest.mark.parametrize("name", ALL)
def test_every_worked_solution_earns_full_marks_and_a_wrong_one_none(name: str) -> None:
    tasks = Gym(generators=(name,)).tasks("train")[:200]
    assert {reward(task, task.meta["solution"]) for task in tasks} == {1.0}
    assert {reward(task, f"Answer: {task.answer}, 1") for task in tasks} == {0.0}


def test_our_answers_equal_those_of_the_generators() -> None:
    from reasoning_gym import create_dataset

    for name in ("chain_sum", "word_sequence_reversal", "spiral_matrix"):
        settings = GENERATORS[name].difficulty
        for item in create_dataset(name, seed=7, size=200, **settings):
            assert GENERATORS[name].solve(item["metadata"]).answer == item["answer"]
    settings = GENERATORS["number_filtering"].difficulty
    for item in create_dataset("number_filtering", seed=7, size=200, **settings):
        expected = ", ".join(item["metadata"]["result"]) or "none"
        assert GENERATORS["number_filtering"].solve(item["metadata"]).answer == expected
    for task in Gym(generators=("number_sorting",)).tasks("train")[:50]:
        assert generator_score(task) == 1.0


@pytest.mark.parametrize(
    ("generator", "metadata", "question", "reply"),
    [
        (
            "number_sorting",
            {"original_numbers": ["56.0", "-0.0", "7.50"], "direction": "ascending"},
            "Sort ascending: 56, 0, 7.5",
            "Answer: 0, 7.5, 56",
        ),
        ("chain_sum", {"expression": "31 - 50 + 22"}, "Compute 31 - 50 + 22",
         "31 - 50 = -19; -19 + 22 = 3. Answer: 3"),
        (
            "number_filtering",
            {"original_numbers": ["5", "9"], "filter_value": "9", "operation": "keep_larger"},
            "Keep numbers larger than 9: 5, 9",
            "5 no, 9 no. Answer: none",
        ),
        (
            "number_filtering",
            {"original_numbers": ["5", "9"], "filter_value": "9", "operation": "remove_smaller"},
            "Remove numbers smaller than 9: 5, 9",
            "5 no, 9 yes. Answer: 9",
        ),
        ("word_sequence_reversal", {"words": ["a", "B", "a"]}, "Reverse: a, B, a",
         "Answer: a, B, a"),
        ("word_sorting", {"original_words": ["Pear", "fig"], "direction": "descending"},
         "Sort descending: pear, fig", "Answer: pear, fig"),
        ("spiral_matrix", {"matrix": [[1, 2, 3], [8, 9, 4], [7, 6, 5]]},
         "Spiral: 1 2 3 / 8 9 4 / 7 6 5", "Answer: 1 2 3 4 5 6 7 8 9"),
        ("spiral_matrix", {"matrix": [[1, 2], [4, 3]]}, "Spiral: 1 2 / 4 3", "Answer: 1 2 3 4"),
    ],
)  # fmt: skip
def test_a_generators_metadata_becomes_a_short_question_and_a_worked_reply(
    generator: str, metadata: dict[str, object], question: str, reply: str
) -> None:
    worked = GENERATORS[generator].solve(metadata)
    assert (worked.question, worked.reply) == (question, reply)


def test_a_prompt_shows_one_solved_example_in_the_style_of_the_solutions() -> None:
    for task in Gym(generators=ALL).tasks("train")[: len(ALL)]:
        system, asked, shown, question = task.prompt
        assert (system.role, system.content) == ("system", "Solve.")
        assert (asked.role, shown.role, question.role) == ("user", "assistant", "user")
        example = GENERATORS[task.domain].solve(GENERATORS[task.domain].example)
        assert (asked.content, shown.content) == (example.question, example.reply)
        assert shown.content.endswith(f"Answer: {example.answer}")
        assert question.content != asked.content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 3", "3"),
        ("1 + 2 = 3. Answer: 3.", "3"),
        ("Answer: 4\nno, Answer: 3\nbye", "3"),
        ("Answer: 3 Answer", "3 Answer"),
        ("Answer:", ""),
        ("3", None),
        ("", None),
    ],
)
def test_the_answer_is_the_line_after_the_last_marker(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_numbers_are_graded_by_value_and_junk_earns_nothing() -> None:
    task = Gym(generators=("chain_sum",)).tasks("train")[0]
    assert reward(task, f"Answer:  {task.answer}.0") == 1.0
    for junk in ("nan", "inf", "", "none", f"{task.answer} {task.answer}", "sNaN", "a"):
        assert reward(task, f"Answer: {junk}") == 0.0
    assert grade("no marker", task).parts == {"format": 0.0}
    assert grade("Answer: x", task).parts == {"format": 1.0}


def test_splits_share_no_question_and_follow_the_hash() -> None:
    env = Gym(generators=ALL, gate_size=30)
    splits = {split: list(env.tasks(split)[:180]) for split in SPLITS}
    check_disjoint(splits)
    for split, tasks in splits.items():
        assert {split_of(task.id) for task in tasks} == {split}
        assert {task.split for task in tasks} == {split}


def test_a_small_pool_keeps_the_questions_of_the_gate_out_of_training() -> None:
    """Single digits leave 200 sums: training meets almost all of its own and none of the gate's."""
    small = {"chain_sum": {"min_digits": 1, "max_digits": 1}}
    env = Gym(generators=("chain_sum",), gate_size=10, difficulty=small)
    gate = {task.id for task in env.tasks("gate")}
    train = {task.id for task in env.tasks("train")[:2000]}
    assert len(gate) == 10
    assert len(train) > 140
    assert not gate & train


def test_a_pool_that_is_too_small_for_the_gate_is_an_error_with_advice() -> None:
    small = {"chain_sum": {"min_digits": 1, "max_digits": 1}}
    env = Gym(generators=("chain_sum",), gate_size=100, difficulty=small)
    with pytest.raises(DataError, match=r"chain_sum.*100 wanted.*data\.gate_size"):
        env.tasks("gate")[0]


def test_held_out_tasks_are_distinct_and_domains_take_turns() -> None:
    env = Gym(generators=ALL, gate_size=40)
    gate = env.tasks("gate")
    assert len(gate) == 40 * len(ALL)
    assert len({task.id for task in gate}) == len(gate)
    assert tuple(task.domain for task in gate[: len(ALL)]) == env.domains == ALL
    assert gate[-1].domain == ALL[-1]
    with pytest.raises(IndexError):
        gate[len(gate)]


def test_equal_seeds_give_equal_tasks_and_other_seeds_others() -> None:
    first, again, other = (Gym(seed=seed, gate_size=20) for seed in (1, 1, 2))
    for split in SPLITS:
        assert first.tasks(split)[:8] == again.tasks(split)[:8]
        assert first.tasks(split)[:8] != other.tasks(split)[:8]


def test_a_far_task_costs_no_more_than_the_first() -> None:
    train = Gym().tasks("train")
    assert len(train) == 1_000_000
    assert train[999_999].domain == "spiral_matrix"


def test_the_answer_view_is_the_question_with_the_answer_as_hint() -> None:
    task = Gym().tasks("train")[0]
    assert task.meta["views"]["answer"] == f"{task.prompt[-1].content} (hint: {task.answer})"
    assert task.meta["lesson"] in task.meta["views"]["hint"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generators": ("number_sort",)}, "did you mean 'number_sorting'"),
        ({"generators": ()}, "empty"),
        ({"generators": ("spiral_matrix", "spiral_matrix")}, "twice"),
        ({"gate_size": 0}, "gate_size must be at least 1"),
        ({"difficulty": {"chain": {}}}, "data.difficulty: unknown 'chain'"),
        ({"difficulty": {"spiral_matrix": {"max_m": 3}}}, "did you mean 'max_n'"),
        (
            {"generators": ("spiral_matrix",), "difficulty": {"spiral_matrix": {"max_n": 0}}},
            "max_n",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Gym(**{"generators": ("spiral_matrix",), **options})
    assert "\n" not in str(caught.value)


def test_the_gym_is_made_by_name_with_lists_as_a_config_file_gives_them() -> None:
    options = {"generators": ["spiral_matrix"], "difficulty": {"spiral_matrix": {"max_n": 5}}}
    env = build_env("gym", options, seed=3)
    assert isinstance(env, Gym)
    assert (env.seed, env.domains) == (3, ("spiral_matrix",))


def test_without_reasoning_gym_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"distill-nightly\[gym\]"):
        Gym(generators=("spiral_matrix",), difficulty={"spiral_matrix": {"max_n": 7}})
