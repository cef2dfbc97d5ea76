"""The adapter for the `verifiers` package, against small packages that speak its protocol.

`OLD` mirrors the published interface of verifiers 0.1.4 (messages and state, scores returned),
`NEW` that of 0.3.0 (everything in the state, stop conditions, message models, a client class). Only
what the adapter touches is there; the loops that a real rollout runs are left out on purpose.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distill.errors import ConfigError, DataError, EngineError, MissingExtra
from distill.types import Message
from evals.envs import build_env, verifiers_api
from evals.envs.base import check_disjoint
from evals.envs.verifiers_env import VerifiersEnv

SHARED = '''
import importlib, inspect, signal

class Rows(list):
    """Stands for a dataset: rows as dicts."""

async def maybe(func, **known):
    names = inspect.signature(func).parameters
    value = func(**{k: v for k, v in known.items() if k in names})
    return await value if inspect.isawaitable(value) else value

def load_environment(env_id, **arguments):
    return importlib.import_module(env_id.replace("-", "_")).load_environment(**arguments)

class Base:
    message_type = "chat"
    def __init__(self, dataset=None, eval_dataset=None, rubric=None, max_turns=-1, **more):
        self.dataset, self.eval_dataset, self.rubric = dataset, eval_dataset, rubric
        self.max_turns = max_turns
        self.log = []
        vars(self).update(more)
        signal.signal(signal.SIGTERM, lambda *_: None)
    def get_dataset(self, n=-1, seed=None):
        return self.dataset
    def get_eval_dataset(self, n=-1, seed=None):
        return self.eval_dataset
'''

OLD = (
    SHARED
    + """
__version__ = "0.1.4"

class Score:
    def __init__(self, reward, metrics):
        self.reward, self.metrics = reward, metrics

class Rubric:
    def __init__(self, funcs, weights=None):
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)
    async def score_rollout(self, prompt, completion, answer, state, task="default", info=None):
        known = dict(prompt=prompt, completion=completion, answer=answer, state=state, info=info)
        scores = [await maybe(func, **known) for func in self.funcs]
        state["timing"]["scoring_ms"] = 1.0
        metrics = {f.__name__: s for f, s in zip(self.funcs, scores)}
        return Score(sum(s * w for s, w in zip(scores, self.weights)), metrics)

class MultiTurnEnv(Base):
    async def setup_state(self, state, **kwargs):
        return state
    async def is_completed(self, messages, state, **kwargs):
        return self.finished(messages)
    async def env_response(self, messages, state, **kwargs):
        return self.respond(messages, state), state
"""
)

NEW = (
    SHARED
    + """
from verifiers import clients
__version__ = "0.3.0"

class Rubric:
    def __init__(self, funcs, weights=None):
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)
    async def score_rollout(self, state):
        assert self.funcs, "at least one individual-level reward function"
        known = dict(state)
        known["state"] = state
        scores = [await maybe(func, **known) for func in self.funcs]
        state["reward"] = sum(s * w for s, w in zip(scores, self.weights))
        state["metrics"] = {f.__name__: s for f, s in zip(self.funcs, scores)}
    async def cleanup(self, state):
        state["rubric_cleaned"] = True

class MultiTurnEnv(Base):
    async def init_state(self, input, client, model, sampling_args=None):
        if not isinstance(client, clients.Client):
            raise ValueError(f"Unsupported client type: {type(client)}")
        from verifiers.utils.message_utils import normalize_messages
        prompt = normalize_messages(input["prompt"])
        state = {**input, "prompt": prompt, "trajectory": [], "completion": None}
        return {**state, "trajectory_id": "t", "final_env_response": None, "client": client}
    async def setup_state(self, state):
        return None
    async def is_completed(self, state, **kwargs):
        steps = state["trajectory"]
        if state["final_env_response"] is not None or 0 < self.max_turns <= len(steps):
            return True
        return bool(steps) and self.finished(steps[-1]["completion"])
    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *await self.env_response(messages, state)]
    async def env_response(self, messages, state, **kwargs):
        return self.respond(messages, state)
    async def add_trajectory_step(self, state, step):
        state["trajectory"].append(step)
    async def cleanup(self, state):
        self.log.append("cleaned")
        last = state["trajectory"][-1:]
        spoken = [m for step in last for m in [*step["prompt"], *step["completion"]]]
        state["completion"] = spoken[len(state["prompt"]):]
"""
)

CLIENTS = """
from abc import ABC, abstractmethod

class Client(ABC):
    def __init__(self, client_or_config):
        self.client = client_or_config
    @abstractmethod
    async def get_native_response(self, prompt, model, sampling_args, tools=None): ...
    @abstractmethod
    async def close(self): ...
"""

MESSAGES = """
class Model:
    def __init__(self, role, content):
        self.role, self.content = role, content
    def __getitem__(self, key):
        return getattr(self, key)

def normalize_messages(value, *, field_name="messages"):
    return [m if isinstance(m, Model) else Model(m["role"], m["content"]) for m in value]
"""

GUESSING = """
import asyncio
import verifiers as vf

def row(i):
    return {"prompt": [{"role": "system", "content": "Guess."},
                       {"role": "user", "content": f"Round {i}"}],
            "answer": str(i), "info": {"i": i}, "task": "guess", "example_id": i}

class Env(vf.MultiTurnEnv):
    def finished(self, messages):
        return messages[-1]["role"] == "assistant" and messages[-1]["content"] == "stop"
    def respond(self, messages, state):
        word = messages[-1]["content"]
        if word == "end":
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return []
        side = "higher" if int(word) < state["info"]["i"] else "lower"
        return [{"role": "user", "content": side}]

def hit(completion, answer):
    return float(any(m["role"] == "assistant" and m["content"] == answer for m in completion))

async def turns(completion):
    await asyncio.sleep(0)
    return float(sum(m["role"] == "assistant" for m in completion))

def load_environment(train=40, held_out=0, max_turns=-1, funcs=(hit, turns), cls=Env, **more):
    held = vf.Rows(row(i) for i in range(train - 2, train + held_out)) if held_out else None
    return cls(dataset=vf.Rows(row(i) for i in range(train)), eval_dataset=held,
               rubric=vf.Rubric(list(funcs), [1.0, 0.0][: len(funcs)]), max_turns=max_turns, **more)
"""

ODD = """
import guessing, asyncio, time
import verifiers as vf

class Rewriting(guessing.Env):
    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        return [{"role": "user", "content": "only this"}] * 4

class Slow(guessing.Env):
    async def setup_state(self, state):
        await asyncio.sleep(30)

class Blocking(guessing.Env):
    def respond(self, messages, state):
        if messages[-1]["content"] == "7":
            time.sleep(self.sleep)
        return super().respond(messages, state)

class Foreign:
    dataset = eval_dataset = None
    async def is_completed(self, rollout): ...
    async def init_state(self, row): ...

class Changing(guessing.Env):
    async def setup_state(self, state):
        state["prompt"] = state["prompt"][1:]
        return state

def load_environment(kind, **more):
    if kind == "broken":
        raise OSError("the file is gone")
    if kind == "foreign":
        env = Foreign()
        env.dataset = [guessing.row(1)]
        env.get_dataset = lambda: env.dataset
        return env
    return guessing.load_environment(cls=globals()[kind], **more)
"""

API = {"old": OLD, "new": NEW}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a package `verifiers` of one generation, and two environments, on the path."""
    before = set(sys.modules)
    kept = signal.getsignal(signal.SIGTERM)

    def make(generation: str) -> None:
        package = tmp_path / "verifiers"
        (package / "utils").mkdir(parents=True)
        (package / "__init__.py").write_text(API[generation])
        (package / "utils" / "__init__.py").write_text("")
        if generation == "new":
            (package / "clients.py").write_text(CLIENTS)
            (package / "utils" / "message_utils.py").write_text(MESSAGES)
        (tmp_path / "guessing.py").write_text(textwrap.dedent(GUESSING))
        (tmp_path / "odd.py").write_text(textwrap.dedent(ODD))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    signal.signal(signal.SIGTERM, kept)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("verifiers", "guessing", "odd"):
            del sys.modules[name]


@pytest.fixture(params=["old", "new"])
def generation(request: pytest.FixtureRequest, install: Callable[[str], None]) -> str:
    install(request.param)
    return str(request.param)


def guessing(**arguments: object) -> VerifiersEnv:
    return VerifiersEnv(environment="guessing", arguments=arguments)


def test_a_conversation_runs_to_its_end_and_the_rubric_grades_it(generation: str) -> None:
    env = guessing()
    task = env.tasks("train")[0]
    assert task.prompt[0] == Message(role="system", content="Guess.")
    assert (task.domain, task.meta["key"]) == ("guess", "guess")
    episode = env.start(task)
    low, high = episode.reply("-1"), episode.reply("1000")
    assert low.messages == (Message(role="user", content="higher"),)
    assert high.messages == (Message(role="user", content="lower"),)
    assert not low.done
    assert low.obs_key != high.obs_key
    assert not episode.reply(str(task.answer)).done
    last = episode.reply("stop")
    assert (last.done, last.messages, last.reward) == (True, (), 1.0)
    assert dict(episode.reward().parts) == {"hit": 1.0, "turns": 4.0}
    with pytest.raises(DataError, match="is over"):
        episode.reply("1")
    env.close()


def test_the_limit_of_turns_ends_an_attempt(generation: str) -> None:
    env = guessing(max_turns=2)
    episode = env.start(env.tasks("train")[0])
    assert not episode.reply("-1").done
    assert episode.reply("-1").done
    assert episode.reward().value == 0.0
    env.close()


def test_an_attempt_that_was_cut_from_outside_is_scored(generation: str) -> None:
    env = guessing()
    task = env.tasks("train")[0]
    episode = env.start(task)
    with pytest.raises(DataError, match="before its first reply"):
        episode.reward()
    episode.reply(str(task.answer))
    assert episode.reward().value == 1.0
    assert episode.reward().parts["turns"] == 1.0
    env.close()


def test_two_attempts_do_not_share_their_state(generation: str) -> None:
    env = guessing()
    task = env.tasks("train")[0]
    a, b = env.start(task), env.start(task)
    a.reply(str(task.answer))
    b.reply("-1")
    assert (a.reply("stop").reward, b.reply("stop").reward) == (1.0, 0.0)
    env.close()


def test_an_error_of_the_environment_fails_the_attempt_alone(generation: str) -> None:
    env = guessing()
    task = env.tasks("train")[0]
    with pytest.raises(ValueError, match="invalid literal"):
        env.start(task).reply("not a number")
    assert env._loaded.log == (["cleaned"] if generation == "new" else [])
    assert env.start(task).reply("-1").messages[0].content == "higher"
    env.close()


def test_it_works_where_an_event_loop_is_already_running(generation: str) -> None:
    env = guessing()
    task = env.tasks("train")[0]

    async def inside() -> float:
        episode = env.start(task)
        episode.reply(str(task.answer))
        return episode.reply("stop").reward

    assert asyncio.run(inside()) == 1.0
    env.close()
    assert not [t for t in threading.enumerate() if t.name == "verifiers-loop"]


def test_splits_are_disjoint_with_and_without_an_evaluation_set(generation: str) -> None:
    alone = guessing(train=200)
    found = {split: alone.tasks(split) for split in ("train", "evolve", "gate", "test")}
    check_disjoint(found)
    assert sum(map(len, found.values())) == 200
    both = guessing(train=40, held_out=60)
    rounds = {s: {int(str(t.answer)) for t in both.tasks(s)} for s in ("train", "gate", "test")}
    assert max(rounds["train"]) < 38  # 38 and 39 are in both sets, so they are held out
    assert rounds["gate"] | rounds["test"] == set(range(38, 100))
    assert rounds["gate"] & rounds["test"] == set()


def test_sizes_cut_and_equal_options_give_equal_tasks(generation: str) -> None:
    env = VerifiersEnv(environment="guessing", train_size=5, gate_size=2)
    again = VerifiersEnv(environment="guessing", train_size=5, gate_size=2)
    other = VerifiersEnv(environment="guessing", train_size=5, gate_size=2, seed=1)
    assert (len(env.tasks("train")), len(env.tasks("gate"))) == (5, 2)
    assert env.tasks("train") == again.tasks("train") != other.tasks("train")
    with pytest.raises(DataError, match="no task in split 'gate'"):
        guessing(train=1).tasks("gate") and guessing(train=1).tasks("train")


def test_loading_leaves_the_signals_as_they_were(generation: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    guessing().tasks("train")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closing_word_of_the_environment_is_passed_on(install: Callable[[str], None]) -> None:
    install("new")
    env = guessing()
    turn = env.start(env.tasks("train")[0]).reply("end")
    assert (turn.done, turn.messages) == (True, (Message(role="user", content="bye"),))
    env.close()


def test_the_client_that_an_environment_gets_refuses_to_be_asked(
    install: Callable[[str], None],
) -> None:
    install("new")
    from evals.envs.verifiers_api import no_client

    with pytest.raises(ConfigError, match="asks for the model itself"):
        no_client().get_native_response([], "student", {})


def odd(kind: str, **arguments: object) -> VerifiersEnv:
    return VerifiersEnv(environment="odd", arguments={"kind": kind, **arguments}, timeout=0.3)


def test_an_environment_that_rewrites_its_conversation_is_refused(
    install: Callable[[str], None],
) -> None:
    install("new")
    env = odd("Rewriting")
    with pytest.raises(ConfigError, match="rewrites the conversation"):
        env.start(env.tasks("train")[0]).reply("1")


def test_an_environment_that_changes_its_prompt_is_refused(generation: str) -> None:
    env = odd("Changing")
    with pytest.raises(ConfigError, match="changes the prompt"):
        env.start(env.tasks("train")[0]).reply("1")


def test_an_environment_that_hangs_is_given_up(generation: str) -> None:
    env = odd("Slow")
    episode = env.start(env.tasks("train")[0])
    with pytest.raises(TimeoutError, match=r"did not finish within 0.3 s; raise data.timeout"):
        episode.reply("1")
    env.close()


def test_work_that_never_awaits_is_named_and_the_next_attempts_do_not_wait_for_it(
    generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_api, "PATIENCE", 0.2)
    env = odd("Blocking", sleep=1.5)
    task = env.tasks("train")[0]
    first, second = env.start(task), env.start(task)
    second.reply("-1")
    begun = time.monotonic()
    with pytest.raises(EngineError, match="blocks the event loop in which all its attempts run"):
        first.reply("7")
    for _ in range(3):
        with pytest.raises(EngineError, match=r"without 'await' \(time.sleep"):
            second.reply("-1")
    with pytest.raises(EngineError, match="the cleaning up of"):
        first.close()
    assert time.monotonic() - begun < 1.2, "each attempt waited for its timeout"
    time.sleep(max(0.0, begun + 1.8 - time.monotonic()))
    assert second.reply("-1").messages[0].content == "higher"
    env.close()


def test_closing_cleans_up_after_an_attempt_that_was_cut_and_after_no_other(
    generation: str,
) -> None:
    env = guessing()
    task = env.tasks("train")[0]
    cleaned = ["cleaned"] if generation == "new" else []
    cut = env.start(task)
    cut.reply("-1")
    assert env._loaded.log == []
    cut.close()
    cut.close()
    assert env._loaded.log == cleaned
    with pytest.raises(DataError, match="is over"):
        cut.reply("-1")
    with pytest.raises(DataError, match="was closed before anybody asked for its reward"):
        cut.reward()
    env.start(task).close()
    assert env._loaded.log == cleaned, "an attempt that never began has nothing to clean up"
    whole = env.start(task)
    whole.reply("stop")
    whole.close()
    assert whole.reward().value == 0.0
    assert env._loaded.log == cleaned * 2
    failed = env.start(task)
    with pytest.raises(ValueError, match="invalid literal"):
        failed.reply("not a number")
    failed.close()
    assert env._loaded.log == cleaned * 3
    env.close()


def test_an_unknown_shape_is_refused_with_what_was_found(generation: str) -> None:
    env = odd("foreign")
    task = next(t for tasks in env._tasks.values() for t in tasks)
    with pytest.raises(ConfigError, match=r"cannot be driven.*found is_completed\(rollout\)"):
        env.start(task)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"message_type": "completion"}, "works on bare text"),
        ({"tool_defs": ["search"]}, "calls tools through a model's API"),
        ({"requires_group_rollouts": True}, "compares attempts with each other"),
    ],
)
def test_what_a_plain_student_cannot_do_is_refused_on_loading(
    install: Callable[[str], None], more: dict[str, object], message: str
) -> None:
    install("new")
    with pytest.raises(ConfigError, match=message):
        guessing(**more).tasks("train")


def test_an_environment_that_cannot_be_loaded_is_named_with_its_arguments(generation: str) -> None:
    with pytest.raises(ConfigError, match=r"'odd' .*'broken'.*OSError: the file is gone"):
        odd("broken").tasks("train")
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        VerifiersEnv(environment="nowhere").tasks("train")


def test_without_the_package_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'verifiers<0.4'.*'guessing'"):
        build_env("verifiers", {"environment": "guessing"}, seed=0)


def test_wrong_options_are_refused(generation: str) -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        build_env("verifiers", {"environment": "guessing", "gate_size": -1}, seed=0)
    with pytest.raises(ConfigError, match="needs the option 'environment'"):
        build_env("verifiers", {}, seed=0)
    task = guessing().tasks("train")[0]
    with pytest.raises(DataError, match="is not of the verifiers environment"):
        guessing(train=1).start(task)
