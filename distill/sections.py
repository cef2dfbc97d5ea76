"""The sections of a configuration file, one dataclass each. Every default lives here and only here.

A `Named` section chooses an implementation by name; its options are checked against that class's
fields where objects are built. The other sections are complete here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def within(default: Any, low: float | None = None, high: float | None = None) -> Any:
    """A field whose value, or whose every entry, must lie in [low, high]."""
    limits = {"low": low, "high": high}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=limits)
    return field(default=default, metadata=limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """An implementation and its options, as written."""

    name: str = ""
    """A name of the table, or `my_pkg.module:attr` for one's own; empty means none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the section."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    preset: str = "run"
    """First part of the name of the run directory."""
    seed: int = within(0, 0)
    """Every random draw is derived from it."""
    home: str = "."
    """Folder that holds `runs/`, `registry/` and `cache/`; relative to the working directory."""
    threads: int = within(0, 0, 1024)
    """CPU threads for tensor work; 0 keeps the library's default."""
    orchestrator: Literal["prefect", "none"] = "prefect"
    """Who runs the stages: a Prefect flow with a temporary local server, or a plain loop."""
    max_error_share: float = within(0.2, 0.0, 1.0)
    """A step stops the night when a larger share of its episodes failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBuild:
    """A model made from a configuration instead of being loaded. Sizes count units."""

    architecture: Literal["qwen3"] = "qwen3"
    tokenizer: Literal["world"] = "world"
    hidden_size: int = within(64, 1)
    num_layers: int = within(2, 1)
    num_heads: int = within(2, 1)
    num_kv_heads: int = within(1, 1)
    head_dim: int = within(32, 2)
    intermediate_size: int = within(128, 1)
    max_positions: int = within(256, 8)
    rope_theta: float = within(1000.0, 1.0)
    tie_embeddings: bool = True
    initializer_range: float = within(0.02, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    name: str = "model"
    """Name in the registry: the champion of this name is continued and replaced."""
    path: str = ""
    """A Hugging Face name, a directory, `package:smollm2`, or `stage:NAME` for the weights that
    an earlier stage made. Empty: the model is made from `build`."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    """Where the student and its teacher live: `cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU
    when there is one."""
    attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """How attention is computed; `auto` leaves it to the model. Flash needs its own package."""
    kind: Literal["full", "adapter"] = "full"
    """Train all weights, or a LoRA adapter over frozen ones."""
    rank: int = within(32, 1)
    alpha: int = within(64, 1)
    target_modules: str = "all-linear"
    """Which layers carry the adapter: `all-linear`, or a regular expression of module names."""
    trust_remote_code: bool = False
    max_length: int = within(2048, 8)
    """Longest prompt in tokens; a longer one is an error, never cut."""
    stop: tuple[str, ...] = ()
    """Stop tokens besides those of the chat template and the generation config."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template."""
    build: ModelBuild | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSection:
    num_samples: int = within(8, 1, 10**4)
    """Replies per prompt (the group size)."""
    max_new_tokens: int = within(64, 1, 10**6)
    temperature: float = within(1.0, 0.0)
    top_p: float = within(1.0, 1e-6, 1.0)
    top_k: int = within(0, 0)
    """0 keeps every token."""
    max_turns: int = within(8, 1, 10**4)
    """Turns after which an episode is over, whatever its environment says."""
    history: int = within(0, 0)
    """Earlier turns that the student still reads; 0 is all of them."""
    rows: Literal["conversation", "turns"] = "conversation"
    """One row of training data as long as a conversation only grows, or one per turn."""
    refresh: int = within(0, 0)
    """Steps between two refreshes of the copy of the student that writes the replies; 0 always
    takes the newest weights."""
    overlap: bool = False
    """Sample the replies of the next step while this one trains, from weights that are one step
    older; needs a [correction] and an engine with weights of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSection:
    invalid_penalty: float = within(0.0, 0.0)
    """What an action costs that the environment could not read; 0.1 is usual for agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSection:
    steps: int = within(100, 1, 10**9)
    batch: int = within(16, 1, 10**6)
    """Prompts per step; a step trains on `batch * sampling.num_samples` replies."""
    lr: float = within(1e-4, 0.0)
    betas: tuple[float, ...] = within((0.9, 0.98), 0.0, 1.0)
    weight_decay: float = within(0.0, 0.0)
    warmup_steps: int = within(5, 0)
    schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: keep `lr`, or fall linearly toward 0, at least `min_lr_ratio * lr`."""
    min_lr_ratio: float = within(0.1, 0.0, 1.0)
    grad_clip: float = within(1.0, 0.0)
    """Largest gradient norm; 0 turns clipping off."""
    micro_batch_tokens: int = within(16384, 1)
    """Padded tokens per forward pass; changes memory and speed, not the result."""
    epochs: int = within(1, 1)
    """Passes over the replies of a step."""
    minibatches: int = within(1, 1)
    """Optimizer updates per pass."""
    master_weights: bool = True
    """Step on float32 copies of weights that are trained in bfloat16, else small updates are lost;
    adapters are float32 anyway."""
    gradient_checkpointing: bool = False
    """Compute the layers again in the backward pass instead of keeping what they computed: less
    memory, about a third more work, the same result."""
    offload: Literal["none", "optimizer"] = "none"
    """`optimizer` keeps its state, 8 to 12 bytes per trained weight, on the CPU and steps there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSection:
    """Importance weights for what the engine's log-probabilities differ from the trainer's."""

    level: Literal["none", "token", "sequence"] = "none"
    """One weight per token, one per reply, or none."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Bound large weights, or leave out what lies outside [low, cap]."""
    cap: float = within(2.0, 1.0)
    """Largest weight; usual are 1.5 to 5 per token and 2 to 10 per reply."""
    low: float = within(0.0, 0.0, 1.0)
    """Smallest weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillsSection:
    """What is learned in words: hindsight for a teacher, and a bank for the acting prompt."""

    bank: str = ""
    """Name of the bank under `bank/`; empty means none."""
    start: str = ""
    """File or folder of skills that a bank which does not exist yet begins with."""
    outcomes: Literal["all", "success", "failure"] = "all"
    """Which finished attempts get hindsight."""
    lend: bool = False
    """An attempt without hindsight of its own borrows that of a successful one of its group."""
    success: float = 1.0
    """Reward from which an attempt counts as a success."""
    max_step_skills: int = within(5, 0, 100)
    """Most turns of an attempt that get a skill of their own."""
    min_words: int = within(5, 1, 1000)
    """Shorter texts are no skill."""
    min_valid_rate: float = within(0.8, 0.0, 1.0)
    """A night is held when the analyst writes a smaller share of valid texts."""
    keep: bool = False
    """What hindsight taught becomes candidates of the bank at the end of the stage."""
    min_sightings: int = within(2, 1)
    """Attempts that must have taught a skill before it is kept."""
    show: bool = False
    """Skills of the bank stand in the acting prompt, in training and in every evaluation."""
    mode: Literal["template", "embedding", "utility"] = "template"
    """How skills are chosen: by category, by likeness, or by likeness and measured usefulness."""
    top_k: int = within(6, 0)
    """General skills that are shown."""
    task_top_k: int = within(6, 0)
    """Skills for the kind of task."""
    mistakes_k: int = within(5, 0)
    """Mistakes to avoid."""
    sim_threshold: float = within(-1.0, -1.0, 1.0)
    """Only skills with a cosine above it are shown."""
    order: Literal["curated_first", "evolved_first"] = "curated_first"
    rules: str = ""
    """Table of words that decides the category of a goal; empty takes the key of the task."""
    max_chars: int = within(0, 0)
    """Longest block in characters; 0 is no limit. Whole skills are left out, none is cut."""
    embedder: str = "student"
    """`student` (its own hidden states), `sentence:PATH`, `endpoint:URL#MODEL` or `policy:PATH`."""
    evolve_every: int = within(0, 0)
    """Steps between two looks at the tasks of the split `evolve`, from whose failures new skills
    are written; 0 is never."""
    evolve_tasks: int = within(8, 1)
    """Tasks per family behind such a look."""
    update_threshold: float = within(0.4, 0.0, 1.0)
    """A family whose success rate is below it gets new skills."""
    max_new: int = within(3, 1)
    """New skills per look."""
    max_failures: int = within(10, 1)
    """Failed attempts that are read per look."""
    pairs: int = within(16, 0)
    """Attempts with and without a new skill before it may be shown; 0 shows it untested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarnLimits:
    """Where a measure becomes worth a look; 0 turns it off. Entropy and distinct replies only count
    while the reward, where there is one, is no better than at the start."""

    entropy: float = 0.1
    """Below this share of its start."""
    distinct: float = 0.2
    """Share of distinct replies, below this share of its start."""
    truncated: float = 0.5
    """Share of replies that hit the token limit."""
    repeated: float = 0.25
    """Share of replies caught in a loop."""
    length: float = 4.0
    """Mean reply length, as a factor of its start in either direction."""
    grad_norm: float = 1000.0
    """Norm of the gradient before clipping."""
    grad_jump: float = 20.0
    """The same, as a multiple of its running median."""
    advantage: float = 20.0
    """Size of the 5 % and 95 % quantiles of the advantages."""
    mass: float = 0.5
    """Probability that the student leaves on the support of a top-k divergence, below this."""
    negative: float = 0.5
    """Share of tokens whose divergence is negative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortLimits:
    """Where a measure ends a stage; 0 turns it off, no value takes the one of the mode."""

    entropy: float | None = None
    distinct: float | None = None
    truncated: float | None = None
    repeated: float | None = None
    length: float | None = None
    grad_norm: float | None = None
    grad_jump: float | None = None
    advantage: float | None = None
    mass: float | None = None
    negative: float | None = None


LENIENT = {"entropy": 0.02, "distinct": 0.1, "truncated": 0.9}
STRICT = {"entropy": 0.3, "distinct": 0.5, "truncated": 0.2}
"""Limits that end a stage, by mode; those that are missing are off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSection:
    """What ends a stage that collapses, and what is worth a warning."""

    mode: Literal["auto", "off", "warn", "lenient", "strict"] = "auto"
    """`lenient` ends what is truly broken: entropy and distinct replies both gone, or nearly all
    replies cut, while the reward is no better than at the start. `strict` needs one measure alone.
    `auto` is strict for objectives that end in a collapse by nature (opsa), else lenient."""
    on_abort: Literal["auto", "fail", "stop"] = "auto"
    """Fail the night, or end the stage with the weights before the collapse and go on to the
    evaluation; `auto` stops where the objective ends in a collapse by nature, else fails."""
    patience: int = within(0, 0)
    """Steps in a row that must be past a limit; 0 takes 10, or 5 when strict."""
    start_steps: int = within(3, 1)
    """Healthy first steps whose mean is the start that later ones are compared with."""
    warn: WarnLimits = field(default_factory=WarnLimits)
    abort: AbortLimits = field(default_factory=AbortLimits)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    every_steps: int = within(50, 1)
    every_seconds: float = within(30.0, 0.0)
    """A checkpoint is due after `every_steps` steps or this many seconds, whichever is first."""
    keep: int = within(2, 1)
    """Newest checkpoints kept per stage, besides the final weights; at least 2, and more while a
    limit is passed, where the monitor may end the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalsSection:
    tasks_per_domain: int = within(256, 1)
    """Gate tasks per domain."""
    samples: int = within(4, 0)
    """Sampled replies per task, besides the greedy one."""
    k: tuple[int, ...] = within((1, 4), 1)
    """The k of pass@k; none may exceed `samples`."""
    temperature: float = within(1.0, 0.0)
    max_new_tokens: int = within(0, 0)
    """0 takes `sampling.max_new_tokens`."""
    max_batch: int = within(256, 1)
    """Replies generated at once."""
    teacher: bool = True
    """Evaluate the teacher too: once per night, for the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSection:
    margin: float = within(0.02, 0.0, 1.0)
    """Largest accuracy that a domain may lose, as a fraction."""
    min_gain: float = within(0.0, -1.0, 1.0)
    """The lower end of the interval of the overall gain must lie above it."""
    confidence: float = within(0.95, 0.5, 0.999)
    resamples: int = within(2000, 100)
    """Bootstrap resamples behind every interval."""
    max_truncated: float = within(0.1, 0.0, 1.0)
    """Largest share of replies that may hit the token limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingSection:
    jsonl: bool = True
    """Write `metrics.jsonl` into the run directory."""
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "distill-nightly"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a night, with the sections that it overrides."""

    name: str
    kind: Literal["sft", "on_policy", "serve", "curriculum"]
    """Learn from worked solutions, or from the student's own replies scored by a teacher. `serve`
    answers a generated workload and writes its routing log; `curriculum` makes training data of
    routing logs."""
    target: Literal["teacher", "base", "student", "data"]
    """`teacher` and `base` bootstrap weights for later stages; `student` is the night's work;
    `data` is what the kinds `serve` and `curriculum` make."""
    cache: bool = False
    """Keep the weights under `cache/`, keyed by everything that they depend on."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section name -> keys, merged over the configuration's own sections."""


STAGE_SECTIONS: tuple[str, ...] = (
    "model",
    "engine",
    "teacher",
    "view",
    "reference",
    "objective",
    "analyst",
    "skills",
    "data",
    "sampler",
    "sampling",
    "reward",
    "correction",
    "trainer",
    "monitor",
    "checkpoint",
    "curriculum",
    "traffic",
)
"""Sections that a stage may override."""
