"""Doctor: the tasks. Repeats, overlap with the held-out gate, empty ones, and those too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distill.errors import DataError
from distill.types import SPLITS, Message, Split, Task
from flows.doctor_checks import Finding, Subject, fail, ok, warn

MEASURED = 2000
"""Most prompts of a stage whose length is measured; a night measures all of its own."""
LEAK = 0.01
"""Share of the gate that may be known from training, before its verdict means nothing."""
GENERATED = 64
"""Tasks per split that are looked at where an environment makes them."""


def check_data(subject: Subject) -> list[Finding]:
    """Rows of the user's own table or of recorded turns, read once; generated tasks need none."""
    from evals.envs.routing import Routing
    from evals.envs.table import Table
    from flows import wiring

    subject.prompts  # noqa: B018 - what cannot be read is said here, and nowhere else
    if not subject.own.data.name or wiring.is_made(subject.own):
        return []
    env = wiring.build_env(subject.own)
    if isinstance(env, Routing):
        return _recorded(subject, env)
    if not isinstance(env, Table):
        return []
    splits: dict[Split, Sequence[Task]] = {s: env.tasks(s) for s in SPLITS}
    told = f"{env.path}: {len(splits['train'])} tasks to train on, {len(splits['gate'])} to judge"
    return [
        ok(told),
        *_repeats(env, splits),
        *_overlap(splits),
        *_empty(splits, env.path),
        *_missing(subject, splits["train"], env.path),
    ]


def _repeats(env: Any, splits: Mapping[Split, Sequence[Task]]) -> Iterator[Finding]:
    from evals.envs.table_rows import columns_in

    source = str(env.columns.get("prompt", env.columns.get("messages")))
    rows = env.read(frozenset({source, *columns_in(source)})).rows
    repeated = len(rows) - sum(map(len, splits.values()))
    if repeated > 0:
        share = 100 * repeated / len(rows)
        yield warn(
            f"duplicates: {repeated} of {len(rows)} rows ({share:.0f} %) repeat an earlier prompt "
            "and are used once",
            "remove them; with different answers they would be refused",
        )
    same = _first_near(splits["train"])
    if same is not None:
        first, second = same
        yield warn(
            f"near duplicates in training: {_shown(first)} and {_shown(second)} differ only in "
            "case, spaces or the form of letters",
            "remove one of each pair; they count twice",
        )


def _first_near(tasks: Sequence[Task]) -> tuple[Task, Task] | None:
    seen: dict[str, Task] = {}
    for task, key in zip(tasks, _keys(tasks), strict=True):
        if key in seen:
            return seen[key], task
        seen[key] = task
    return None


def _keys(tasks: Sequence[Task]) -> list[str]:
    """Each prompt as one normalised text: NFKC, case folded, single spaces."""
    from distill.overlap import normal_text

    return [normal_text("\n".join(m.content for m in task.prompt)) for task in tasks]


def _overlap(splits: Mapping[Split, Sequence[Task]]) -> Iterator[Finding]:
    """Tasks that the gate holds back, met in training under another spelling."""
    learnt = dict(zip(_keys(splits["train"]), splits["train"], strict=True))
    held = splits["gate"]
    known = [
        (task, learnt[key]) for task, key in zip(held, _keys(held), strict=True) if key in learnt
    ]
    if not known:
        yield ok(f"no task of the gate is in training ({len(held)} normalised prompts compared)")
        return
    gate, train = known[0]
    note = (
        f"{len(known)} of {len(held)} gate tasks are trained on under another spelling; first: "
        f"{_shown(gate)} in the gate, {_shown(train)} in training"
    )
    advice = "remove them from one side, or give both rows the same split with data.split"
    yield (fail if len(known) > LEAK * len(held) else warn)(note, advice)


def _empty(splits: Mapping[Split, Sequence[Task]], path: str) -> Iterator[Finding]:
    for split, tasks in splits.items():
        bare = [task for task in tasks if any(not m.content.strip() for m in _said(task))]
        if bare:
            roles = " ".join(m.role for m in bare[0].prompt)
            asks = any(not task.prompt[-1].content.strip() for task in bare)
            yield (fail if asks else warn)(
                f"empty messages: {len(bare)} tasks of split {split} in {path}; first: task "
                f"{bare[0].id} (roles: {roles}), {_shown(bare[0])}",
                "remove these rows; an empty message teaches what an accident said",
            )


def _said(task: Task) -> list[Message]:
    """Messages that should have words: those that only call tools may be silent."""
    return [m for m in task.prompt if not m.tool_calls]


def _missing(subject: Subject, tasks: Sequence[Task], path: str) -> Iterator[Finding]:
    """Fields that the stage needs and that some rows leave null."""
    stage = subject.own.stages[0] if subject.own.stages else None
    if stage is None or stage.kind != "sft":
        return
    without = [task for task in tasks if not task.meta.get("solution")]
    if without:
        yield fail(
            f"null fields: {len(without)} of {len(tasks)} tasks of {path} have no worked solution "
            f"to learn from; first: {_shown(without[0])}",
            "name the column with data.columns.solution, or remove these rows",
        )


def _recorded(subject: Subject, env: Any) -> list[Finding]:
    """Recorded turns: how many there are, and whether a few of them can be read."""
    tasks = env.tasks("train")
    some = [tasks[i] for i in _spread(len(tasks), GENERATED)]
    repeated = len(some) - len({task.id for task in some})
    found = [ok(f"{env.path}: {len(tasks)} recorded tasks, {len(some)} of them read")]
    if repeated:
        found.append(
            warn(
                f"duplicates: {repeated} of {len(some)} recorded prompts repeat another one",
                "build the curriculum with deduplication, or import the log once",
            )
        )
    return [*found, *_empty({"train": some}, env.path)]


def _spread(size: int, most: int) -> list[int]:
    """At most `most` positions, spread evenly."""
    step = max(1, -(-size // most))
    return list(range(0, size, step))


def check_prompts(subject: Subject) -> list[Finding]:
    """The longest prompt against `model.max_length`, and with its reply against what the model can
    read."""
    from flows import recorded, wiring

    own = subject.own
    if not own.data.name or wiring.is_made(own) or recorded.is_recorded(own):
        return []  # those that do not fit are left out and counted
    env = wiring.build_env(own)
    longest, where, count = 0, "", 0
    for split in ("train", "gate"):
        tasks = env.tasks(split)  # type: ignore[arg-type]
        if hasattr(env, "columns"):
            chosen = [tasks[i] for i in _spread(len(tasks), MEASURED)]
        else:  # generated ones are alike, and far ones take long to reach
            chosen = [tasks[i] for i in range(min(GENERATED, len(tasks)))]
        for task, ids in zip(chosen, _encoded(subject, chosen), strict=True):
            count += 1
            if len(ids) > longest:
                longest, where = len(ids), f"{split}: {_shown(task)}"
    return [_limit(subject, longest, where, count), *_positions(subject, longest)]


def _encoded(subject: Subject, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    try:
        return subject.chat.prompts([task.prompt for task in tasks])
    except DataError as error:
        raise DataError(f"{error} (one of {len(tasks)} tasks that were measured)") from error


def _limit(subject: Subject, longest: int, where: str, count: int) -> Finding:
    limit = subject.own.model.max_length
    detail = f"the longest of {count} prompts has {longest} tokens, model.max_length is {limit}"
    return ok(f"{detail} ({where})")


def _positions(subject: Subject, longest: int) -> Iterator[Finding]:
    most, reply = subject.loaded.positions, subject.own.sampling.max_new_tokens
    if most is not None and longest + reply > most:
        yield fail(
            f"a prompt of {longest} tokens and a reply of {reply} are {longest + reply}, but the "
            f"model reads {most} positions",
            "lower sampling.max_new_tokens, shorten the prompts, or take a model with more",
        )


def _shown(task: Task) -> str:
    return repr(task.prompt[-1].content[:60])
