from __future__ import annotations

import re

import pytest

from distill.errors import ConfigError, DataError
from distill.types import SPLITS, Message, Task, task_id
from evals.envs import build_env
from evals.envs.base import SingleTurn, check_disjoint, split_of
from evals.envs.world import World, grade
from evals.envs.world_families import FAMILIES
from evals.envs.world_rules import (
    ALPHABET,
    END,
    ONE_STEP,
    PAD,
    PRIORS,
    RULES,
    Draws,
    apply,
    last_result,
    work,
)

EVERY = tuple(FAMILIES)
RECORDED = [
    "sort:5045206=",
    "xch:dhaadc=",
    "B1:gaed=",
    "P2:cghg=",
    "X1#b:bfge=",
    "d2175.rev:h+b+e=",
    "E2{bcfeg}fdeba=",
]


def first(domain: str, **options: object) -> Task:
    return World(domains=(domain,), **options).tasks("train")[0]  # type: ignore[arg-type]


def content(task: Task) -> str:
    return task.prompt[-1].content


def test_equal_options_give_equal_tasks_and_another_seed_gives_others() -> None:
    one = World(seed=3, domains=EVERY).tasks("gate")[:70]
    assert one == World(seed=3, domains=EVERY).tasks("gate")[:70]
    assert [t.id for t in one] != [t.id for t in World(seed=4, domains=EVERY).tasks("gate")[:70]]


def test_tasks_are_the_same_on_every_machine() -> None:
    world = World(seed=0, domains=EVERY)
    assert [content(task) for task in world.tasks("train")[:7]] == RECORDED


def test_domains_take_turns_and_do_not_depend_on_each_other() -> None:
    both = World(domains=("sort", "rule")).tasks("train")
    alone = World(domains=("rule",)).tasks("train")
    assert [task.domain for task in both[:4]] == ["sort", "rule", "sort", "rule"]
    assert both[1:40:2] == alone[:20]


def test_a_domain_named_twice_comes_up_twice_as_often_without_repeating_itself() -> None:
    twice = World(domains=("rule", "sort", "rule")).tasks("train")[:30]
    alone = World(domains=("rule",)).tasks("train")[:20]
    assert [task for task in twice if task.domain == "rule"] == alone


def test_splits_never_share_a_prompt_and_evaluation_splits_never_repeat_one() -> None:
    world = World(domains=EVERY, gate_size=30)
    splits = {split: world.tasks(split)[:210] for split in SPLITS}
    check_disjoint(splits)
    for split, tasks in splits.items():
        assert {split_of(task.id) for task in tasks if "pretrain" not in task.domain} == {split}
        if split != "train":
            assert len({task.id for task in tasks}) == 210


def test_split_shares_are_80_5_10_5_per_cent() -> None:
    ids = [task_id("x", (Message(role="user", content=str(i)),)) for i in range(4000)]
    shares = {split: sum(split_of(i) == split for i in ids) / 4000 for split in SPLITS}
    assert shares == pytest.approx(
        {"train": 0.8, "evolve": 0.05, "gate": 0.1, "test": 0.05}, abs=0.02
    )


def test_a_task_in_two_splits_is_an_error_that_names_it() -> None:
    task = first("sort")
    with pytest.raises(DataError, match=f"{task.id}.*'train' and in 'gate'"):
        check_disjoint({"train": [task], "gate": [task]})


def test_the_question_of_a_pretraining_hint_is_never_asked_by_another_split() -> None:
    for task in World(domains=("pretrain",)).tasks("train")[:200]:
        tag, text = content(task)[:2], re.split(r"[\]}:=]", content(task))[-2]
        if ":" not in content(task):
            bare = (Message(role="user", content=f"{tag}:{text}="),)
            assert split_of(task_id("world", bare)) == "train"


def test_training_tasks_are_made_when_read() -> None:
    tasks = World(domains=("sort", "rule", "tools")).tasks("train")
    assert len(tasks) == 3_000_000
    assert tasks[-1] == tasks[2_999_999] != tasks[0]
    assert [task.id for task in tasks[6:0:-3]] == [tasks[6].id, tasks[3].id]
    with pytest.raises(IndexError):
        tasks[3_000_000]


@pytest.mark.parametrize(
    "domain", [d for d in EVERY if d not in ("tools", "calls", "calls_pretrain")]
)
def test_the_worked_solution_is_right_and_anything_after_it_is_wrong(domain: str) -> None:
    world = World(domains=(domain,), deliberate_share=0.3)
    for task in world.tasks("train")[:100]:
        solution = task.meta["solution"]
        assert END not in solution
        turn = (episode := world.start(task)).reply(solution)
        assert turn.done
        assert turn.reward == episode.reward().value == 1.0
        for wrong in ("", solution[:-1], solution + "a", solution + solution, solution + " "):
            assert grade(wrong, task).value == float(last_result(wrong) == task.answer != wrong)


def test_a_reply_that_never_ends_is_wrong() -> None:
    for task in World().tasks("train")[:30]:
        assert grade(task.meta["solution"] + "=" * 5, task).value == 0.0


def test_the_code_letter_is_reported_but_not_graded() -> None:
    task = next(t for t in World(domains=("rule",)).tasks("train") if content(t)[0] == "K")
    right, other = f"r.{task.answer}", f"s.{task.answer}"
    assert grade(right, task).parts == {"rule": 1.0}
    assert (grade(other, task).value, grade(other, task).parts) == (1.0, {"rule": 0.0})


def test_a_plain_family_takes_no_work_in_front_of_the_answer() -> None:
    task = first("sort")
    assert grade(f"s.{task.answer}", task).value == 0.0


def test_views_show_the_hint_or_the_answer_and_leave_the_question() -> None:
    for task in World(domains=("rule", "rule2", "deliberate")).tasks("train")[:60]:
        head, text = content(task).split(":")
        views = task.meta["views"]
        assert views["hint"] == f"{head}[{task.meta['lesson']}]{text}"
        assert views["answer"] == f"{head}{{{task.answer}}}{text}"


def test_a_tag_always_follows_its_hidden_rule() -> None:
    tasks = World(domains=("rule",)).tasks("gate")[:200]
    assert {content(task)[0] for task in tasks} == set(ONE_STEP)
    for task in tasks:
        head, text = content(task).rstrip("=").split(":")
        assert task.answer == apply(ONE_STEP[head[0]], text)


def test_every_symbol_of_every_text_is_in_the_alphabet() -> None:
    assert (ALPHABET.index(PAD), ALPHABET.index(END)) == (0, 1)
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    for task in World(domains=EVERY, deliberate_share=0.3).tasks("train")[:700]:
        texts = [content(task), *task.meta.get("views", {}).values()]
        texts += [task.meta.get("solution", ""), *map("".join, task.meta.get("turns", ()))]
        assert set("".join(texts)) <= set(ALPHABET[2:])


def test_lengths_vary_within_the_bounds() -> None:
    tasks = World(domains=("sort",), sort_length=(2, 5)).tasks("train")[:100]
    assert {len(task.answer or "") for task in tasks} == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("rev", "hacf"),
        ("srt", "acfh"),
        ("inc", "gdba"),
        ("lft", "cahf"),
        ("xch", "hcaf"),
        ("two", "ffcah"),
        ("nov", "fch"),
        ("odd", "fa"),
    ],
)
def test_rules_do_what_their_names_say(name: str, result: str) -> None:
    assert RULES[name]("fcah") == result


def test_two_steps_show_their_work() -> None:
    assert work(("rev", "inc"), "fcah") == "r.hacf|i.abdg"
    assert last_result("i.gdba?r.hacf") == "hacf"


def test_the_decoy_of_a_tag_is_never_its_rule() -> None:
    assert len(PRIORS) == 52
    assert all(true != decoy for true, decoy in PRIORS.values())


def test_bare_pretraining_prompts_follow_the_prior() -> None:
    world = World(domains=("pretrain",), two_step_share=0.0, prior_true=0.0, prior_decoy=1.0)
    bare = [task for task in world.tasks("train")[:200] if ":" in content(task)]
    assert 30 <= len(bare) <= 90
    for task in bare:
        assert task.meta["solution"][0] == PRIORS[content(task)[0], 1][1][0][0]


def test_draws_are_even_and_never_run_dry() -> None:
    draws = Draws("test")
    counts = [0] * 8
    for _ in range(8000):
        counts[draws.below(8)] += 1
    assert min(counts) > 850


def test_a_tools_episode_answers_calls_and_grades_the_last_reply() -> None:
    world = World(domains=("tools",), tool_keys=(2, 3))
    for task in world.tasks("train")[:20]:
        episode = world.start(task)
        for call, answer in task.meta["turns"]:
            turn = episode.reply(call)
            assert [m.content for m in turn.messages] == [answer]
            assert (turn.messages[0].role, turn.done, turn.valid) == ("tool", False, True)
        last = episode.reply(f"!{task.answer}")
        assert (last.done, last.reward, episode.reward().value) == (True, 1.0, 1.0)
        assert episode.reward().parts == {"asked": 1.0}
        with pytest.raises(DataError, match="is over"):
            episode.reply("?a")


def test_a_tools_episode_refuses_what_it_cannot_read_and_ends() -> None:
    task = first("tools", tool_keys=(1, 1))
    episode = World().start(task)
    turns = [episode.reply(text) for text in ("", "?zz", "?")]
    assert [turn.valid for turn in turns] == [False] * 3
    assert [turn.done for turn in turns] == [False, False, True]
    assert episode.reward().value == 0.0


def test_the_observation_key_of_a_tools_episode_names_what_the_model_has_seen() -> None:
    task = first("tools", tool_keys=(1, 1))
    one, two = World().start(task), World().start(task)
    call = task.meta["turns"][0][0]
    assert one.reply("?h").obs_key == two.reply("bad").obs_key == f"{task.id}:"
    assert one.reply(call).obs_key == f"{task.id}:h"
    assert two.reply(call).obs_key == f"{task.id}:"


def test_an_episode_is_single_use() -> None:
    task = first("sort")
    episode = SingleTurn(task, grade)
    with pytest.raises(DataError, match="before its reply"):
        episode.reward()
    episode.reply("1")
    with pytest.raises(DataError, match="one reply"):
        episode.reply("1")


def test_a_domain_with_too_few_prompts_says_so() -> None:
    world = World(domains=("sort",), sort_length=(1, 1), gate_size=50)
    with pytest.raises(DataError, match="too few"):
        world.tasks("gate")[49]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domain": ["sort"]}, "no option 'domain'.*did you mean 'domains'"),
        ({"domains": ["sorting"]}, "must name some of"),
        ({"domains": []}, "must name some of"),
        ({"gate_size": "many"}, "option 'gate_size' has the wrong type"),
        ({"gate_size": 0}, "must be positive"),
        ({"sort_length": [7, 5]}, "shortest, longest"),
        ({"sort_length": [5]}, "wrong type"),
        ({"sort_symbols": "é"}, "symbols of the alphabet"),
        ({"prior_true": 2}, "from 0 to 1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_env("world", options, seed=0)


def test_options_and_seed_reach_the_world() -> None:
    assert build_env("world", {"domains": ["rule"], "sort_length": [2, 3]}, seed=9) == World(
        seed=9, domains=("rule",), sort_length=(2, 3)
    )
    assert build_env("world", {"seed": 1}, seed=9) == World(seed=1)


def test_an_environment_of_ones_own_is_found_by_path() -> None:
    assert build_env("evals.envs.world:World", {}, seed=5) == World(seed=5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrold", "did you mean 'world'"),
        ("no_such_package:Env", "cannot import 'no_such_package'"),
        ("evals.envs.world:Planet", "has no 'Planet'"),
        ("evals.envs.world:ALPHABET", "must be a class or a factory"),
    ],
)
def test_an_unknown_environment_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_env(name, {}, seed=0)
