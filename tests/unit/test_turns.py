"""Episodes of several turns: one row, or one per turn; what is earned, dropped and rewritten."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from distill.batch import collate
from distill.engines.scripted import ScriptedEngine
from distill.models import char_tokenizer
from distill.rollout import TurnRules, collect
from distill.rows import dialogue, summarise, trajectories
from distill.tokens import Chat
from distill.types import Message, Reward, Sampling, Task, Turn
from evals.envs.world import ALPHABET
from teachers.skill_view import WithSkill
from teachers.views import Plain, WithContext

TASK = Task(
    id="t0",
    env="corridor",
    domain="d",
    split="train",
    prompt=(Message(role="user", content="go="),),
    meta={"lesson": "fgh"},
)
BY_TURN = TurnRules(rows="turns")


@dataclass
class Corridor:
    """Three doors: `f` opens the next one and earns a third, `g` does nothing, anything else cannot
    be read."""

    name = "corridor"
    choices: tuple[str, ...] = ()

    def tasks(self, split):
        return [TASK]

    def start(self, task):
        return Walk(self.choices)


class Walk:
    def __init__(self, choices):
        self.choices = choices
        self.doors = 0

    def reply(self, text):
        state = f"door{self.doors}"
        opened = text == "f"
        self.doors += opened
        done = self.doors == 3
        return Turn(
            messages=(Message(role="tool", content=f">{self.doors}="),),
            reward=opened / 3,
            valid=text in ("f", "g"),
            obs_key=state,
            done=done,
            choices=self.choices,
        )

    def reward(self):
        return Reward(value=float(self.doors == 3), parts={"correct": float(self.doors == 3)})


def make_chat():
    return Chat(char_tokenizer(ALPHABET), max_length=64)


def walk(replies, rules, *, chat=None, env=None, max_length=64):
    chat = chat or make_chat()
    chat.max_length = max_length
    said = iter(chat.replies(list(replies)))
    engine = ScriptedEngine(lambda prompt, sample: next(said))
    env = env or Corridor()
    return collect(
        [TASK], env, engine, chat, Sampling(max_new_tokens=4), key="k", turns=rules
    ), chat


def text_of(chat, row):
    return chat.tokenizer.decode(row.token_ids)


def trained(chat, row):
    ids = [t for t, m in zip(row.token_ids, row.completion_mask, strict=True) if m]
    return chat.tokenizer.decode(ids)


def test_one_row_per_turn_shows_the_very_tokens_of_the_conversation():
    whole, chat = walk("fgff", TurnRules())
    rows, _ = walk("fgff", BY_TURN)
    assert [text_of(chat, r) for r in rows] == [
        "go=f$",
        "go=f$>1=g$",
        "go=f$>1=g$>1=f$",
        "go=f$>1=g$>1=f$>2=f$",
    ]
    assert rows[-1].token_ids == whole[0].token_ids
    assert [trained(chat, r) for r in rows] == ["f$", "g$", "f$", "f$"]
    assert trained(chat, whole[0]) == "f$g$f$f$"
    assert [(r.step, r.num_steps, r.obs_key) for r in rows] == [
        (0, 4, "door0"),
        (1, 4, "door1"),
        (2, 4, "door1"),
        (3, 4, "door2"),
    ]
    assert len({r.traj_id for r in rows}) == 1
    assert dialogue(rows, chat) == dialogue(whole, chat)
    assert dialogue(rows, chat)[1] == ("g", ">1=")


def test_the_rows_of_a_trajectory_earn_its_return_together():
    rows, _ = walk("fxff", TurnRules(rows="turns", invalid_penalty=0.1))
    assert {r.reward for r in rows} == {1.0}
    assert [r.return_ for r in rows] == pytest.approx([0.9] * 4)
    assert [r.step_reward for r in rows] == pytest.approx([1 / 3, -0.1, 1 / 3, 1 / 3])
    assert [r.action_valid for r in rows] == [True, False, True, True]
    batch = collate(rows, {}, pad_id=0)
    assert batch.rewards.tolist() == pytest.approx([0.9] * 4)
    assert batch.step_rewards.sum().item() == pytest.approx(0.9)
    assert batch.row_state.tolist() == [0, 1, 1, 2]
    assert batch.row_valid.tolist() == [True, False, True, True]


def test_what_the_turns_leave_out_is_earned_by_the_last_one():
    rows, _ = walk("fg", TurnRules(rows="turns", max_turns=2))
    assert [r.step_reward for r in rows] == pytest.approx([1 / 3, -1 / 3])
    assert {r.reward for r in rows} == {0.0}


def test_dropped_history_begins_a_new_row_that_shows_the_last_turns():
    rows, chat = walk("fgff", TurnRules(history=1))
    # The first turn is still read when the second is taken, so both are one row.
    assert [text_of(chat, r) for r in rows] == ["go=f$>1=g$", "go=g$>1=f$", "go=f$>2=f$"]
    assert [trained(chat, r) for r in rows] == ["f$g$", "f$", "f$"]
    assert [r.step for r in rows] == [0, 2, 3]
    assert [r.prompt_length for r in rows] == [3, 0, 0]


def test_a_template_that_rewrites_history_begins_a_new_row():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = (
        "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    rows, chat = walk("ff", TurnRules(max_turns=2), chat=Chat(tokenizer))
    assert [text_of(chat, r) for r in rows] == ["1go=f$", "3go=f>1=f$"]
    assert summarise(rows)["rollout/turns_mean"] == 2.0


def test_a_conversation_that_outgrows_the_model_ends_and_is_counted():
    rows, _ = walk("fff", TurnRules(), max_length=9)
    assert rows[0].reward == 0.0
    assert rows[0].reward_parts["too_long"] == 1.0
    assert summarise(rows)["rollout/too_long_share"] == 1.0


def test_an_environment_may_name_the_only_replies_it_takes():
    rows, chat = walk("fff", TurnRules(), env=Corridor(choices=("f", "g")))
    assert trained(chat, rows[0]) == "f$f$f$"
    with pytest.raises(Exception, match="are allowed"):
        walk("h", TurnRules(), env=Corridor(choices=("f", "g")))


def test_rewards_of_a_step_count_each_trajectory_once():
    rows, _ = walk("fff", BY_TURN)
    lost, _ = walk("gggggggg", BY_TURN)
    moved = [replace(r, traj_id="other") for r in lost]
    assert summarise([*rows, *moved])["reward/mean"] == 0.5
    assert len(trajectories([*rows, *moved])) == 2


# -- views of later rows ---------------------------------------------------------------------------


def shown(view, rows, contexts=None):
    chat = make_chat()
    built = view.build(rows, contexts or {})
    for row, seen in zip(rows, built, strict=True):
        ids = [t for t, m in zip(row.token_ids, row.completion_mask, strict=True) if m]
        assert [seen.token_ids[p] for p in seen.positions] == ids
    return [chat.tokenizer.decode(seen.token_ids) for seen in built]


def test_a_view_of_a_later_turn_exchanges_the_prompt_and_keeps_the_conversation():
    rows, chat = walk("fgff", BY_TURN)
    view = WithContext(chat=chat, task_of=lambda _: TASK, template="[{context}]")
    assert shown(view, rows)[2] == "go=[fgh]f$>1=g$>1=f$"
    assert shown(Plain(), rows)[2] == "go=f$>1=g$>1=f$"


def test_a_view_of_rewritten_history_shows_the_same_history():
    rows, chat = walk("fgff", TurnRules(history=1))
    view = WithContext(chat=chat, task_of=lambda _: TASK, template="[{context}]")
    assert shown(view, rows) == [
        "go=[fgh]f$>1=g$",
        "go=[fgh]g$>1=f$",
        "go=[fgh]f$>2=f$",
    ]


def test_skills_of_a_turn_stand_before_it_and_those_of_the_episode_after_the_task():
    rows, chat = walk("fgff", BY_TURN)
    traj = rows[0].traj_id
    contexts = {f"skill/{traj}": "ee", f"skill/{traj}/0": "aa", f"skill/{traj}/2": "bb"}
    options = {"template": "[{context}]", "step_template": "+{context}+"}
    view = WithSkill(chat=chat, task_of=lambda _: TASK, scope="episode_step", **options)
    assert shown(view, rows, contexts) == [
        "go=+aa+f$",
        "go=[ee]f$>1=g$",
        "go=f$>1=g$>1=+bb+f$",
        "go=[ee]f$>1=g$>1=f$>2=f$",
    ]
    kinds = [v.kind for v in view.build(rows, contexts)]
    assert kinds == ["step_skill", "episode_skill", "step_skill", "episode_skill"]
    only = WithSkill(chat=chat, task_of=lambda _: TASK, scope="step", **options)
    assert [v is None for v in only.build(rows, contexts)] == [False, True, False, True]
    assert WithSkill(chat=chat, task_of=lambda _: TASK).build(rows, {}) == [None] * 4


def test_a_task_with_a_layout_shows_every_skill_there():
    task = Task(
        id="t0", env="c", domain="d", split="train", prompt=TASK.prompt,
        meta={"views": {"skill": "go[{context}]="}},
    )  # fmt: skip
    rows, chat = walk("ff", TurnRules(rows="turns", max_turns=2))
    view = WithSkill(chat=chat, task_of=lambda _: task, scope="episode_step")
    contexts = {f"skill/{rows[0].traj_id}": "a", f"skill/{rows[0].traj_id}/1": "b"}
    assert shown(view, rows, contexts) == ["go[a]=f$", "go[b]=f$>1=f$"]
