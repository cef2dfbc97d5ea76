"""The analyst that is a model: the policy itself, or one behind an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distill.errors import ConfigError, TeacherError
from distill.protocols import TextModel
from distill.types import Message, Note, Sampling
from skills.hindsight.checks import MAX_REASON
from skills.hindsight.episodes import Episode
from skills.hindsight.objects import MAX_CHARACTERS
from skills.hindsight.parse import Parsed, ReplyRules, parse_note
from skills.hindsight.prompting import Asked, PromptOptions, first_prompt, retry_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalystOptions:
    """How a model is asked for notes."""

    rules: ReplyRules = field(default_factory=ReplyRules)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    attempts: int = 2
    """Times that an episode is asked about when the reply cannot be read. A prompt of the task is
    asked once: it leaves no place for a second question, and greedy replies do not change."""
    max_tokens: int = 4096
    """Of one reply."""
    max_prompt_tokens: int = 0
    """Of one prompt, where the analyst can count; 0 is no limit. A longer one is not asked."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_tokens < 1 or self.max_prompt_tokens < 0:
            raise ConfigError(
                "an analyst needs attempts and max_tokens of at least 1 and max_prompt_tokens of 0 "
                f"or more, got {self.attempts}, {self.max_tokens} and {self.max_prompt_tokens}"
            )


@dataclass(slots=True)
class _Case:
    """An episode that is asked about."""

    episode: Episode
    asked: Asked
    attempts: int = 0
    raw: str = ""
    parsed: Parsed | None = None
    failure: str = ""

    @property
    def is_open(self) -> bool:
        return not self.failure and (self.parsed is None or self.parsed.status == "invalid")


class ModelAnalyst:
    """Asks a `TextModel` at temperature 0, all episodes in one call per attempt.

    A reply that cannot be read is asked for again, with what was wrong. When the model fails
    (`TeacherError`: no answer in time, no connection), the episodes of that call have `failed`
    notes with its reason, and the night goes on. `count_tokens` measures a prompt as the model will
    read it. ConfigError for a token limit without it.
    """

    def __init__(
        self,
        model: TextModel,
        options: AnalystOptions | None = None,
        *,
        name: str = "model",
        count_tokens: Callable[[Sequence[Message]], int] | None = None,
    ) -> None:
        self.options = options or AnalystOptions()
        self.name = name
        self._model = model
        self._count = count_tokens
        if self.options.max_prompt_tokens and count_tokens is None:
            raise ConfigError("max_prompt_tokens of an analyst needs a tokenizer to count with")

    def write(self, episodes: Sequence[Episode], *, step: int) -> list[Note]:
        rules, prompts = self.options.rules, self.options.prompts
        cases = [_Case(episode=e, asked=first_prompt(e, rules, prompts)) for e in episodes]
        for case in cases:
            case.failure = self._too_long(case.asked)
        for attempt in range(1, self.options.attempts + 1):
            waiting = [c for c in cases if c.is_open and not (attempt > 1 and c.asked.is_own)]
            if not waiting:
                break
            if attempt > 1:
                waiting = [c for c in waiting if self._again(c)]
            self._ask(waiting, f"analyst/{step}", attempt)
        return [self._note(case) for case in cases]

    def _again(self, case: _Case) -> bool:
        """Turn the case to the second question; False when that is longer than the model reads."""
        reason = case.parsed.reason if case.parsed else ""
        again = retry_prompt(
            first_prompt(case.episode, self.options.rules, self.options.prompts),
            case.raw[:MAX_CHARACTERS],
            reason,
            self.options.rules,
        )
        if self._too_long(again):
            return False
        case.asked = again
        return True

    def _ask(self, cases: Sequence[_Case], key: str, attempt: int) -> None:
        if not cases:
            return
        sampling = Sampling(
            max_new_tokens=self.options.max_tokens,
            temperature=0.0,
            keys=tuple(f"{key}/{c.episode.traj_id}/{attempt}" for c in cases),
        )
        try:
            replies = self._model.complete([c.asked.messages for c in cases], 1, sampling)
            if [len(texts) for texts in replies] != [1] * len(cases):
                raise TeacherError(
                    f"the analyst {self.name} should write one text for each of {len(cases)} "
                    f"prompts, it returned {[len(texts) for texts in replies][:8]}"
                )
        except TeacherError as error:
            for case in cases:
                case.failure = str(error) or type(error).__name__
                case.attempts = attempt
            return
        for case, texts in zip(cases, replies, strict=True):
            case.attempts, case.raw = attempt, texts[0]
            case.parsed = parse_note(case.raw, len(case.episode.steps), self.options.rules)

    def _too_long(self, asked: Asked) -> str:
        most = self.options.max_prompt_tokens
        if not most or self._count is None:
            return ""
        count = self._count(asked.messages)
        return f"its prompt has {count} tokens, at most {most}" if count > most else ""

    def _note(self, case: _Case) -> Note:
        note = Note(
            traj_id=case.episode.traj_id,
            outcome=case.episode.outcome,
            status="failed",
            author=self.name,
            prompt_version=case.asked.version,
            attempts=case.attempts,
            reason=case.failure[:MAX_REASON],
            raw=case.raw[:MAX_CHARACTERS],
        )
        parsed = case.parsed
        if case.failure or parsed is None:
            return note
        return replace(
            note,
            status=parsed.status,
            episode_skill=parsed.episode_skill,
            episode_summary=parsed.episode_summary,
            step_skills=parsed.step_skills,
            reason=(parsed.reason or "; ".join(parsed.dropped))[:MAX_REASON],
        )
