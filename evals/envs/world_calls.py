"""The several-call world: find the hidden order of a tag's tools, one call a turn.

    K407:7=d7$>3=a3$>x3=c3$>8=e8$      an episode: calls `d7`, `a3`, `c3`, `e8`, and what they got
    K407[dce]:7=                       the hint: the hidden order in brackets
    K407[c]:7=                         a lesson for one state: the tool of the next call
    K407:7=d7>3=a3>x3=c3>8=e8>+        what an analyst reads of an attempt, to answer `[dce]`
    K407:7=b7>x7=...>#  ...>#dce>      a failure: `[]`; with the truth after the mark: `[dce]`

Tag `K` hides an order of different tools from a to e. A call is the tool and the current key, and
the end token (`$`) closes it as it closes every reply. `>3=` accepts the call and gives the next
key, `>x3=` refuses the wrong tool, `>i3=` what is no call with the current key. An episode is won
when the whole order is accepted within the turns allowed, so every mistake costs a turn. It closes
with the outcome mark `>+` or `>#`.

The number after the tag makes prompts different: a tag and a first key alone would give 80, too
few to keep splits apart. It does not tell the keys: they follow from the whole prompt and the seed
by a hash, so that equal prompts are equal tasks, and each is to be read off the words before it.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations

from distill.errors import DataError
from distill.types import Message, Reward, Spoken, Task, Turn
from evals.envs.world_rules import TAGS, Draws

TOOLS = "abcde"
KEYS = "0123456789"
NUMBERS = 1_000
"""How many numbers a prompt may show after its tag."""

WON, LOST = ">+", ">#"
"""The outcome marks: the last words of an episode."""

BELIEF_HOLDS = 0.4
"""Share of a base's bare episodes in which the order is the one that it believes in."""
MISTAKES = (0.0, 0.3, 0.5)
"""Shares of wrong calls in the lesson episodes of a base, which it reads but does not learn."""
MISREAD = 0.1
"""Share of those wrong calls that are no call with the current key."""


@cache
def hidden_orders(length: int) -> dict[str, tuple[str, str]]:
    """Tag -> its true order of `length` tools and the wrong one ("decoy") that a base believes."""
    rng = random.Random(11)
    pool = ["".join(order) for order in permutations(TOOLS, length)]
    true = {tag: rng.choice(pool) for tag in TAGS}
    return {tag: (true[tag], rng.choice([o for o in pool if o != true[tag]])) for tag in TAGS}


def drawn_order(draws: Draws, length: int) -> str:
    """Any order of `length` different tools, all equally likely."""
    return "".join(draws.shuffled(TOOLS, length))


def believed_order(draws: Draws, tag: str, length: int, *, true: float, decoy: float) -> str:
    """What a base believes of a bare tag: a little of the true order, a lot of a wrong one."""
    chance = draws.chance()
    right, wrong = hidden_orders(length)[tag]
    if chance < true:
        return right
    if chance < true + decoy:
        return wrong
    return drawn_order(draws, length)


def keys_of(seed: int, head: str, first: str, count: int) -> str:
    """The `count` different keys of a prompt, a pure function of it and the seed.

    `head` is the tag with its number, `first` the key that the prompt shows.
    """
    draws = Draws(seed, "keys", head, first)
    return first + "".join(draws.shuffled(KEYS.replace(first, ""), count - 1))


def views_of(head: str, first: str, order: str) -> dict[str, str]:
    """The privileged prompts of a question, and layouts in which `{...}` is filled in.

    hint            states the order
    skill           `{context}`: an order, or the one tool of the next call
    analyst         `{attempt}`: the conversation after the prompt without end tokens, up to the
                    last call; `{outcome}`: `+` or `#`
    analyst_truth   the same, and `{truth}`: the right order
    """
    question = f"{head}:{first}="
    return {
        "hint": f"{head}[{order}]:{first}=",
        "skill": f"{head}[{{context}}]:{first}=",
        "analyst": f"{question}{{attempt}}>{{outcome}}",
        "analyst_truth": f"{question}{{attempt}}>{{outcome}}{{truth}}>",
    }


class Calls:
    """The state of an episode: how many calls were accepted, how many turns are left."""

    __slots__ = ("accepted", "keys", "observation", "order", "turns", "turns_left")

    def __init__(self, order: str, keys: str, turns: int) -> None:
        self.order = order
        self.keys = keys
        self.accepted = 0
        self.turns = 0
        self.turns_left = turns
        self.observation = f":{keys[0]}="
        """The last words of the environment; at the start the end of the prompt."""

    @property
    def won(self) -> bool:
        return self.accepted == len(self.order)

    @property
    def done(self) -> bool:
        return self.won or not self.turns_left

    @property
    def key(self) -> str:
        """The key that the next call must carry."""
        return self.keys[self.accepted]

    @property
    def tool(self) -> str:
        """The tool that the next call must name."""
        return self.order[self.accepted]

    def call(self, text: str) -> bool:
        """Take a call; whether it is one, right or wrong: a tool with the current key."""
        self.turns += 1
        self.turns_left -= 1
        valid = len(text) == 2 and text[0] in TOOLS and text[1] == self.key
        if valid and text[0] == self.tool:
            self.accepted += 1
            self.observation = WON if self.won else f">{self.key}="
        else:
            self.observation = f">{'x' if valid else 'i'}{self.key}="
        if self.done and not self.won:
            self.observation = LOST
        return valid

    def state(self, tag: str) -> str:
        """Names what the student acts on: the tag, the calls accepted, the last words with the
        key."""
        return f"{tag}{self.accepted}{self.observation}"


class CallEpisode:
    """One attempt at a task whose answer is the order; over when won or out of turns."""

    def __init__(self, task: Task, *, turns: int) -> None:
        self._task = task
        self._calls = Calls(task.answer or "", task.meta["call_keys"], turns)

    def reply(self, text: str) -> Turn:
        """Answer a call with a tool message; the last one is the outcome mark."""
        calls = self._calls
        if calls.done:
            raise DataError(f"the episode of task {self._task.id} is over; start a new one")
        before = calls.state(self._task.meta["key"])
        valid = calls.call(text)
        return Turn(
            messages=(Message(role="tool", content=calls.observation),),
            reward=float(calls.won),
            valid=valid,
            obs_key=before,
            done=calls.done,
        )

    def reward(self) -> Reward:
        """1.0 when the whole order was accepted; `parts` count the accepted calls and the turns."""
        calls = self._calls
        won = float(calls.won)
        parts = {
            "correct": won,
            "accepted": float(calls.accepted),
            "turns": float(calls.turns),
        }
        return Reward(value=won, parts=parts)


def step_lessons(tag: str, order: str, keys: str, turns: int) -> dict[str, str]:
    """State -> the right tool, for every state in which a student can come to act."""
    lessons = {}
    for accepted, (tool, key) in enumerate(zip(order, keys, strict=True)):
        lessons[f"{tag}{accepted}{'>' if accepted else ':'}{key}="] = tool
        if accepted + 1 < turns:
            lessons |= {f"{tag}{accepted}>{mark}{key}=": tool for mark in "xi"}
    return lessons


# -- What a base reads ---------------------------------------------------------------------------


def follow_lesson(draws: Draws, calls: Calls) -> list[Spoken]:
    """An episode of a reader of the hint, with mistakes of somebody else that are not learnt.

    The last turn is never a mistake, so that every episode holds something to learn.
    """
    share = draws.pick(MISTAKES)
    said: list[Spoken] = []
    while not calls.done:
        wrong = calls.turns_left > 1 and draws.chance() < share
        text = _mistake(draws, calls, "") if wrong else calls.tool + calls.key
        _say(said, calls, text, trained=not wrong)
    return said[:-1]


def follow_step_lesson(draws: Draws, calls: Calls) -> tuple[list[Spoken], str]:
    """An episode up to one call that is learnt, and the tool that this call must name."""
    said: list[Spoken] = []
    share = draws.pick(MISTAKES)
    for _ in range(draws.below(calls.turns_left)):
        wrong = draws.chance() < share
        if not wrong and calls.accepted + 1 == len(calls.order):
            break  # it would be won, and nothing left to learn
        text = _mistake(draws, calls, "") if wrong else calls.tool + calls.key
        _say(said, calls, text, trained=False)
    tool = calls.tool
    _say(said, calls, tool + calls.key, trained=True)
    return said[:-1], tool


def explore(draws: Draws, calls: Calls, belief: str) -> list[Spoken]:
    """An episode of a student who believes in an order, and tries other tools where it fails."""
    said: list[Spoken] = []
    used = tried = ""
    while not calls.done:
        before = calls.accepted
        tool = belief[before]
        if tool in used + tried:
            tool = draws.pick([t for t in TOOLS if t not in used + tried])
        _say(said, calls, tool + calls.key, trained=True)
        if calls.accepted > before:
            used, tried = used + tool, ""
        else:
            tried += tool
    return said[:-1]


def attempt(draws: Draws, calls: Calls, *, won: bool) -> str:
    """The text of an attempt with a given outcome, as an analyst reads it."""
    length, turns = len(calls.order), calls.turns_left
    if won:
        mistakes = draws.below(turns - length + 1)
        # The last call of a success is the right one.
        wrong = set(draws.shuffled(range(length + mistakes - 1), mistakes))
    else:
        wrong = set(draws.shuffled(range(turns), turns - draws.below(length)))
    said: list[Spoken] = []
    tried = ""
    while not calls.done:
        if calls.turns in wrong:
            text = _mistake(draws, calls, tried)
            tried += text[0]
        else:
            text, tried = calls.tool + calls.key, ""
        _say(said, calls, text, trained=False)
    return "".join(part.text for part in said[:-1])


def _say(said: list[Spoken], calls: Calls, text: str, *, trained: bool) -> None:
    calls.call(text)
    said += (Spoken("assistant", text, trained), Spoken("tool", calls.observation, False))


def _mistake(draws: Draws, calls: Calls, tried: str) -> str:
    """A wrong tool that was not `tried`, where there is one; sometimes no call at all."""
    if draws.chance() < MISREAD:
        return draws.pick(TOOLS) + draws.pick(KEYS.replace(calls.key, ""))
    wrong = TOOLS.replace(calls.tool, "")
    return draws.pick([t for t in wrong if t not in tried] or wrong) + calls.key
