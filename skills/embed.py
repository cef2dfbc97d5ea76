"""Text to unit vectors, for search. What embeds is named, so that vectors never mix unnoticed.

    PolicyEmbedder     the student's own mean last hidden state: needs nothing else, the default
    SentenceEmbedder   an embedding model by name or path
    EndpointEmbedder   an OpenAI-compatible endpoint (`skills.embed_endpoint`)
    HashingEmbedder    for tests only: knows words, no meaning

`CachedEmbedder` keeps on disk what was embedded once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError, SkillBankError
from distill.rundir import atomic_write, digest_bytes, digest_json

if TYPE_CHECKING:
    from distill.policy import Policy
    from distill.tokens import Chat

Vectors = NDArray[np.float32]
"""[N, d], every row of length one."""
logger = logging.getLogger(__name__)
MAX_SEGMENTS = 64
"""Files of one embedder in the cache; more are merged into one."""


class Embedder(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str:
        """Changes whenever the same text may get another vector."""
        ...

    @property
    def dimension(self) -> int: ...
    def embed(self, texts: Sequence[str]) -> Vectors:
        """float32 [N, d] with rows of length one, in the order of the texts."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedderKey:
    """Two sets of vectors may be compared when their keys are equal."""

    name: str
    version: str
    dimension: int

    @classmethod
    def of(cls, embedder: Embedder) -> EmbedderKey:
        return cls(name=embedder.name, version=embedder.version, dimension=embedder.dimension)

    @property
    def digest(self) -> str:
        """16 hex digits; names files."""
        return digest_json(self)[:16]

    def __str__(self) -> str:
        return f"{self.name} (version {self.version}, {self.dimension} dimensions)"


def unit_rows(values: Any, *, source: str) -> Vectors:
    """Rows scaled to length one. SkillBankError for rows without a direction, or not finite."""
    rows = np.ascontiguousarray(values, dtype=np.float32)
    if rows.ndim != 2:
        raise SkillBankError(f"{source}: expected vectors [N, d], got the shape {rows.shape}")
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    wrong = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if wrong.size:
        raise SkillBankError(
            f"{source}: vector {wrong[0]} of {len(rows)} is zero or not finite, so it has no "
            "direction; check the embedder"
        )
    return np.ascontiguousarray(rows / lengths[:, None], dtype=np.float32)


def require_text(texts: Sequence[str], *, source: str) -> None:
    for number, text in enumerate(texts):
        if not text.strip():
            raise SkillBankError(
                f"{source}: text {number} of {len(texts)} is empty; nothing to embed"
            )


# -- embedders ----------------------------------------------------------------------------------


class PolicyEmbedder:
    """The student's own mean last hidden state over the tokens of a text.

    Needs no second model and no network. The vectors belong to the weights that the role has
    now: make a new embedder after they moved. Without a `version` such as a checkpoint's digest,
    one is measured on a fixed sentence. Cosines of such states are all high; compare ranks, and
    choose a threshold only after looking at them.
    """

    def __init__(
        self, policy: Policy, chat: Chat, *, version: str = "", role: str = "student"
    ) -> None:
        self.policy = policy
        self.chat = chat
        self.role = role
        self.name = f"policy:{policy.base}:{role}"
        self.dimension = int(policy.model.config.get_text_config().hidden_size)
        self.num_cut = 0
        """Texts so far that were longer than the policy reads."""
        self.version = version or self._measured()

    def _measured(self) -> str:
        probe = self.embed(["open the box and put the cup on the table"])
        return digest_bytes(np.round(probe.astype(np.float64), 3).tobytes())[:16]

    def embed(self, texts: Sequence[str]) -> Vectors:
        import torch

        from distill.body import hidden_states

        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        require_text(texts, source=self.name)
        found = self.chat.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        limit = self.chat.max_length or max(map(len, found))
        self.num_cut += sum(len(ids) > limit for ids in found)
        rows = [list(ids[:limit]) for ids in found]
        if not all(rows):
            raise SkillBankError(f"{self.name}: a text has no tokens in the student's vocabulary")
        out = np.zeros((len(rows), self.dimension), dtype=np.float32)
        with torch.no_grad(), self.policy.as_role(self.role) as model:
            for cut in _cuts([len(r) for r in rows], self.policy.max_tokens):
                width = max(len(rows[i]) for i in cut)
                ids = torch.zeros(len(cut), width, dtype=torch.long, device=self.policy.device)
                mask = torch.zeros_like(ids, dtype=torch.bool)
                for place, i in enumerate(cut):
                    ids[place, : len(rows[i])] = torch.tensor(rows[i])
                    mask[place, : len(rows[i])] = True
                mean = _mean(hidden_states(model, ids, mask), mask)
                out[cut] = mean.cpu().numpy()
        return unit_rows(out, source=self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceOptions:
    """name = "sentence": an embedding model of transformers."""

    model: str
    """A folder, or a name at the hub."""
    revision: str = ""
    pooling: Literal["mean", "last", "cls"] = "mean"
    """What the model was trained with: most use the mean, Qwen3-Embedding the last token."""
    max_length: int = 512
    batch_tokens: int = 8192
    """Padded tokens of one pass."""
    device: str = "cpu"


class SentenceEmbedder:
    """An embedding model by name or path, without running code that comes with it."""

    def __init__(self, options: SentenceOptions) -> None:
        from safetensors import SafetensorError
        from transformers import AutoModel, AutoTokenizer

        where: dict[str, Any] = {"revision": options.revision} if options.revision else {}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(options.model, **where)
            self._model = AutoModel.from_pretrained(options.model, use_safetensors=True, **where)
        except (OSError, ValueError, SafetensorError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"the embedding model {options.model!r} cannot be loaded: {first}; give a folder "
                "with config.json, a tokenizer and safetensors weights, or a name at the hub"
            ) from error
        self._model.eval().requires_grad_(False).to(options.device)
        self.options = options
        self.name = f"sentence:{Path(options.model).name}:{options.pooling}"
        self.dimension = int(self._model.config.get_text_config().hidden_size)
        self.version = self._version()
        self.num_cut = 0
        """Texts so far that were longer than `max_length` tokens."""

    def _version(self) -> str:
        parts = [self._model.config.to_json_string(use_diff=False), str(self.options.max_length)]
        for name, values in sorted(self._model.state_dict().items()):
            flat = values.flatten()
            # A few numbers of every tensor tell two sets of weights apart without reading all.
            some = flat[:: max(1, flat.numel() // 16)][:16].float().cpu().numpy()
            parts.append(f"{name}:{tuple(values.shape)}:{digest_bytes(some.tobytes())}")
        return digest_json(parts)[:16]

    def embed(self, texts: Sequence[str]) -> Vectors:
        import torch

        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        require_text(texts, source=self.name)
        found = self._tokenizer(list(texts), truncation=False)["input_ids"]
        self.num_cut += sum(len(ids) > self.options.max_length for ids in found)
        lengths = [min(len(ids), self.options.max_length) for ids in found]
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        with torch.no_grad():
            for cut in _cuts(lengths, self.options.batch_tokens):
                batch = self._tokenizer(
                    [texts[i] for i in cut],
                    padding=True,
                    padding_side="right",
                    truncation=True,
                    max_length=self.options.max_length,
                    return_tensors="pt",
                ).to(self.options.device)
                hidden, mask = (
                    self._model(**batch).last_hidden_state,
                    batch["attention_mask"].bool(),
                )
                if self.options.pooling == "mean":
                    pooled = _mean(hidden, mask)
                elif self.options.pooling == "cls":
                    pooled = hidden[:, 0].float()
                else:
                    last = mask.sum(1) - 1
                    pooled = hidden[torch.arange(len(cut), device=hidden.device), last].float()
                out[cut] = pooled.cpu().numpy()
        return unit_rows(out, source=self.name)


class HashingEmbedder:
    """For tests only: counts of hashed words. It finds shared words and understands nothing."""

    version = "1"

    def __init__(self, dimension: int = 64) -> None:
        self.dimension = dimension
        self.name = "hashing"

    def embed(self, texts: Sequence[str]) -> Vectors:
        require_text(texts, source=self.name)
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.casefold()) or [text]:
                number = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
                out[row, number % self.dimension] += 1.0
        return unit_rows(out, source=self.name) if len(out) else out


def _mean(hidden: Any, mask: Any) -> Any:
    """Mean over the marked positions, in float32: [B, T, d], [B, T] -> [B, d]."""
    kept = hidden.float().masked_fill(~mask[..., None], 0.0)
    return kept.sum(1) / mask.sum(1)[:, None]


def _cuts(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Places in order of length, cut so that no padded batch exceeds the budget."""
    cut: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if cut and (len(cut) + 1) * lengths[i] > max_tokens:
            yield cut
            cut = []
        cut.append(i)
    if cut:
        yield cut


# -- cache --------------------------------------------------------------------------------------


class CachedEmbedder:
    """An embedder that remembers, in `folder`, every text that it embedded.

    One subfolder per embedder, version and dimension; only safetensors. A damaged file is left
    out with a warning: what it held is embedded again.
    """

    def __init__(self, embedder: Embedder, folder: Path) -> None:
        self.embedder = embedder
        self.key = EmbedderKey.of(embedder)
        self.folder = folder / self.key.digest
        self.num_embedded = 0
        """Texts that had to be embedded, since this object was made."""
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._segments: list[Path] = []
        for path in sorted(self.folder.glob("*.safetensors")):
            self._read(path)

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def version(self) -> str:
        return self.key.version

    @property
    def dimension(self) -> int:
        return self.key.dimension

    def __len__(self) -> int:
        return len(self._vectors)

    def embed(self, texts: Sequence[str]) -> Vectors:
        keys = [digest_bytes(text.encode("utf-8", "surrogatepass")) for text in texts]
        missing = {k: t for k, t in zip(keys, texts, strict=True) if k not in self._vectors}
        if missing:
            made = self.embedder.embed(list(missing.values()))
            if made.shape != (len(missing), self.dimension):
                raise SkillBankError(
                    f"{self.key} returned vectors of shape {made.shape} for {len(missing)} texts; "
                    f"expected {(len(missing), self.dimension)}"
                )
            self.num_embedded += len(missing)
            self._vectors |= dict(zip(missing, made, strict=True))
            self._write(list(missing))
        if not keys:
            return np.zeros((0, self.dimension), dtype=np.float32)
        return np.stack([self._vectors[k] for k in keys])

    def _write(self, keys: Sequence[str]) -> None:
        from safetensors.numpy import save

        replaced: list[Path] = []
        if len(self._segments) >= MAX_SEGMENTS:
            keys, replaced = list(self._vectors), self._segments
            self._segments = []
        data = save(
            {"vectors": np.stack([self._vectors[k] for k in keys])},
            metadata={"texts": json.dumps(keys), "embedder": str(self.key)},
        )
        path = self.folder / f"{digest_bytes(data)[:32]}.safetensors"
        atomic_write(path, data)
        self._segments.append(path)
        for old in replaced:
            if old != path:
                old.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                keys = json.loads((file.metadata() or {})["texts"])
                rows = file.get_tensor("vectors")
            if rows.shape != (len(keys), self.dimension) or rows.dtype != np.float32:
                raise ValueError(f"{len(keys)} texts with vectors of shape {rows.shape}")
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            logger.warning("left out %s, a damaged file of the embedding cache: %s", path, error)
            return
        self._vectors |= dict(zip(keys, rows, strict=True))
        self._segments.append(path)
