"""The records that flow through a night. No torch here; tensors live in `distill.batch`.

Letters: P tasks, G samples per task, B rows, T tokens of a row, C trained tokens of a row,
K candidates. Per-token sequences of a `Rollout` have the length and alignment of `token_ids`:
entry t describes the token at t given what precedes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distill.messages import Message as Message
from distill.messages import ToolCall as ToolCall

Split = Literal["train", "evolve", "gate", "test"]
SPLITS: tuple[Split, ...] = ("train", "evolve", "gate", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem. `id` hashes what the model sees, so equal prompts have equal ids."""

    id: str
    env: str
    domain: str
    split: Split
    prompt: tuple[Message, ...]
    answer: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Never rendered into a prompt by itself. Known keys: `solution` (a worked reply),
    `demonstration` (an expert's reply to this very prompt), `dialogue` (a worked conversation: see
    `Spoken`), `turn` (the messages that followed the prompt in a recorded conversation),
    `lesson` (what would have helped, in words), `step_lessons` (`obs_key` of a state -> what would
    have helped there), `views` (view kind -> last user message of a privileged prompt), `key`
    (routing key). Of a recorded turn also: `turn_id`, `stage` (of the curriculum, from 1), `score`
    (how demanding it is), `span` (which answer of the turn the prompt leads to) and `grader`."""


def task_id(env: str, prompt: Sequence[Message]) -> str:
    """Content hash of a prompt, its tools included: 16 hex digits of SHA-256."""
    text = json.dumps([env, [m.identity() for m in prompt]], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Spoken(NamedTuple):
    """One part of a worked conversation: the student's words, or what the environment said."""

    role: Literal["assistant", "tool", "user"]
    text: str
    trained: bool
    """Whether the student is to learn these words; never true of an environment's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    feedback: str | None = None
    """What was wrong, in words that a teacher may read; never shown to the student."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What an episode answers to one reply: new messages, and whether it is over."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    """What this turn earned. The turns of an episode add up to its reward; what they leave out
    counts as earned by the last one."""
    valid: bool = True
    """False for an action that the environment could not read; it may cost a penalty."""
    obs_key: str | None = None
    """Names the state in which the student acted, equal for equal observations of one task."""
    done: bool = False
    choices: tuple[str, ...] = ()
    """The only replies that the environment takes next; empty for free text."""


class StopReason(StrEnum):
    STOP = "stop"
    """A token of the stop set was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """The token limit was reached first."""
    ERROR = "error"
    """The episode failed; the rollout carries no trained token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample. Temperature 0 is greedy; training rollouts stay at temperature 1, top_p 1.

    `keys` has one entry per prompt. Draw g of prompt p depends on (`keys[p]`, g) only, never on
    the position of the prompt in the call or on a global generator.
    """

    num_samples: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    choices: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Per prompt the only completions allowed, as token ids with their stop token; an empty entry
    is free text. Their chances are those of the whole completions, renormalised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    token_ids: tuple[int, ...]  # [C], the stop token included when it was sampled
    logprobs: tuple[float, ...]  # [C], the sampler's
    stop: StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One row of training data: a conversation that only grew."""

    task_id: str
    group_id: str
    index: int
    domain: str
    policy_version: int
    seed: str
    token_ids: tuple[int, ...]  # [T]
    completion_mask: tuple[bool, ...]  # [T] the tokens that the student sampled
    logprobs: tuple[float, ...]  # [T] the sampler's; 0.0 outside the mask
    stop: StopReason
    traj_id: str
    step: int = 0
    """Number of its first turn in the trajectory ..."""
    num_steps: int = 1
    """... and how many turns that has."""
    prompt_length: int = 0
    """Leading tokens that are the task's own prompt; 0 where history was rewritten behind it."""
    history: tuple[Message, ...] = ()
    """What a row that begins later shows between the task's prompt and its first turn."""
    observations: tuple[str, ...] = ()
    """What the environment answered to each turn of this row."""
    reward: float | None = None
    """What the environment gave for the whole trajectory."""
    return_: float | None = None
    """The same after penalties for invalid actions: what a group method compares."""
    step_reward: float | None = None
    """What the turns of this row earned, after penalties; the rows of a trajectory add up to its
    return."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    action_valid: bool = True
    obs_key: str | None = None
    """The state in which the first turn of this row was taken; where the environment does not name
    it, a digest of what the student read."""
    skill_ids: tuple[str, ...] = ()
    """Skills of a bank that stood in the acting prompt."""
    feedback: str | None = None
    """What the environment said about the finished attempt, in words."""
    error: str | None = None

    @property
    def num_trained(self) -> int:
        return sum(self.completion_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherView:
    """What a teacher reads for one rollout: its own prompt, the student's response ids."""

    token_ids: tuple[int, ...]  # [Tv]
    positions: tuple[int, ...]  # [C] where the trained tokens of the rollout sit in this view
    kind: str
    id: str
    key: str = ""
    """Names the teacher that answers where several are routed: the domain of the task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """What a scoring pass must return besides the log-probabilities of the tokens."""

    entropy: bool = False
    candidates: int = 0
    """Also the scorer's own k most likely ids per token."""
    candidate_ids: Sequence[Sequence[Sequence[int]]] | None = None  # [B][C][K]
    """Or its log-probabilities of these ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Log-probabilities of the trained tokens of one row under one model."""

    logprobs: tuple[float, ...]  # [C]
    source: str
    view_id: str
    entropy: tuple[float, ...] | None = None  # [C]
    candidate_ids: tuple[tuple[int, ...], ...] | None = None  # [C][K]
    candidate_logprobs: tuple[tuple[float, ...], ...] | None = None  # [C][K]


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """How a text-only teacher's continuations resemble chunks of one row (OmniOPD)."""

    starts: tuple[int, ...]  # index of each chunk's first token among the row's trained tokens
    votes: tuple[float, ...]  # per chunk, summed similarity of the continuations
    length: int
    """Trained tokens per chunk."""
    num_tokens: int = 0
    """Tokens that the teacher wrote for this row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Hindsight about one finished trajectory: what would have helped, in words (a SEED skill)."""

    traj_id: str
    outcome: Literal["success", "failure", "unknown"]
    status: Literal["ok", "skipped", "empty", "invalid", "leaked", "unsafe", "failed"]
    """Only `ok` has a text that a teacher reads. `skipped` was not asked for, `empty` says that
    there is nothing to say, `invalid` could not be read, `failed` never came."""
    episode_skill: str = ""
    episode_summary: str = ""
    step_skills: Mapping[int, str] = field(default_factory=dict)
    """0-based number of a turn -> what would have helped at that turn."""
    author: str = ""
    prompt_version: str = ""
    attempts: int = 0
    num_tokens: int = 0
    """Tokens that the analyst wrote for it."""
    correct: bool | None = None
    """Whether it says what the task's own lesson says; None where that cannot be known."""
    reason: str = ""
    raw: str = ""
    """What the analyst wrote last, kept for the run's dump."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Where a set of weights lies. `base` is the model an adapter belongs to."""

    path: Path
    step: int
    policy_version: int
    base: str
    kind: Literal["adapter", "full"]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """Where in a night an optimizer step is; objectives read schedules off it."""

    stage: str
    step: int
    num_steps: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    step: int
    loss: float
    grad_norm: float
    lr: float
    num_rows: int
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean with its interval. `n` counts the tasks behind it."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one task went: one greedy reply and `num_samples` sampled ones."""

    domain: str
    greedy: float
    num_correct: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    truncated: bool = False
    num_turns: int = 1
    """Turns of the greedy attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    suite: str
    suite_digest: str
    model: str
    """Digest of the weights that were evaluated, or a name such as `teacher`."""
    num_tasks: int
    samples_per_task: int
    metrics: Mapping[str, Estimate]
    """`greedy`, `sampled`, `pass@k`, each also per domain as `DOMAIN/greedy` ..."""
    outcomes: Mapping[str, Outcome]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    rule: str
    observed: float
    bound: float
    passed: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainResult:
    """Paired comparison of candidate and incumbent on one domain, as accuracies in [0, 1]."""

    teacher: float | None
    before: float
    after: float
    difference: float
    low: float
    high: float
    n: int


Decision = Literal["promote", "hold", "reject"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    decision: Decision
    reasons: tuple[Reason, ...]
    candidate: str
    incumbent: str
    domains: Mapping[str, DomainResult]
    overall: DomainResult
    detectable: float
    """Smallest overall difference this suite would see with 80 % power."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    model: str
    action: Literal["promote", "rollback", "initial"]
    from_digest: str | None
    to_digest: str
    run: str | None
    at: str
