"""The several-call world: its grammar, every transition, and what a base reads of it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from distill.engines.scripted import ScriptedEngine
from distill.errors import ConfigError, DataError
from distill.models import char_tokenizer
from distill.rollout import collect
from distill.tokens import Chat
from distill.types import SPLITS, Message, Sampling, Spoken, Task, task_id
from distill.worked import demonstrate
from evals.envs import build_env
from evals.envs.base import check_disjoint, split_of
from evals.envs.world import World
from evals.envs.world_calls import (
    KEYS,
    LOST,
    TOOLS,
    WON,
    Calls,
    believed_order,
    hidden_orders,
)
from evals.envs.world_rules import ALPHABET, TAGS, Draws

CALLS = World(domains=("calls",))
BASE = World(domains=("calls_pretrain",))
RECORDED = [("W907:9=", "bdc", "958"), ("W121:2=", "bdc", "230"), ("X153:0=", "aeb", "045")]
RECORDED_BASE = "Z753:5="
LONG = World(domains=("calls", "calls_pretrain"), call_order=4, call_turns=6)


def text_of(task: Task) -> str:
    return task.prompt[-1].content


def first(world: World = CALLS) -> Task:
    return world.tasks("train")[0]


def right(task: Task, accepted: int) -> str:
    return f"{task.meta['lesson'][accepted]}{task.meta['call_keys'][accepted]}"


def wrong(task: Task, accepted: int) -> str:
    other = next(t for t in TOOLS if t != task.meta["lesson"][accepted])
    return f"{other}{task.meta['call_keys'][accepted]}"


def bare(task: Task) -> str:
    """The question of a pre-training prompt without its lesson or the attempt after it."""
    head, rest = text_of(task)[:4], text_of(task)[4:]
    return f"{head}:{rest[rest.index(':') + 1]}="


def test_a_prompt_shows_the_tag_a_number_and_the_first_key() -> None:
    for task in CALLS.tasks("train")[:100]:
        tag, number, key = text_of(task)[0], text_of(task)[1:4], text_of(task)[5]
        assert text_of(task) == f"{tag}{number}:{key}="
        assert tag in CALLS.call_tags
        assert int(number) < 1000
        assert key == task.meta["call_keys"][0]


def test_tasks_are_the_same_on_every_machine() -> None:
    tasks = CALLS.tasks("train")[:3]
    found = [(text_of(t), t.answer, t.meta["call_keys"]) for t in tasks]
    assert found == RECORDED
    assert text_of(first(BASE)) == RECORDED_BASE


def test_equal_options_give_equal_tasks_and_another_seed_other_keys_but_the_same_orders() -> None:
    again, other = World(domains=("calls",)), World(domains=("calls",), seed=1)
    assert CALLS.tasks("gate")[:50] == again.tasks("gate")[:50]
    ours, theirs = CALLS.tasks("gate")[:50], other.tasks("gate")[:50]
    assert [t.id for t in ours] != [t.id for t in theirs]
    assert len({(t.meta["key"], t.answer) for t in (*ours, *theirs)}) == len(CALLS.call_tags)


def test_a_tag_always_hides_the_same_order_of_different_tools() -> None:
    tasks = LONG.tasks("gate")[0:160:2]
    assert {t.meta["key"] for t in tasks} == set(LONG.call_tags)
    for task in tasks:
        assert task.answer == task.meta["lesson"] == hidden_orders(4)[text_of(task)[0]][0]
    for length in (2, 3, 4, 5):
        for true, decoy in hidden_orders(length).values():
            assert true != decoy
            assert len(set(true)) == len(set(decoy)) == length


def test_the_first_orders_are_those_of_the_world_that_was_measured() -> None:
    assert hidden_orders(3)["K"] == ("dac", "dbc")
    assert set(hidden_orders(3)) == set(TAGS)


def test_equal_prompts_have_equal_keys_and_all_keys_of_a_task_differ() -> None:
    world = World(domains=("calls",), call_tags="K", call_order=5, call_turns=5)
    found: dict[str, str] = {}
    for task in world.tasks("train")[:3000]:
        assert found.setdefault(text_of(task), task.meta["call_keys"]) == task.meta["call_keys"]
    assert 2000 < len(found) < 2900
    assert all(len(set(keys)) == 5 for keys in found.values())
    # The prompt does not give away the second key: all nine occur about as often.
    seconds = [keys[1] for keys in found.values() if keys[0] == "7"]
    assert min(seconds.count(key) for key in KEYS if key != "7") > len(seconds) / 9 / 2


def test_following_the_lesson_wins_in_as_many_turns_as_the_order_is_long() -> None:
    for world in (CALLS, replace(LONG, domains=("calls",))):
        for task in world.tasks("train")[:50]:
            episode, key = world.start(task), text_of(task)[5]
            for accepted, tool in enumerate(task.meta["lesson"]):
                turn = episode.reply(tool + key)
                assert turn.valid
                key = turn.messages[0].content[1]
                assert turn.done == (accepted + 1 == len(task.meta["lesson"]))
            reward = episode.reward()
            assert (turn.reward, turn.messages[0].content, reward.value) == (1.0, WON, 1.0)
            length = float(world.call_order)
            assert reward.parts == {"correct": 1.0, "accepted": length, "turns": length}


def test_one_mistake_is_affordable_and_two_are_not() -> None:
    for mistakes in (1, 2):
        task = first()
        episode = CALLS.start(task)
        for _ in range(mistakes):
            turn = episode.reply(wrong(task, 0))
            assert (turn.valid, turn.done) == (True, False)
            assert turn.messages[0].content == f">x{task.meta['call_keys'][0]}="
        for accepted in range(4 - mistakes):
            turn = episode.reply(right(task, accepted))
        assert turn.done
        assert turn.reward == episode.reward().value == float(mistakes == 1)
        assert turn.messages[0].content == (WON if mistakes == 1 else LOST)
        assert episode.reward().parts == {
            "correct": float(mistakes == 1),
            "accepted": float(4 - mistakes),
            "turns": 4.0,
        }


@pytest.mark.parametrize("text", ["", "d", "dd", "7d", "D7", "d7.", "d7d7", " d7", "z7", "ab7"])
def test_what_is_no_call_is_invalid_and_costs_a_turn(text: str) -> None:
    calls = Calls("dac", "738", 4)
    assert calls.call(text) is False
    assert (calls.observation, calls.accepted, calls.turns_left) == (">i7=", 0, 3)


def test_the_right_tool_with_a_key_of_another_turn_is_invalid() -> None:
    calls = Calls("dac", "738", 4)
    for key in KEYS.replace("7", ""):
        assert Calls("dac", "738", 4).call(f"d{key}") is False
    assert calls.call("d7")
    assert calls.call("a7") is False
    assert calls.observation == ">i3="
    assert calls.call("a3")
    assert calls.call("c8")
    assert calls.won


def test_an_invalid_call_is_reported_as_such_by_its_turn() -> None:
    task = first()
    turn = CALLS.start(task).reply("nonsense")
    assert (turn.valid, turn.done, turn.reward) == (False, False, 0.0)
    assert turn.messages == (Message(role="tool", content=f">i{task.meta['call_keys'][0]}="),)


def test_an_episode_that_is_over_takes_no_call() -> None:
    task = first()
    episode = CALLS.start(task)
    for _ in range(4):
        episode.reply("")
    with pytest.raises(DataError, match=f"{task.id} is over"):
        episode.reply("a1")


@pytest.mark.parametrize(("order", "turns"), [(3, 4), (3, 3), (4, 6)])
def test_each_state_with_a_lesson_is_reached_and_no_other_is(order: int, turns: int) -> None:
    world = World(domains=("calls",), call_order=order, call_turns=turns)
    task = first(world)
    reached: dict[str | None, str] = {}
    for kinds in itertools.product("+xi", repeat=turns):
        episode, accepted = world.start(task), 0
        for kind in kinds:
            said = {"+": right(task, accepted), "x": wrong(task, accepted), "i": "?"}[kind]
            turn = episode.reply(said)
            reached[turn.obs_key] = task.meta["lesson"][accepted]
            accepted += kind == "+"
            if turn.done:
                break
    assert reached == task.meta["step_lessons"]


def test_siblings_that_read_the_same_words_after_as_many_calls_are_in_the_same_state() -> None:
    task = first()
    one, two, three = (CALLS.start(task) for _ in range(3))
    others = [tool for tool in TOOLS if tool != task.meta["lesson"][0]]
    key = task.meta["call_keys"][0]
    assert one.reply(others[0] + key).obs_key == two.reply(others[1] + key).obs_key
    assert three.reply("").obs_key == f"{task.meta['key']}0:{key}="
    states = [episode.reply(right(task, 0)).obs_key for episode in (one, two, three)]
    assert states[0] == states[1] != states[2]


def test_views_state_the_order_or_leave_room_for_a_lesson_or_an_attempt() -> None:
    task = first()
    head, key = text_of(task).split(":")
    views = task.meta["views"]
    assert views["hint"] == f"{head}[{task.meta['lesson']}]:{key}"
    assert views["skill"].format(context=task.meta["lesson"]) == views["hint"]
    read = views["analyst"].format(attempt="d7>3=a3", outcome="+")
    assert read == f"{text_of(task)}d7>3=a3>+"
    read = views["analyst_truth"].format(attempt="d7", outcome="#", truth="dac")
    assert read == f"{text_of(task)}d7>#dac>"


def test_splits_share_no_prompt_and_evaluation_has_512_different_ones() -> None:
    splits = {split: CALLS.tasks(split)[:512] for split in SPLITS}
    check_disjoint(splits)
    for split, tasks in splits.items():
        assert {split_of(task.id) for task in tasks} == {split}
        if split != "train":
            assert len(CALLS.tasks(split)) == len({text_of(task) for task in tasks}) == 512


def test_no_pretraining_prompt_carries_a_question_of_another_split() -> None:
    for split in SPLITS:
        for task in BASE.tasks(split)[:60]:
            question = (Message(role="user", content=bare(task)),)
            assert split_of(task_id("world", question)) == split


def test_every_symbol_is_in_the_alphabet() -> None:
    for task in LONG.tasks("train")[:600]:
        said = "".join(part.text for part in task.meta.get("dialogue", ()))
        texts = [text_of(task), said, task.meta.get("solution", "")]
        texts += task.meta.get("views", {}).values()
        assert set("".join(texts)) <= set(ALPHABET[2:])


def replayed(world: World, task: Task) -> tuple[list[tuple[Spoken, str]], Calls]:
    """Each call of a dialogue with the call that was right, and the game after the last one; what
    the environment is made to say must be what it would say."""
    game = Calls(task.answer or "", task.meta["call_keys"], world.call_turns)
    played = []
    said = task.meta["dialogue"]
    for part, answer in itertools.zip_longest(said[::2], said[1::2]):
        played.append((part, game.tool + game.key))
        game.call(part.text)
        assert part.role == "assistant"
        assert answer is None or answer == Spoken("tool", game.observation, False)
    return played, game


@pytest.mark.parametrize("world", [BASE, replace(LONG, domains=("calls_pretrain",))])
def test_dialogues_of_a_lesson_learn_right_calls_alone(world: World) -> None:
    mistakes = lessons = 0
    for task in world.tasks("train")[:800]:
        if "[" not in text_of(task)[:5] or "dialogue" not in task.meta:
            continue
        lessons += 1
        order = text_of(task)[5:].partition("]")[0]
        played, game = replayed(world, task)
        assert all(part.text == call for part, call in played if part.trained)
        assert played[-1][0].trained
        mistakes += sum(part.text != call for part, call in played)
        if len(order) == 1:
            assert [part.trained for part, _ in played] == [False] * (len(played) - 1) + [True]
            assert played[-1][0].text[0] == order
        else:
            assert order == task.answer
            assert game.done
    assert 240 < lessons < 360
    assert mistakes > 100


def test_a_bare_dialogue_is_played_by_a_student_that_believes_and_tries_no_tool_twice() -> None:
    world = World(domains=("calls_pretrain",), prior_decoy=1.0, prior_true=0.0, analyst_share=0.0)
    games = won = 0
    for task in world.tasks("train")[:800]:
        if text_of(task)[4] != ":":
            continue
        games += 1
        played, game = replayed(world, task)
        calls = [part.text for part, _ in played]
        assert all(part.trained for part, _ in played)
        assert calls[0][0] == hidden_orders(3)[text_of(task)[0]][1][0]
        for key in task.meta["call_keys"]:
            tried = [call[0] for call in calls if call[1] == key]
            assert len(set(tried)) == len(tried)
        won += game.won
    assert games > 350
    # The belief holds in 40 % of the episodes; the others are rarely won by luck.
    assert 0.38 < won / games < 0.55


def test_belief_follows_the_prior() -> None:
    true, decoy = hidden_orders(3)["K"]
    draws = Draws("belief")
    found = [believed_order(draws, "K", 3, true=0.1, decoy=0.6) for _ in range(4000)]
    assert found.count(true) / 4000 == pytest.approx(0.1 + 0.3 / 60, abs=0.02)
    assert found.count(decoy) / 4000 == pytest.approx(0.6 + 0.3 / 60, abs=0.03)
    assert len(set(found)) == 60


def test_an_analyst_names_the_order_of_a_success_or_of_the_truth_and_nothing_else() -> None:
    world = World(domains=("calls_pretrain",), analyst_share=1.0)
    seen: dict[tuple[str, bool], int] = {}
    for task in world.tasks("train")[:1000]:
        body, _, mark = text_of(task)[7:].rpartition(WON if WON in text_of(task) else LOST)
        outcome = "+" if WON in text_of(task) else "#"
        calls, answers = attempt_of(body)
        accepted = "".join(
            call[0] for call, answer in zip(calls, answers, strict=False) if len(answer) == 1
        )
        if outcome == "+":
            accepted += calls[-1][0]
            assert task.answer == f"[{accepted}]"
            assert mark in ("", f"{accepted}>")
        else:
            assert len(calls) == 4
            assert task.answer == f"[{mark.rstrip('>')}]"
            assert mark.rstrip(">").startswith(accepted) or not mark
        assert task.meta["solution"] == task.answer
        assert world.start(task).reply(task.answer or "").reward == 1.0
        key = outcome, bool(mark)
        seen[key] = seen.get(key, 0) + 1
    assert min(seen.values()) > 50
    assert len(seen) == 4


def attempt_of(body: str) -> tuple[list[str], list[str]]:
    """`d7>3=a3>x8=c8` -> its calls d7, a3, c8 and the keys or refusals 3, x8."""
    parts = body.replace("=", ">").split(">")
    return parts[::2], parts[1::2]


def test_an_attempt_is_the_decoded_conversation_of_a_row_after_its_prompt() -> None:
    chat = Chat(char_tokenizer(ALPHABET), max_length=64)
    task = first()
    key, later = task.meta["call_keys"][:2]
    calls = [right(task, 0), wrong(task, 1), "", right(task, 1)]
    replies = iter(chat.replies(calls))
    engine = ScriptedEngine(lambda prompt, sample: next(replies))
    env, sampling = build_env("world", {}, seed=0), Sampling(max_new_tokens=6)
    (row,) = collect([task], env, engine, chat, sampling, key="k")
    spoken = f"{calls[0]}$>{later}={calls[1]}$>x{later}=$>i{later}={calls[3]}$"
    assert chat.tokenizer.decode(row.token_ids) == text_of(task) + spoken
    assert chat.decode(row.token_ids[row.prompt_length :]) == spoken.replace("$", "")
    assert (row.reward, row.feedback, row.action_valid) == (0.0, LOST, False)
    assert row.obs_key == f"{task.meta['key']}0:{key}="
    assert row.reward_parts == {"correct": 0.0, "accepted": 2.0, "turns": 4.0}


def test_a_base_reads_dialogues_and_analyses_as_rows_that_fit() -> None:
    chat = Chat(char_tokenizer(ALPHABET), max_length=64)
    tasks = [t for t in LONG.tasks("train")[:400] if t.domain == "calls_pretrain"]
    for task, row in zip(tasks, demonstrate(tasks, chat, key="k"), strict=True):
        learnt = [i for i, m in zip(row.token_ids, row.completion_mask, strict=True) if m]
        said = task.meta.get("dialogue", [Spoken("assistant", task.meta.get("solution", ""), True)])
        assert "".join(p.text + "$" for p in said if p.trained) == "".join(
            ALPHABET[i] for i in learnt
        )
        assert len(row.token_ids) <= 64


def test_tasks_are_made_fast() -> None:
    for world in (CALLS, BASE):
        tasks = world.tasks("train")
        start = time.process_time()
        for index in range(1000):
            tasks[index]
        assert 1000 / (time.process_time() - start) > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"call_order": 1}, "'call_order' must be from 2 to 5, found 1"),
        ({"call_order": 6, "call_turns": 9}, "'call_order' must be from 2 to 5, found 6"),
        ({"call_turns": 2}, r"'call_turns' must be from call_order \(3\) to 16, found 2"),
        ({"call_turns": 17}, "'call_turns' must be from"),
        ({"call_tags": ""}, "'call_tags' must be different letters"),
        ({"call_tags": "Kk"}, "'call_tags' must be different letters"),
        ({"call_tags": "KK"}, "'call_tags' must be different letters"),
        ({"analyst_share": 1.5}, "'analyst_share' must be from 0 to 1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World(**options)  # type: ignore[arg-type]
