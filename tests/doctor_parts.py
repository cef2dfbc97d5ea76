"""A small complete configuration with chat models, in which tests of the doctor plant faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.models import build_model, char_tokenizer, load_tokenizer
from distill.sections import ModelBuild
from flows import doctor
from flows.configs import load_config
from flows.doctor_checks import Check
from flows.doctor_models import loader

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
ALPHABET = "_$^\n <>/|.,:=?'" + LETTERS
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Each turn between two markers; earlier turns stay as they are."""
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes what the last turn thought, and drops it once the conversation goes on."""
SWITCHED = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% endif %}",
)
"""Begins a reply with empty thoughts where thinking is off."""
CONFIG = """
[run]
preset = "mine"
orchestrator = "none"
[model]
name = "mine"
path = "{folder}/student"
max_length = 64
[data]
name = "jsonl"
path = "{folder}/tasks.jsonl"
split = "part"
[data.columns]
prompt = "question"
answer = "answer"
[sampling]
num_samples = 2
max_new_tokens = 6
[evals]
samples = 0
[[stage]]
name = "opd"
kind = "on_policy"
target = "student"
[stage.teacher]
name = "local"
path = "{folder}/teacher"
[stage.objective]
name = "gkd"
[stage.trainer]
steps = 2
batch = 2
"""
BUILD = ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64, initializer_range=0.3)


def chat_tokenizer(template: str | None = CHATML, *, alphabet: str = ALPHABET) -> Any:
    """One id per character, and the two markers of a turn; a turn's end is the eos."""
    tokenizer = char_tokenizer(alphabet)
    tokenizer.add_special_tokens({"additional_special_tokens": [START], "eos_token": END})
    tokenizer.chat_template = template
    return tokenizer


def save_model(folder: Path, tokenizer: Any, *, seed: int = 0, build: ModelBuild = BUILD) -> None:
    build_model(build, tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "tasks.jsonl").write_text(text, encoding="utf-8")


def task_rows() -> list[dict[str, Any]]:
    """Every letter is asked for once: two thirds train, the rest is held back."""
    return [
        {"question": f"say {c} now", "answer": c, "part": "gate" if i % 3 == 0 else "train"}
        for i, c in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")
    ]


def make_site(folder: Path) -> Path:
    """A folder with student, teacher, tasks and configuration, in which nothing is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "student", chat_tokenizer(), seed=0)
    save_model(folder / "teacher", chat_tokenizer(), seed=1)
    save_rows(folder, task_rows())
    (folder / "mine.toml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    return folder


def edit_tokenizer(folder: Path, change: Callable[[Any], object]) -> None:
    """Load the tokenizer of a model, change it, save it."""
    tokenizer = load_tokenizer(str(folder))
    change(tokenizer)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def edit_json(path: Path, **changes: Any) -> None:
    table = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**table, **changes}), encoding="utf-8")


def config_of(site: Path, *words: str) -> Config:
    return load_config([str(site / "mine.toml"), f'run.home="{site}/home"', *words])


def quick(site: Path, *words: str, device: str = "") -> list[Check]:
    """The quick checks of a site, those of the configuration included."""
    return doctor.examine(config_of(site, *words), site / "home", device=device)


def of_stages(site: Path, *words: str, full: bool = False) -> list[Check]:
    """The checks of the stages alone."""
    config, home = config_of(site, *words), site / "home"
    return doctor.stages(config, home, loader(config, home), full=full)
