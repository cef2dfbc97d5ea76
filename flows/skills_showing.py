"""The bank at inference: which skills a goal is shown, and the very text that goes into a prompt.

Rollouts and `distill skills retrieve --render` both call this, so that a model is served with what
it was trained on. In a program of your own:

    from pathlib import Path
    from flows.skills_showing import block_for, retriever_of
    from skills.bank import SkillBank

    bank = SkillBank.open(Path("."), "main")
    retriever = retriever_of(bank)
    block = block_for("heat the soup and serve it", retriever)
    print(block.text)  # goes after the goal, behind an empty line; empty when no skill fits
    print(block.record.bank_version, block.shown)

A retriever holds one version: what is added to the bank later is not shown until a new one is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, PreflightError
from skills.render import Block, RenderOptions, render
from skills.retrieve import RetrieveOptions, Retriever

if TYPE_CHECKING:
    from skills.bank import SkillBank
    from skills.embed import Embedder
    from skills.index import SkillIndex
    from skills.items import SkillItem

logger = logging.getLogger(__name__)
INDEX = "index"
"""Folder of a bank with the cached vectors; it may be deleted at any time."""
POOLINGS = ("mean", "last", "cls")
_FORMS = "sentence:PATH, endpoint:URL#MODEL or policy:PATH"


def retriever_of(
    bank: SkillBank,
    options: RetrieveOptions | None = None,
    *,
    version: str | None = None,
    embedder: Embedder | None = None,
    env: str = "",
    model: str = "",
) -> Retriever:
    """Chooses among the active skills of a version, by default of the one that is active now.

    `version` is an id or its beginning. The modes with vectors need an embedder; vectors are kept
    in the folder `index` of the bank, where only new and changed texts are embedded again. `env`
    and `model` leave out skills that are for others. ConfigError for an unknown version, or a mode
    without its embedder.
    """
    chosen = options or RetrieveOptions()
    name = bank.resolve(version)
    items = bank.items("active", version=name)
    index = None
    if embedder is not None and chosen.mode != "template":
        index = _index(bank.path / INDEX, items, embedder)
    return Retriever(
        items, chosen, bank_version=name, embedder=embedder, index=index, env=env, model=model
    )


def _index(folder: Path, items: Sequence[SkillItem], embedder: Embedder) -> SkillIndex | None:
    from skills.index import open_index

    try:
        return open_index(folder, items, embedder)[0]
    except PreflightError as error:
        # A bank may lie where nothing can be written; the vectors are then made every time.
        logger.warning("the vectors of the skills are not kept: %s", error)
        return None


def block_for(
    goal: str,
    retriever: Retriever,
    options: RenderOptions | None = None,
    *,
    category: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> Block:
    """The block of one goal: its text, what was shown or dropped, and the record to log.

    `category` overrides what the rules would say. ConfigError for a budget in tokens without
    `count_tokens`.
    """
    (block,) = blocks_for([goal], retriever, options, category=category, count_tokens=count_tokens)
    return block


def blocks_for(
    goals: Sequence[str],
    retriever: Retriever,
    options: RenderOptions | None = None,
    *,
    category: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> list[Block]:
    """The blocks of many goals, in their order; the goals are embedded together."""
    chosen = options or RenderOptions()
    found = retriever.retrieve(goals, category=category)
    return [render(one, chosen, count_tokens=count_tokens) for one in found]


# -- what a tokenizer adds ------------------------------------------------------------------------


def counter_of(tokenizer: Any) -> Callable[[str], int]:
    """Counts the tokens of a text, without those that a chat template adds."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def specials_of(tokenizer: Any) -> tuple[str, ...]:
    """The texts that the tokenizer reads as commands: `RenderOptions.specials`."""
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return tuple(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *added]))


# -- embedders by name ----------------------------------------------------------------------------


def embedder_of(text: str, *, home: Path, key_env: str = "") -> Embedder:
    """An embedder by a short name.

        sentence:PATH         an embedding model; `#cls` or `#last` behind it: how it pools
        endpoint:URL#MODEL    an OpenAI-compatible endpoint; `key_env` names the key's variable
        policy:PATH           the mean last hidden state of a causal language model

    ConfigError for another form, or a model that cannot be loaded.
    """
    kind, _, rest = text.partition(":")
    place, _, detail = rest.partition("#")
    if not place or kind not in ("sentence", "endpoint", "policy"):
        raise ConfigError(f"an embedder is {_FORMS}, got {text!r}")
    if kind == "endpoint":
        from skills.embed_endpoint import EndpointEmbedder, EndpointOptions

        return EndpointEmbedder(EndpointOptions(url=place, model=detail, api_key_env=key_env))
    if key_env:
        raise ConfigError(f"a key belongs to endpoint:URL#MODEL, but the embedder is {kind}")
    return _sentence(place, detail) if kind == "sentence" else _policy(place, detail, home)


def _sentence(place: str, pooling: str) -> Embedder:
    from skills.embed import SentenceEmbedder, SentenceOptions

    if pooling and pooling not in POOLINGS:
        raise ConfigError(f"sentence:PATH#POOLING knows {', '.join(POOLINGS)}, got {pooling!r}")
    wanted: Any = pooling or "mean"
    return SentenceEmbedder(SentenceOptions(model=place, pooling=wanted))


def _policy(place: str, detail: str, home: Path) -> Embedder:
    from distill.models import eos_token_ids, load_model, load_tokenizer
    from distill.policy import Policy
    from distill.pretrained import resolve_model
    from distill.tokens import Chat
    from skills.embed import PolicyEmbedder

    if detail:
        raise ConfigError(f"policy:PATH takes nothing behind #, got {detail!r}")
    folder = resolve_model(place, home=home, revision=None).dir_or_id
    policy = Policy(load_model(folder), base=place, trainable=False)
    chat = Chat(load_tokenizer(folder), eos_token_ids=eos_token_ids(policy.model))
    return PolicyEmbedder(policy, chat)
