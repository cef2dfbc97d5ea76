"""`distill init`: a commented configuration for one's own model and data."""

from __future__ import annotations

from pathlib import Path

from distill.config import Layer, load
from distill.errors import ConfigError
from distill.rundir import atomic_write

_TEMPLATE = """\
# A night with your own model and data. Run it with: distill nightly {file}
# Every value that is missing keeps its default: distill config show {file}

[run]
preset = {preset}             # first part of the names under runs/
# seed = 0

[model]
name = {preset}               # the champion of this name is continued and replaced
path = {model}
# revision = "main"         # pin a commit of a hub model
kind = "adapter"            # train a LoRA adapter; "full" trains all weights
rank = 32
alpha = 64
dtype = "float32"           # "bfloat16" halves the memory
max_length = 1024           # prompt plus reply, in tokens; longer prompts are an error

# One task per row. `prompt` is a column of text, or of chat messages; `answer` is what the grader
# compares. A column with a worked solution lets a stage of kind "sft" learn from it.
[data]
name = {kind}
path = {data}
# columns = {{ prompt = "question", answer = "answer", solution = "solution" }}
# grader = "exact"          # or "my_pkg.module:attr" for your own

[sampling]
num_samples = 4             # replies per prompt and step
max_new_tokens = 256

[trainer]
batch = 8                   # prompts per step
lr = 1e-4
warmup_steps = 5
micro_batch_tokens = 8192   # lower it when memory runs out; the result stays the same

[evals]
tasks_per_domain = 256
samples = 0                 # sampled replies per task, besides the greedy one
k = []                      # k of pass@k, each at most `samples`

# Promoted when the overall gain is surely above `min_gain` and no domain surely loses `margin`.
[gate]
margin = 0.02
min_gain = 0.0

[[stage]]
name = "distill"
kind = "on_policy"
target = "student"

# The teacher scores the student's own replies. Here it is the model itself, with the answer in
# view. A bigger model of the same tokenizer: name = "local", path = "owner/bigger-model".
[stage.teacher]
name = "self_teacher"

[stage.view]
name = "with_answer"        # "plain" for a teacher that needs no help

[stage.objective]
name = "gkd"                # exact divergence over the vocabulary; "opd" needs only the tokens
beta = 0.0                  # 0 forward KL, 1 reverse KL

[stage.trainer]
steps = 100
"""

_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def write_config(path: Path, *, model: str, data: str, overwrite: bool) -> None:
    """Write the commented file. ConfigError when `path` exists and `overwrite` is off."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the file to write in it")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists already; choose another name, or replace it with --yes")
    text = _TEMPLATE.format(
        file=path,
        preset=_quoted(_folder_name(path.stem)),
        model=_quoted(model),
        data=_quoted(data),
        kind=_quoted(_KINDS.get(Path(data).suffix, "dataset")),
    )
    load([Layer(origin=str(path), text=text)])
    atomic_write(path, text)


def _folder_name(stem: str) -> str:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)
    return name.strip("-._")[:60] or "night"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
