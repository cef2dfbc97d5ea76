"""Two small tokenizers that have nothing in common, and teachers that read with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.models import build_model
from distill.policy import Policy
from distill.sections import ModelBuild
from distill.tokens import Chat
from distill.types import Message, Task

TEXTS = (
    "the cat sat on the mat and the dog sat on the log",
    "name the numbers: 12 and 345, then 67 and 8",
    "caf\u00e9 na\u00efve \u00fcber \u6f22\u5b57 \U0001f600 \U0001f44d\U0001f3fd",
    "abc=cba:321 sorted=abc:123",
) * 4
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"


def byte_level(texts: Sequence[str] = TEXTS, size: int = 330, **options: Any) -> Any:
    """Byte-level BPE as of GPT-2, trained on the texts; ids 0 and 1 pad and end."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", **options
    )


def sentence_piece(texts: Sequence[str] = TEXTS, size: int = 340) -> Any:
    """Unigram with marked blanks, lone bytes for what it does not know, and a BOS in front."""
    special = ["<pad>", "</s>", "<unk>", "<s>"]
    lone = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=[*special, *lone],
        unk_token="<unk>",
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    state = json.loads(core.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [a for a in state["added_tokens"] if a["content"] in special]
    for entry in state["model"]["vocab"][: len(special) + len(lone)]:
        entry[1] = -1e9  # never chosen where something else spells it
    core = Tokenizer.from_str(json.dumps(state))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return with_bos(core)


def with_bos(core: Any) -> Any:
    from tokenizers import processors

    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
    )


def word_piece() -> Any:
    """WordPiece, whose tokens do not say where blanks stood."""
    vocab = {t: i for i, t in enumerate(["[PAD]", "[UNK]", "the", "cat", "##s", "sat"])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="[PAD]", unk_token="[UNK]"
    )


def with_added(tokenizer: Any, text: str) -> Any:
    """The tokenizer with one more token that is not special, such as a mark of thinking."""
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])
    return tokenizer


def sharp_policy(tokenizer: Any, seed: int, *, trainable: bool = True, **options: Any) -> Policy:
    """A random two-layer model for a tokenizer, whose outputs are far from uniform."""
    build = ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64)
    model = build_model(build, tokenizer, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return Policy(model, base="tiny", trainable=trainable, **options)


def task_of(texts: Mapping[str, str]) -> Any:
    """Finds tasks of one user message by id."""

    def find(name: str) -> Task:
        prompt = (Message(role="user", content=texts[name]),)
        return Task(id=name, env="e", domain="d", split="train", prompt=prompt)

    return find


def chat_of(tokenizer: Any, template: str = TEMPLATE) -> Chat:
    tokenizer.chat_template = template
    return Chat(tokenizer, max_length=256)
