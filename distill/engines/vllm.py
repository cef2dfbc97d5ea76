"""vllm in this process: token ids in, token ids out, with weights of its own that are fed.

What an engine with its own weights can get wrong in silence is checked here every time. Weights
count as arrived only when the log-probabilities of the published probe agree with the trainer's; an
adapter must be listed, with the version that the caller believes in, before anything is sampled.

Log-probabilities are those of the distribution a token was drawn from (after temperature, top_k and
top_p), at temperature 0 the untempered ones, as `distill.engines.sampling.draw` declares them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distill.engines.publishing import PROBE, Arrivals, Probe, read_probe
from distill.engines.sampling import check
from distill.engines.vllm_options import VLLMOptions, slot_rank
from distill.engines.vllm_requests import (
    by_id,
    check_ids,
    choice_rows,
    completion,
    drawn,
    sampling_params,
    scoring_params,
)
from distill.engines.vllm_start import FAILURES, device_kind, line, start, stop
from distill.engines.vllm_weights import (
    adapter_targets,
    check_adapter,
    check_full,
    exaggerate,
    full_tensors,
    weight_shapes,
)
from distill.errors import EngineError
from distill.types import CheckpointRef, Completion, Sampling

logger = logging.getLogger(__name__)

NAME = "the engine vllm"
COLDEST = 0.01
"""vllm raises smaller temperatures to this one."""
EXAGGERATION = 1.0
"""Largest entry of the B matrices of a canary."""
LEAST_CHANGE = 0.1
"""Nats by which an exaggerated adapter must move some log-probability of the canary's sequences."""
CANARY = tuple(tuple(3 + (7 * i + 5 * row) % 11 for i in range(12)) for row in range(2))


class _Served(NamedTuple):
    """The adapter that answers, as vllm knows it, and the version of its weights."""

    version: int
    request: Any


class VLLMEngine:
    """Samples with vllm from the model in a folder, or from adapters of it.

    With `max_rank` above 0 it serves adapters up to that rank and samples only once one has been
    loaded; with 0 it serves full weights. One engine lives in a process at a time. `base` is what
    checkpoints must name as their base; empty accepts any whose shapes fit.
    """

    def __init__(
        self,
        model: Path,
        options: VLLMOptions,
        *,
        base: str = "",
        max_rank: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        self.policy_version = 0
        self.sync_gap = 0.0
        """Mean gap to the trainer's log-probabilities at the last `load`, in nats."""
        self.options = options.on(device_kind())
        self._base = base
        self._slots = slot_rank(max_rank) if max_rank else 0
        self._shapes = weight_shapes(model)
        self._served: _Served | None = None
        self._probe: Probe | None = None
        self._arrivals = Arrivals()
        self._sent = 0  # version of the full weights inside
        self._next_id = 1
        self._broken = ""  # why its weights cannot be sampled from
        self._dead = ""  # why it cannot be used any more
        self._asleep = False
        self.llm: Any = start(
            model,
            self.options,
            slots=self._slots,
            targets=adapter_targets(self._shapes),
            trust_remote_code=trust_remote_code,
        )
        self.max_length = int(self.llm.model_config.max_model_len)
        self.num_ids = int(self.llm.model_config.get_vocab_size())

    # -- sampling --------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """All samples of all prompts in one call to vllm; replies to choose from are scored in one
        call before."""
        check(sampling, len(prompts))
        if 0 < sampling.temperature < COLDEST:
            raise EngineError(
                f"vllm samples at no temperature between 0 and {COLDEST}, got "
                f"{sampling.temperature}; use 0 for greedy replies"
            )
        self._require_ready()
        allowed = sampling.choices or ((),) * len(prompts)
        keys = sampling.keys or ("",) * len(prompts)
        results: list[list[Completion]] = [[] for _ in prompts]
        bound = [i for i, only in enumerate(allowed) if only]
        free = [i for i, only in enumerate(allowed) if not only]
        self._check([prompts[i] for i in free], room=sampling.max_new_tokens)
        if bound:
            rows = choice_rows([prompts[i] for i in bound], [allowed[i] for i in bound], sampling)
            scores = iter(self.logprobs_of(rows))
            for i in bound:
                results[i] = drawn(allowed[i], scores, sampling, keys[i])
        if free:
            greedy = sampling.temperature == 0
            params = [sampling_params(sampling, keys[i]) for i in free]
            stops = frozenset(sampling.stop_token_ids)
            for i, output in zip(free, self._run([prompts[i] for i in free], params), strict=True):
                said = sorted(output.outputs, key=lambda one: one.index)
                group = [completion(one, stops) for one in said]
                results[i] = group * sampling.num_samples if greedy else group
        return results

    def logprobs_of(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token after the first of each sequence, at temperature 1."""
        self._require_ready()
        return self._score(sequences, None if self._served is None else self._served.request)

    def _score(self, sequences: Sequence[Sequence[int]], adapter: Any) -> list[list[float]]:
        self._check(sequences, room=1)
        asked = scoring_params()
        outputs = self._run(sequences, [asked] * len(sequences), adapter=adapter)
        # The first token has nothing before it, hence no entry.
        return [
            by_id(output.prompt_logprobs, list(ids), first=1)
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def _run(
        self, prompts: Sequence[Sequence[int]], params: list[Any], *, adapter: Any = ...
    ) -> list[Any]:
        if adapter is ...:
            adapter = None if self._served is None else self._served.request
        self._require_awake()
        # vllm draws from the global generator beside a request's own; the trainer must not notice.
        with torch.random.fork_rng(devices=[]):
            try:
                outputs: list[Any] = self.llm.generate(
                    [{"prompt_token_ids": list(p)} for p in prompts],
                    params,
                    lora_request=adapter,
                    use_tqdm=False,
                )
            except FAILURES as error:
                if self.llm.llm_engine.has_unfinished_requests():
                    self._dead = line(error)
                raise EngineError(f"vllm failed while sampling: {line(error)}") from error
        return outputs

    def _check(self, prompts: Sequence[Sequence[int]], *, room: int) -> None:
        check_ids(prompts, room=room, num_ids=self.num_ids, max_length=self.max_length)

    # -- weights ---------------------------------------------------------------------------

    def load(self, checkpoint: CheckpointRef) -> None:
        """Take published weights, and their version once their log-probabilities are the trainer's.

        A refused adapter leaves the one before in place. Full weights that were sent and then found
        wrong leave an engine that samples nothing until others have been loaded.
        """
        self._require_awake()
        folder = checkpoint.path
        if self._base and checkpoint.base != self._base:
            raise EngineError(
                f"the weights in {folder} belong to the base {checkpoint.base!r}, the engine "
                f"serves {self._base!r}"
            )
        if (checkpoint.kind == "adapter") != bool(self._slots):
            serves = f"adapters up to rank {self._slots}" if self._slots else "full weights"
            raise EngineError(
                f"{folder} holds weights of kind {checkpoint.kind!r}, the engine was started for "
                f"{serves}; start another for this model.kind"
            )
        probe = read_probe(folder)
        if probe is None:
            raise EngineError(
                f"{folder} has no {PROBE}, so nobody can say whether its weights arrived; write it "
                "with distill.engines.publishing.publish"
            )
        if self._slots:
            self._load_adapter(folder, checkpoint.policy_version, probe)
        else:
            self._load_full(folder, checkpoint.policy_version, probe)
        self._probe = probe
        self.policy_version = checkpoint.policy_version

    def require(self, probe: Probe) -> float:
        """Mean gap to the trainer's log-probabilities. EngineError above `options.tolerance`."""
        return self._gap(probe, None if self._served is None else self._served.request)

    def canary(self, folder: Path) -> float:
        """Serve the adapter in `folder` grossly exaggerated, then take it away again.

        Returns by how many nats that moved a log-probability. EngineError when it moved too little
        (adapters do not reach the model), or when the old values did not come back to the bit.
        """
        self._require_awake()
        if not self._slots:
            raise EngineError("the engine was started for full weights, which have no canary")
        rows = [tuple(token % self.num_ids for token in row) for row in CANARY]
        current = None if self._served is None else self._served.request
        before = self._score(rows, current)
        with tempfile.TemporaryDirectory(prefix="distill-canary-") as place:
            check_adapter(folder, self._shapes, max_rank=self._slots)
            exaggerate(folder, Path(place), largest=EXAGGERATION)
            request = self._add(Path(place), "canary")
            try:
                during = self._score(rows, request)
            finally:
                self._remove(request)
        after = self._score(rows, current)
        change = max(
            abs(a - b)
            for x, y in zip(before, during, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        if not change >= LEAST_CHANGE:
            raise EngineError(
                f"an exaggerated copy of the adapter in {folder} moved the log-probabilities by "
                f"{change:.3g} nats at most, expected {LEAST_CHANGE}: adapters do not reach the "
                "model inside vllm; check the adapter's target modules, or use another version"
            )
        if after != before:
            raise EngineError(
                f"after the adapter in {folder} was taken away the log-probabilities did not come "
                "back: something of it stayed inside vllm; start the engine again, or use another "
                "version"
            )
        return change

    def _load_adapter(self, folder: Path, version: int, probe: Probe) -> None:
        check_adapter(folder, self._shapes, max_rank=self._slots)
        request = self._add(folder, f"policy-{version}")
        try:
            gap = self._gap(probe, request)
        except EngineError:
            self._remove(request)
            raise
        if self._served is not None:
            self._remove(self._served.request)
        self._served, self.sync_gap = _Served(version, request), gap

    def _add(self, folder: Path, name: str) -> Any:
        """An adapter under an id that was never used: vllm does not read a known id again."""
        from vllm.lora.request import LoRARequest

        number = self._next_id
        self._next_id += 1
        request = LoRARequest(f"{name}-{number}", number, str(folder))
        try:
            self.llm.llm_engine.add_lora(request)
        except FAILURES as error:
            raise EngineError(f"vllm refused the adapter in {folder}: {line(error)}") from error
        self._require_listed(request)
        return request

    def _remove(self, request: Any) -> None:
        self.llm.llm_engine.remove_lora(request.lora_int_id)
        self.llm.reset_prefix_cache()

    def _load_full(self, folder: Path, version: int, probe: Probe) -> None:
        check_full(folder, self._shapes)
        self._broken = f"the weights in {folder} were sent only in part, or wrongly"
        self._send(full_tensors(folder) if self.options.tensor_parallel == 1 else folder)
        self.sync_gap = self._gap(probe, None)
        self._broken, self._sent = "", version

    def _send(self, weights: Any) -> None:
        """Put tensors, or the weights in a folder where several processes read, in place of the
        model's own; what was computed with those is forgotten."""
        by = "weights_path" if isinstance(weights, Path) else "weights_iterator"
        value = str(weights) if isinstance(weights, Path) else weights
        try:
            self.llm.collective_rpc("reload_weights", kwargs={by: value})
        except FAILURES as error:
            raise EngineError(f"vllm refused the weights: {line(error)}") from error
        self.llm.reset_prefix_cache()

    def _gap(self, probe: Probe, adapter: Any) -> float:
        found = self._score(probe.token_ids, adapter)
        tolerance = self.options.tolerance
        return self._arrivals.require(probe, found, tolerance=tolerance, engine=NAME)

    # -- state -----------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer; the weights wait in main memory."""
        if not self.options.sleep:
            raise EngineError("the engine was not started for sleeping; set engine.sleep = true")
        if not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Take the memory back; the weights must still be those that were loaded."""
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False
            self.llm.reset_prefix_cache()
            if self._probe is not None:
                self.sync_gap = self.require(self._probe)

    def close(self) -> None:
        """Free what vllm holds; another engine can then be started in this process."""
        if self.llm is not None:
            llm, self.llm = self.llm, None
            stop(llm)

    def _require_awake(self) -> None:
        if self.llm is None:
            raise EngineError("the engine was closed; start another")
        if self._dead:
            raise EngineError(f"vllm failed earlier ({self._dead}); start the engine again")
        if self._asleep:
            raise EngineError("the engine sleeps; call wake() before it is used")

    def _require_ready(self) -> None:
        """EngineError unless the weights inside are those of `policy_version`."""
        self._require_awake()
        if self._broken:
            raise EngineError(f"{self._broken}; load whole weights before sampling again")
        if not self._slots:
            inside = self._sent
        elif self._served is None:
            raise EngineError(
                "the engine serves adapters and none was loaded; it would sample from the bare base"
            )
        else:
            self._require_listed(self._served.request)
            inside = self._served.version
        if inside != self.policy_version:
            raise EngineError(
                f"the engine has the weights of version {inside}, and samples were asked of "
                f"version {self.policy_version}; load that checkpoint first"
            )

    def _require_listed(self, request: Any) -> None:
        listed = self.llm.llm_engine.list_loras()
        if request.lora_int_id not in listed:
            raise EngineError(
                f"vllm does not list the adapter {request.lora_name!r} (id {request.lora_int_id}), "
                f"only the ids {sorted(listed)}; load the checkpoint again"
            )
