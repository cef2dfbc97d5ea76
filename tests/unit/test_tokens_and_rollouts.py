"""Templates, stop sets, growing conversations, and how episodes become rows."""

from __future__ import annotations

import pytest

from distill.engines.scripted import ScriptedEngine
from distill.errors import ConfigError, DataError, EngineError
from distill.models import char_tokenizer
from distill.rollout import TurnRules, collect
from distill.rows import reply_text, require_few_errors, summarise
from distill.tokens import Chat
from distill.types import Message, Reward, Sampling, StopReason, Task, Turn
from distill.worked import demonstrate
from helpers import ALPHABET, make_chat

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}$\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_task(name="t0", content="ab=", **meta):
    prompt = (Message(role="user", content=content),)
    return Task(id=name, env="e", domain="d", split="train", prompt=prompt, answer="b", meta=meta)


class Echo:
    """An environment that pays for replying `b`, asks once more after `a`, fails on `c`."""

    name = "echo"

    def tasks(self, split):
        return [make_task()]

    def start(self, task):
        return EchoEpisode()


class EchoEpisode:
    def __init__(self):
        self.text = ""

    def reply(self, text):
        self.text = text
        if text == "c":
            raise RuntimeError("broken tool")
        done = text != "a"
        return Turn(messages=() if done else (Message(role="tool", content=":"),), done=done)

    def reward(self):
        return Reward(value=float(self.text == "b"), parts={"correct": float(self.text == "b")})


def play(*replies, max_new_tokens=4, num_samples=1):
    """Let a script reply, one entry per call of the engine."""
    chat = make_chat()
    turns = iter(replies)
    encoded = {r: chat.replies([r.rstrip("!")])[0] for r in replies}

    def script(prompt, sample):
        reply = next(turns)
        ids = encoded[reply]
        return ids[:-1] * 9 if reply.endswith("!") else ids  # `!` never ends

    engine = ScriptedEngine(script)
    sampling = Sampling(num_samples=num_samples, max_new_tokens=max_new_tokens)
    return collect([make_task()], Echo(), engine, chat, sampling, key="k"), chat


def test_a_reply_is_graded_and_its_tokens_are_trained_with_the_end_token():
    (row,), chat = play("b")
    assert row.reward == 1.0
    assert row.reward_parts == {"correct": 1.0}
    assert row.completion_mask == (False, False, False, True, True)
    assert row.token_ids[-1] == chat.end_id
    assert row.logprobs == (0.0, 0.0, 0.0, -0.5, -0.5)
    assert reply_text(row, chat) == "b"


def test_a_conversation_grows_in_one_row_and_observations_are_not_trained():
    (row,), chat = play("a", "b")
    assert chat.tokenizer.decode(row.token_ids) == "ab=a$:b$"
    assert row.completion_mask == (False,) * 3 + (True, True, False, True, True)
    assert row.reward == 1.0
    assert reply_text(row, chat) == "a\nb"


def test_a_reply_cut_at_the_limit_earns_nothing_and_is_counted():
    (row,), _ = play("b!")
    assert row.stop is StopReason.LENGTH
    assert row.reward == 0.0
    assert summarise([row])["rollout/truncated_share"] == 1.0


def test_a_conversation_cut_in_its_second_turn_keeps_one_mask_and_one_length():
    (row,), _ = play("a", "b!")
    assert row.stop is StopReason.LENGTH
    assert len(row.token_ids) == len(row.completion_mask) == len(row.logprobs)
    observed = row.completion_mask[3:].index(False) + 3
    assert row.completion_mask == (
        *(False,) * 3,
        *(True,) * 2,
        False,
        *(True,) * (len(row.token_ids) - 6),
    )
    assert row.logprobs[observed] == 0.0
    assert summarise([row])["rollout/missing_end_share"] == 1.0


def test_a_failed_episode_becomes_a_row_with_its_error_and_no_mask():
    (good, bad), _ = play("b", "c", num_samples=2)
    assert good.reward == 1.0
    assert bad.error == "RuntimeError: broken tool"
    assert bad.num_trained == 0
    assert bad.stop is StopReason.ERROR
    require_few_errors([good, bad], 0.5)
    with pytest.raises(EngineError, match=r"1 of 2 episodes failed.*1 x RuntimeError: broken tool"):
        require_few_errors([good, bad], 0.2)


def test_a_conversation_ends_at_its_turn_limit():
    chat = make_chat()
    encoded = chat.replies(["a"])[0]
    engine = ScriptedEngine(lambda prompt, sample: encoded)
    sampling = Sampling(max_new_tokens=4)
    (row,) = collect(
        [make_task()], Echo(), engine, chat, sampling, key="k", turns=TurnRules(max_turns=3)
    )
    assert reply_text(row, chat) == "a\na\na"


def test_the_same_task_twice_in_a_step_draws_differently():
    chat = make_chat()
    keys = []

    class Spy(ScriptedEngine):
        def generate(self, prompts, sampling):
            keys.extend(sampling.keys)
            return super().generate(prompts, sampling)

    engine = Spy(lambda prompt, sample: [chat.end_id])
    collect([make_task(), make_task()], Echo(), engine, chat, Sampling(), key="k")
    assert keys == ["k/t0/0", "k/t0/1"]


def test_worked_solutions_become_rows_and_a_missing_one_is_named():
    chat = make_chat()
    (row,) = demonstrate([make_task(solution="ba")], chat, key="k")
    assert chat.tokenizer.decode(row.token_ids) == "ab=ba$"
    assert sum(row.completion_mask) == 3
    with pytest.raises(DataError, match=r"1 of 2 tasks have no worked solution.*t1"):
        demonstrate([make_task(solution="x"), make_task("t1")], chat, key="k")


def test_a_prompt_over_the_limit_is_an_error_and_never_cut():
    chat = Chat(char_tokenizer(ALPHABET), max_length=4)
    with pytest.raises(DataError, match=r"5 tokens, but model.max_length is 4"):
        chat.prompt([Message(role="user", content="abcde")])
    with pytest.raises(DataError, match="no tokens"):
        chat.prompt([Message(role="user", content="")])


def test_the_stop_set_joins_tokenizer_model_and_configuration():
    chat = Chat(char_tokenizer(ALPHABET), stop=["z"], eos_token_ids=[1, 7])
    assert chat.stop_token_ids == (1, 7, ALPHABET.index("z"))
    assert chat.decode([5, 6, 7]) == chat.decode([5, 6, 1]) == chat.decode([5, 6])
    with pytest.raises(ConfigError, match="'zz' is 2 tokens"):
        Chat(char_tokenizer(ALPHABET), stop=["zz"])


def test_a_tokenizer_that_never_ends_is_refused():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no reply could ever end"):
        Chat(tokenizer)


def test_a_template_that_appends_extends_sampled_ids_verbatim():
    tokenizer = char_tokenizer(ALPHABET + "<>\n")
    tokenizer.chat_template = CHATML
    chat = Chat(tokenizer)
    history = [Message(role="user", content="ab"), Message(role="assistant", content="c")]
    ids = chat.prompt(history[:1])
    longer = chat.extend((*ids, 6, 1), [Message(role="tool", content="d")], history)
    assert longer[: len(ids) + 2] == (*ids, 6, 1)
    assert tokenizer.decode(longer[len(ids) + 2 :]) == "\n<tool>d$\n<assistant>"


def test_what_the_template_writes_after_the_stop_token_is_kept_between_turns():
    tokenizer = char_tokenizer(ALPHABET + "\n<>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '$\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    chat = Chat(tokenizer)
    user, said = Message(role="user", content="hi"), Message(role="assistant", content="yo")
    seen = Message(role="tool", content="ok")
    sampled = (*chat.prompt([user]), *chat.replies(["yo"])[0])
    extended = chat.extend(sampled, [seen], [user, said])
    assert extended[: len(sampled)] == sampled
    assert extended == chat.prompt([user, said, seen])


def test_a_template_that_rewrites_history_cannot_go_on_in_the_same_ids():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = (
        "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    chat = Chat(tokenizer)
    history = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    assert chat.extend((5,), [Message(role="tool", content="c")], history) is None


def test_a_tokenizer_without_a_template_joins_the_contents_and_ends_replies():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = None
    chat = Chat(tokenizer)
    messages = [Message(role="user", content="ab"), Message(role="assistant", content="c")]
    assert chat.render(messages) == "abc$"
    assert chat.extend((5,), [Message(role="tool", content="d")], messages) == (5, 6)
