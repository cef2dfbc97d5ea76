"""Small nights with hindsight and skills, and a scripted student who follows an order it is shown.

Both play the generated world of several calls, so every attempt is a real episode.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.engines.scripted import ScriptedEngine
from distill.models import char_tokenizer
from distill.rollout import TurnRules, collect
from distill.rundir import RunDir
from distill.segments import stored
from distill.tokens import Chat
from distill.types import Note, Rollout, Sampling, Task
from evals.envs.world import ALPHABET, World
from evals.envs.world_calls import hidden_orders
from flows.acting import Act
from flows.configs import load_config
from flows.evolving import StageBank
from flows.launch import open_run
from flows.night import Night
from flows.nightly import run_nightly
from flows.progress import NoProgress
from skills.bank import SkillBank
from skills.codec import encode
from skills.hindsight.analysts import Analyst
from skills.hindsight.rule_analyst import RuleAnalyst
from skills.items import Evidence, SkillItem

TAGS, LENGTH = "AK", 2
TINY = (
    "hindsight",
    "run.orchestrator=none",
    "model.build.hidden_size=32",
    "model.build.num_layers=1",
    "model.build.intermediate_size=64",
    f'data.call_tags="{TAGS}"',
    f"data.call_order={LENGTH}",
    "sampling.num_samples=4",
    "sampling.max_new_tokens=4",
    "evals.tasks_per_domain=8",
    "evals.samples=1",
    "evals.k=[1]",
    "gate.resamples=200",
    "stage.base.trainer.steps=30",
    "stage.base.trainer.batch=32",
    "stage.base.trainer.lr=1e-2",
    "stage.base.trainer.warmup_steps=3",
    "stage.seed.trainer.steps=3",
    "stage.seed.trainer.batch=4",
    "skills.pairs=2",
    "skills.evolve_tasks=2",
)
"""A night of the preset `hindsight` that takes two seconds once its base is in the cache."""
RULES = 'stage.seed.analyst={name="rules"}'
_SHARED = 'stat_scope="trajectories", ddof=0, clip_dual=0.0, kl_coefficient=0.0, aggregate="token"'
GRPO = f'name="grpo", {_SHARED}'
OPID = f'name="opid", {_SHARED}, w_episode=0.1, w_step=0.1'
"""The options that the preset gives SEED; SEED and OPID themselves take the mean over tokens."""
ALONE = ("stage.seed.teacher.name=", "stage.seed.view.name=plain", "skills.keep=false")
PLAIN = (*ALONE, f"stage.seed.objective={{{GRPO}}}", "stage.seed.analyst.name=", 'skills.bank=""')
"""GRPO without hindsight and without a bank."""
SKILLRL = (
    *ALONE,
    f"stage.seed.objective={{{GRPO}}}",
    'stage.seed.analyst={name="rules", steps=false}',
    "skills.show=true",
    "skills.evolve_every=1",
    "skills.update_threshold=1.0",
    "skills.pairs=0",
)
"""The bank stands in the prompts and grows before every step but the first, untested."""
PROMOTED = ("gate.min_gain=-1.0", "gate.margin=1.0", "gate.max_truncated=1.0")
"""Every result becomes the champion."""


def tiny(home: Path, *changes: str) -> Config:
    return load_config([*TINY, f"run.home={json.dumps(str(home))}", *changes])


def run_night(home: Path, *changes: str) -> RunDir:
    """A finished night of a home folder, in this process."""
    config = tiny(home, *changes)
    with open_run(config, subcommand="nightly", argv=["distill"]) as run:
        run_nightly(config, run=run, progress=NoProgress())
    return run


def home_with_base(base: Path, home: Path) -> Path:
    """A new home folder whose cache holds the base of another one."""
    shutil.copytree(base / "cache", home / "cache")
    return home


def night_of(run: RunDir) -> Night:
    return Night(config=run.read_config(), run=run, progress=NoProgress())


def rollouts_of(run: RunDir) -> list[Rollout]:
    found = stored(run.stage_dir("seed"), "rollouts", Rollout)
    return [row for step in sorted(found) for row in found[step]]


def notes_of(run: RunDir) -> list[Note]:
    found = stored(run.stage_dir("seed"), "notes", Note)
    return [note for step in sorted(found) for note in found[step]]


# -- skills ---------------------------------------------------------------------------------------


def right_order(tag: str, length: int = LENGTH) -> str:
    return hidden_orders(length)[tag][0]


def order_skill(tag: str, order: str, **more: object) -> SkillItem:
    values: dict[str, object] = {
        "id": "",
        "title": f"Order of {tag}",
        "kind": "workflow",
        "level": "task",
        "category": tag,
        "principle": order,
    }
    return SkillItem(**(values | more))  # type: ignore[arg-type]


def start_file(folder: Path, *items: SkillItem) -> Path:
    """A file of skills for `skills.start`."""
    path = folder / "start.jsonl"
    rows = [json.loads(encode(item)) for item in items]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def seen_in(*names: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(traj_id=name, outcome="success") for name in names)


def active_bank(home: Path, name: str, *items: SkillItem) -> SkillBank:
    bank = SkillBank.create(home, name)
    bank.add(items)
    with bank.change() as change:
        for row in list(change.rows.values()):
            change.set_status(row.id, "active")
    return bank


# -- the scripted student -------------------------------------------------------------------------

WORLD = World(domains=("calls",), call_tags=TAGS, call_order=LENGTH, gate_size=64)
CHAT = Chat(char_tokenizer(ALPHABET), max_length=96)
_PROMPT = re.compile(rf"([{TAGS}])(\d+)(?:\[([a-e]*)\])?:")


def follow(prompt: Sequence[int], sample: int) -> Sequence[int]:
    """Calls the order in the brackets. Without brackets it knows the right one in every fourth
    prompt and else calls the last tool of it again and again."""
    text = CHAT.decode(prompt)
    found = _PROMPT.match(text)
    assert found is not None, text
    tag, number, shown = found.groups()
    right = right_order(tag)
    order = shown or (right if int(number) % 4 == 0 else right[-1] * LENGTH)
    done = len(re.findall(r">\d=", text))
    key = re.findall(r"(\d)=", text)[-1]
    return CHAT.replies([order[min(done, len(order) - 1)] + key])[0]


def scripted_act(
    num_samples: int = 1, rules: TurnRules | None = None, world: World = WORLD
) -> tuple[Act, list[tuple[str, ...]]]:
    """Lets the scripted student act; also the prompts of every call, one list for all calls."""
    asked: list[tuple[str, ...]] = []
    sampling = Sampling(num_samples=num_samples, max_new_tokens=4)
    turns = rules or TurnRules(max_turns=4, rows="turns")

    def act(tasks: Sequence[Task], key: str) -> list[Rollout]:
        asked.append(tuple(t.prompt[-1].content for t in tasks))
        return collect(tasks, world, ScriptedEngine(follow), CHAT, sampling, key=key, turns=turns)

    return act, asked


# -- the bank of a stage, shown to the scripted student -------------------------------------------

RIGHT = RuleAnalyst(steps=False)


def held(home: Path, *changes: str, analyst: Analyst | None = RIGHT, **more: Any) -> StageBank:
    """The bank `calls` of the stage `seed` of the run `night-1`, with the scripted student."""
    config = tiny(home, *changes)
    bank = SkillBank if "calls" in SkillBank.names(home) else None
    act, _ = scripted_act()
    values: dict[str, Any] = {
        "bank": bank.open(home, "calls") if bank else SkillBank.create(home, "calls"),
        "config": config.for_stage(config.stage("seed")),
        "chat": CHAT,
        "env": WORLD,
        "act": act,
        "act_once": act,
        "folder": home / "stage",
        "key": "0/1/seed",
        "run": "night-1",
        "decode": CHAT.decode,
        "analyst": analyst,
    }
    return StageBank(**(values | more))


def texts(bank: SkillBank, *statuses: Any) -> dict[str, str]:
    """Category -> text of the skills of some statuses."""
    return {item.category: item.principle for item in bank.items(*statuses)}
