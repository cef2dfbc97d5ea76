"""One generator per task family of the world. Each turns random choices into a `Draft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from evals.envs.world_calls import (
    BELIEF_HOLDS,
    LOST,
    NUMBERS,
    WON,
    Calls,
    attempt,
    believed_order,
    drawn_order,
    explore,
    follow_lesson,
    follow_step_lesson,
    hidden_orders,
    keys_of,
    step_lessons,
    views_of,
)
from evals.envs.world_rules import (
    ONE_STEP,
    PAIRS,
    SINGLES,
    TAGS,
    TWO_STEP,
    VOWELS,
    Draws,
    Rule,
    apply,
    last_result,
    prior_rule,
    store_value,
    work,
)

Bounds = tuple[int, int]


class Options(Protocol):
    """The options of a world that a family may read."""

    @property
    def seed(self) -> int: ...
    @property
    def sort_symbols(self) -> str: ...
    @property
    def sort_length(self) -> Bounds: ...
    @property
    def rewrite_rules(self) -> Rule: ...
    @property
    def rewrite_length(self) -> Bounds: ...
    @property
    def rule_length(self) -> Bounds: ...
    @property
    def tool_keys(self) -> Bounds: ...
    @property
    def prior_true(self) -> float: ...
    @property
    def prior_decoy(self) -> float: ...
    @property
    def two_step_share(self) -> float: ...
    @property
    def deliberate_share(self) -> float: ...
    @property
    def call_tags(self) -> str: ...
    @property
    def call_order(self) -> int: ...
    @property
    def call_turns(self) -> int: ...
    @property
    def analyst_share(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A task before it has an id. `bare` is the question without its hint, where it has one."""

    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    bare: str | None = None


Family = Callable[[Draws, Options], Draft]


def _letters(draws: Draws, bounds: Bounds) -> str:
    """Letters for a rule to work on; one is a consonant, or `nov` would leave nothing."""
    length = draws.between(bounds)
    while True:
        text = draws.letters(length)
        if text.strip(VOWELS):
            return text


def sort(draws: Draws, options: Options) -> Draft:
    """`sort:52305=` -> `02355`. Harder with length."""
    length = draws.between(options.sort_length)
    text = draws.letters(length, options.sort_symbols)
    answer = "".join(sorted(text))
    views = {"answer": f"sort{{{answer}}}{text}="}
    meta = {"solution": answer, "views": views, "difficulty": length}
    return Draft(prompt=f"sort:{text}=", answer=answer, meta=meta)


def rewrite(draws: Draws, options: Options) -> Draft:
    """`rev:fcah=` -> `hacf`: the prompt names the rule. Harder with length."""
    name = draws.pick(options.rewrite_rules)
    text = _letters(draws, options.rewrite_length)
    answer = apply((name,), text)
    views = {"answer": f"{name}{{{answer}}}{text}="}
    meta = {"solution": answer, "views": views, "difficulty": len(text)}
    return Draft(prompt=f"{name}:{text}=", answer=answer, meta=meta)


def _tagged(head: str, rule: Rule, text: str) -> Draft:
    """A tag with its rule: bare prompt, hint view, answer view, worked solution."""
    answer, hint = apply(rule, text), "+".join(rule)
    views = {"hint": f"{head}[{hint}]{text}=", "answer": f"{head}{{{answer}}}{text}="}
    meta = {
        "solution": work(rule, text),
        "lesson": hint,
        "views": views,
        "rule": rule,
        "difficulty": len(text) * len(rule),
    }
    return Draft(prompt=f"{head}:{text}=", answer=answer, meta=meta)


def rule(draws: Draws, options: Options) -> Draft:
    """`K1:fcah=` -> `r.hacf`: the tag hides the rule; the reply opens with the rule's letter."""
    tag = draws.pick(tuple(ONE_STEP))
    return _tagged(f"{tag}1", ONE_STEP[tag], _letters(draws, options.rule_length))


def rule2(draws: Draws, options: Options) -> Draft:
    """`P2:fcah=` -> `r.hacf|i.abdg`: a hidden rule of two worked steps."""
    tag = draws.pick(tuple(TWO_STEP))
    return _tagged(f"{tag}2", TWO_STEP[tag], _letters(draws, options.rule_length))


def _check(draws: Draws) -> tuple[str, Rule, str]:
    """Head, rule and text of a deliberation task; the head ends on the answer's last letter."""
    text = _letters(draws, (3, 4))
    hidden = draws.pick(SINGLES)
    return f"{draws.pick(TAGS)}1#{apply(hidden, text)[-1]}", hidden, text


def deliberate(draws: Draws, options: Options) -> Draft:
    """`Y1#f:fcah=` -> `i.gdba?r.hacf`: guess, check the last letter (`#f`), guess again.

    The rule is drawn anew for every prompt, so no hint about the tag can be learnt.
    """
    head, hidden, text = _check(draws)
    wrong = [guess for guess in SINGLES if apply(guess, text)[-1] != head[-1]]
    draft = _tagged(head, hidden, text)
    guesses = [*draws.shuffled(wrong, draws.below(min(3, len(wrong)) + 1)), hidden]
    meta = {**draft.meta, "solution": "?".join(work(guess, text) for guess in guesses)}
    return Draft(prompt=draft.prompt, answer=draft.answer, meta=meta)


def _guesses(draws: Draws, text: str, check: str) -> str:
    """Up to four random guesses: a miss is retried with chance 0.6, a hit with 0.03."""
    tried: list[str] = []
    for guess in draws.shuffled(SINGLES, 4):
        tried.append(work(guess, text))
        if draws.chance() >= (0.6 if tried[-1][-1] != check else 0.03):
            break
    return "?".join(tried)


def _bare_draft(prompt: str, solution: str) -> Draft:
    answer = last_result(solution)
    return Draft(prompt=prompt, answer=answer, meta={"solution": solution})


def pretrain(draws: Draws, options: Options) -> Draft:
    """What a base reads before it meets the true tags, so that it can follow hints.

    Half of the prompts state a rule drawn at random for the tag, a fifth give the answer, the
    others are bare and answered from a prior that knows the true rule only a little.
    """
    if draws.chance() < options.deliberate_share:
        head, drawn, text = _check(draws)
        kind = ("hint", "bare", "answer")[_index(draws.chance(), (0.25, 0.8))]
        if kind == "bare":
            return _bare_draft(f"{head}:{text}=", _guesses(draws, text, head[-1]))
    else:
        steps = 2 if draws.chance() < options.two_step_share else 1
        head = f"{draws.pick(TAGS)}{steps}"
        drawn = draws.pick(PAIRS if steps == 2 else SINGLES)
        text = _letters(draws, options.rule_length)
        kind = ("hint", "bare", "answer")[_index(draws.chance(), (0.5, 0.8))]
        if kind == "bare":
            true, decoy = options.prior_true, options.prior_decoy
            believed = prior_rule(draws, head[0], steps, true=true, decoy=decoy)
            return _bare_draft(f"{head}:{text}=", work(believed, text))
    draft = _tagged(head, drawn, text)
    meta = {"solution": draft.meta["solution"]}
    return Draft(
        prompt=draft.meta["views"][kind], answer=draft.answer, meta=meta, bare=draft.prompt
    )


def _index(chance: float, bounds: tuple[float, ...]) -> int:
    return sum(chance >= bound for bound in bounds)


def tools(draws: Draws, options: Options) -> Draft:
    """`d4711.rev:a+c=`: ask the store for each key (`?a` -> `fc=`), then answer `!` + result.

    The result is the rule applied to the values joined in order. Harder with the number of keys.
    `meta["turns"]` holds the (call, answer) pairs of a worked episode. There is no `solution`: one
    that skips the calls would teach a model to guess.
    """
    store = f"d{draws.below(10_000):04d}"
    name = draws.pick(options.rewrite_rules)
    keys = draws.shuffled("abcdefgh", draws.between(options.tool_keys))
    values = [store_value(options.seed, store, key, TOOL_VALUE) for key in keys]
    answer = apply((name,), "".join(values))
    calls = [(f"?{key}", f"{value}=") for key, value in zip(keys, values, strict=True)]
    meta = {
        "turns": tuple(calls),
        "store": store,
        "views": {"answer": f"{store}.{name}{{{answer}}}{'+'.join(keys)}="},
        "difficulty": len(keys),
    }
    return Draft(prompt=f"{store}.{name}:{'+'.join(keys)}=", answer=answer, meta=meta)


TOOL_VALUE: Bounds = (2, 3)
"""Length of the values of a store."""


def _question(draws: Draws, options: Options, tags: str) -> tuple[str, str]:
    """A tag with its number, and the keys of which the prompt shows the first."""
    head = f"{draws.pick(tags)}{draws.below(NUMBERS):03d}"
    first = str(draws.below(10))
    return head, keys_of(options.seed, head, first, options.call_order)


def calls(draws: Draws, options: Options) -> Draft:
    """`K407:7=`: call the hidden tools of the tag in their order, each with the key shown last.

    `meta["call_keys"]` are the keys; `meta["key"]` is the tag: what is learnt of one tag helps with
    its other tasks. The answer is the order, for example `dce`.
    """
    head, keys = _question(draws, options, options.call_tags)
    tag, first = head[0], keys[0]
    order = hidden_orders(options.call_order)[tag][0]
    meta = {
        "lesson": order,
        "step_lessons": step_lessons(tag, order, keys, options.call_turns),
        "views": views_of(head, first, order),
        "key": tag,
        "call_keys": keys,
        "difficulty": len(order),
    }
    return Draft(prompt=f"{head}:{first}=", answer=order, meta=meta)


def calls_pretrain(draws: Draws, options: Options) -> Draft:
    """What a base reads before it meets the hidden orders, so that it can follow and write lessons.

    A share asks for the lesson of an attempt. Half of the others state an order drawn at random
    for the tag, or the tool of one call, and follow it; the rest are bare, and played by a student
    that believes a little of the true order and a lot of a wrong one.
    """
    head, keys = _question(draws, options, TAGS)
    tag, first, length = head[0], keys[0], options.call_order
    question, order = f"{head}:{first}=", drawn_order(draws, length)
    views = views_of(head, first, order)
    if draws.chance() < options.analyst_share:
        return _analysis(draws, Calls(order, keys, options.call_turns), views, question)
    kind = ("order", "tool", "bare")[_index(draws.chance(), (0.4, 0.5))]
    if kind == "bare":
        true, decoy = options.prior_true, options.prior_decoy
        believed = believed_order(draws, tag, length, true=true, decoy=decoy)
        order = believed if draws.chance() < BELIEF_HOLDS else order
        prompt, said = question, explore(draws, Calls(order, keys, options.call_turns), believed)
    elif kind == "order":
        prompt, said = views["hint"], follow_lesson(draws, Calls(order, keys, options.call_turns))
    else:
        said, tool = follow_step_lesson(draws, Calls(order, keys, options.call_turns))
        prompt = views["skill"].format(context=tool)
    meta = {"dialogue": tuple(said), "key": tag, "call_keys": keys}
    return Draft(prompt=prompt, answer=order, meta=meta, bare=question)


def _analysis(draws: Draws, game: Calls, views: Mapping[str, str], question: str) -> Draft:
    """A finished attempt; a success or the truth tells its order, a mere failure tells nothing.

    Successes are the larger part: to read the order off them is what takes longest to learn.
    """
    won = draws.chance() < 0.65
    told = draws.chance() < (0.15 if won else 0.6)
    order = game.order
    prompt = views["analyst_truth" if told else "analyst"].format(
        attempt=attempt(draws, game, won=won), outcome=(WON if won else LOST)[1:], truth=order
    )
    lesson = f"[{order if won or told else ''}]"
    return Draft(prompt=prompt, answer=lesson, meta={"solution": lesson}, bare=question)


FAMILIES: dict[str, Family] = {
    "sort": sort,
    "rewrite": rewrite,
    "rule": rule,
    "rule2": rule2,
    "deliberate": deliberate,
    "tools": tools,
    "pretrain": pretrain,
    "calls": calls,
    "calls_pretrain": calls_pretrain,
}
