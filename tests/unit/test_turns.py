"""Episodes of several turns: one row, or one per turn; what is earned, dropped and rewritten."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from distill.batch import collate
from distill.engines.scripted import ScriptedEngine
from distill.errors import EngineError
from distill.models import char_tokenizer
from distill.rollout import TurnRules, collect
from distill.rows import dialogue, require_few_errors, summarise, trajectories
from distill.tokens import Chat
from distill.types import Message, Reward, Sampling, Scores, StopReason, Task, Turn
from evals.envs.world import ALPHABET
from teachers.audit import Auditor
from teachers.skill_view import WithSkill
from teachers.views import Plain, WithContext, WithPeerSuccess
from teachers.writing import Written

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


# -- attempts of several rows ----------------------------------------------------------------------


def test_an_attempt_that_another_row_reads_is_shown_with_all_its_turns():
    won, chat = walk("fgff", BY_TURN)
    lost, _ = walk("gggggggg", BY_TURN)
    lost = [replace(row, traj_id="lost") for row in lost]
    view = WithPeerSuccess(
        chat=chat, task_of=lambda _: TASK, template="[{attempt}]", closing="", feedback=False
    )
    built = view.build([*won, *lost], {})
    assert [v is None for v in built[: len(won)]] == [True] * len(won)
    seen = chat.tokenizer.decode(built[len(won)].token_ids)
    assert seen.startswith("go=[f^g^f^f]g$")  # `^` is the line break that the alphabet lacks


def test_shares_of_failed_and_cut_attempts_count_attempts_and_not_rows():
    won, _ = walk("fgff", BY_TURN)
    broken = [replace(r, traj_id="b", error="E: x", stop=StopReason.ERROR) for r in won[:1]]
    cut = [replace(r, traj_id="c", stop=StopReason.LENGTH) for r in won[:1]]
    found = summarise([*won, *broken, *cut])
    assert found["rollout/error_share"] == pytest.approx(1 / 3)
    assert found["rollout/truncated_share"] == pytest.approx(1 / 3)
    with pytest.raises(EngineError, match="1 of 3 episodes failed"):
        require_few_errors([*won, *broken, *cut], 0.3)


def test_a_reply_that_was_cut_stands_in_the_state_of_those_who_read_the_same():
    chat, calls = make_chat(), iter(range(100))
    ids = {word: chat.replies([word])[0] for word in "fg"}

    def script(prompt, sample):
        number = next(calls)
        if number < 2:
            return ids["f"]  # the first turn of both samples
        return ids["g"] if number == 2 else ids["g"][:-1] * 9  # the second never ends

    sampling = Sampling(num_samples=2, max_new_tokens=4)
    rules = TurnRules(rows="turns", max_turns=2)
    rows = collect([TASK], Corridor(), ScriptedEngine(script), chat, sampling, key="k", turns=rules)
    assert [(r.step, r.obs_key) for r in rows] == [
        (0, "door0"), (1, "door1"), (0, "door0"), (1, "door1"),
    ]  # fmt: skip
    assert rows[-1].stop is StopReason.LENGTH


def test_where_nothing_names_states_equal_contexts_are_equal_states():
    class Nameless(Corridor):
        def start(self, task):
            walk_ = Walk(())
            plain = walk_.reply
            walk_.reply = lambda text: replace(plain(text), obs_key=None)
            return walk_

    rows, _ = walk("fgff", BY_TURN, env=Nameless())
    again, _ = walk("fgff", BY_TURN, env=Nameless())
    assert [r.obs_key for r in rows] == [r.obs_key for r in again]
    assert len({r.obs_key for r in rows}) == 4


class Fragile(Corridor):
    """Its first episode cannot start; the others count how often they are closed."""

    def __init__(self):
        super().__init__()
        self.started = self.closed = 0

    def start(self, task):
        self.started += 1
        if self.started == 1:
            raise RuntimeError("no worker")
        walk_ = Walk(())
        walk_.close = self.close
        return walk_

    def close(self):
        self.closed += 1
        raise OSError("gone already")


def test_an_episode_that_cannot_start_fails_alone_and_every_other_is_closed(caplog):
    chat, env = make_chat(), Fragile()
    replies = chat.replies(["f"])[0]
    sampling = Sampling(num_samples=3, max_new_tokens=4)
    engine = ScriptedEngine(lambda prompt, sample: replies)
    rows = collect([TASK], env, engine, chat, sampling, key="k")
    assert [r.error for r in rows] == ["RuntimeError: no worker", None, None]
    assert [r.reward for r in rows] == [None, 1.0, 1.0]
    assert env.closed == 2
    assert "did not close: OSError: gone already" in caplog.text


def test_a_teacher_that_judges_a_later_turn_reads_the_conversation_before_it():
    rows, chat = walk("fgff", BY_TURN)
    asked = []

    class Writer:
        def write(self, prompts, n, sampling):
            asked.extend(prompts)
            return [Written(texts=("f",) * n, num_tokens=1) for _ in prompts]

        def complete(self, prompts, n, sampling):
            return [list(w.texts) for w in self.write(prompts, n, sampling)]

    auditor = Auditor(
        model=Writer(), chat=chat, task_of=lambda _: TASK,
        num_chunks=1, num_continuations=1, chunk_length=1,
    )  # fmt: skip
    scores = [
        Scores(logprobs=(-1.0, -1.0), entropy=(1.0, 0.1), source="s", view_id="v") for _ in rows
    ]
    auditor(rows, scores)
    assert ["".join(m.content for m in prompt) for prompt in asked] == [
        "go=", "go=f>1=", "go=f>1=g>1=", "go=f>1=g>1=f>2=",
    ]  # fmt: skip
