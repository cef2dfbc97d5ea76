"""Embedders: unit vectors, one per text, under a name that says what made them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.errors import ConfigError, SkillBankError
from endpoint import Asked, Reply, serve
from helpers import make_chat, make_model, make_policy
from skills.embed import (
    CachedEmbedder,
    Embedder,
    EmbedderKey,
    HashingEmbedder,
    PolicyEmbedder,
    SentenceEmbedder,
    SentenceOptions,
)
from skills.embed_endpoint import EndpointEmbedder, EndpointOptions

TEXTS = ["open the box", "a", "put the red cup on the table", "open the box"]


def policy_embedder(seed: int = 0, **options: Any) -> PolicyEmbedder:
    return PolicyEmbedder(make_policy(seed), make_chat(), **options)


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    make_model().base_model.save_pretrained(folder)
    make_chat().tokenizer.save_pretrained(folder)
    return folder


def sentence(folder: Path, **options: Any) -> SentenceEmbedder:
    return SentenceEmbedder(SentenceOptions(model=str(folder), **options))


@pytest.mark.parametrize("make", [policy_embedder, HashingEmbedder])
def test_every_text_gets_a_unit_vector_in_its_place(make: Callable[[], Embedder]) -> None:
    embedder = make()
    rows = embedder.embed(TEXTS)
    assert rows.shape == (4, embedder.dimension)
    assert rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-6)
    assert np.allclose(rows[0], rows[3], atol=1e-6)
    assert np.allclose(embedder.embed([TEXTS[2]])[0], rows[2], atol=1e-5)
    assert embedder.embed([]).shape == (0, embedder.dimension)
    with pytest.raises(SkillBankError, match="text 1 of 2 is empty"):
        embedder.embed(["a", " \n"])


def test_the_policy_embeds_the_mean_of_its_last_hidden_states() -> None:
    policy, chat = make_policy(), make_chat()
    ids = torch.tensor([chat.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        hidden = policy.model(ids, output_hidden_states=True).hidden_states[-1][0].float()
    mean = hidden.mean(0).numpy()
    found = PolicyEmbedder(policy, chat).embed(TEXTS)[2]
    assert np.allclose(found, mean / np.linalg.norm(mean), atol=1e-5)


def test_other_weights_are_another_version_of_the_policy() -> None:
    assert policy_embedder(0).version == policy_embedder(0).version
    assert policy_embedder(0).version != policy_embedder(1).version
    assert policy_embedder(0, version="abc").version == "abc"


def test_texts_longer_than_the_policy_reads_are_counted() -> None:
    embedder = policy_embedder()
    embedder.embed(["x" * 64, "x" * 65])
    assert embedder.num_cut == 1


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_model_from_a_folder_pools_as_it_was_told(sentence_folder: Path, pooling: Any) -> None:
    embedder = sentence(sentence_folder, pooling=pooling)
    rows = embedder.embed(TEXTS)
    ids = torch.tensor([make_chat().tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]])
    model = make_model()
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][0].float()
    pooled = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling].numpy()
    assert np.allclose(rows[2], pooled / np.linalg.norm(pooled), atol=1e-5)


def test_the_version_of_a_model_tells_weights_and_settings_apart(sentence_folder: Path) -> None:
    first = sentence(sentence_folder)
    assert first.version == sentence(sentence_folder).version
    assert first.version != sentence(sentence_folder, max_length=8).version
    long = sentence(sentence_folder, max_length=8)
    long.embed(TEXTS)
    assert long.num_cut == 3


def test_damaged_weights_are_a_clear_error(sentence_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(sentence_folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"12345678" * 9)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        sentence(tmp_path / "model")


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        sentence(tmp_path / "none")


# -- cache --------------------------------------------------------------------------------------


def test_nothing_is_embedded_twice(tmp_path: Path) -> None:
    plain = HashingEmbedder()
    first = CachedEmbedder(plain, tmp_path)
    rows = first.embed(TEXTS)
    assert first.num_embedded == 3
    assert np.array_equal(rows, plain.embed(TEXTS))
    again = CachedEmbedder(plain, tmp_path)
    assert np.array_equal(again.embed([*TEXTS, "new"])[:4], rows)
    assert (again.num_embedded, len(again)) == (1, 4)
    assert EmbedderKey.of(again) == EmbedderKey.of(plain)
    assert again.embed([]).shape == (0, 64)


def test_embedders_of_other_sizes_do_not_share_vectors(tmp_path: Path) -> None:
    CachedEmbedder(HashingEmbedder(64), tmp_path).embed(TEXTS)
    other = CachedEmbedder(HashingEmbedder(32), tmp_path)
    assert other.embed(TEXTS).shape == (4, 32)
    assert other.num_embedded == 3


def test_many_small_files_become_one(tmp_path: Path) -> None:
    cache = CachedEmbedder(HashingEmbedder(), tmp_path)
    for number in range(66):
        cache.embed([f"text {number}"])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert len(CachedEmbedder(HashingEmbedder(), tmp_path)) == 66


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_damaged_file_of_the_cache_is_left_out(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    CachedEmbedder(HashingEmbedder(), tmp_path).embed(["one"])
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:40] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        again = CachedEmbedder(HashingEmbedder(), tmp_path)
    assert "damaged" in caplog.text
    again.embed(["one"])
    assert again.num_embedded == 1


def test_an_embedder_that_returns_the_wrong_number_is_caught(tmp_path: Path) -> None:
    class Short(HashingEmbedder):
        def embed(self, texts: Any) -> Any:
            return super().embed(texts)[:1]

    with pytest.raises(SkillBankError, match=r"shape \(1, 64\) for 2 texts"):
        CachedEmbedder(Short(), tmp_path).embed(["a", "b"])


# -- endpoint -----------------------------------------------------------------------------------


def answer(asked: Asked, number: int) -> Reply:
    """Vectors that tell texts apart, sent in the wrong order."""
    rows = [
        {"index": i, "embedding": [float(len(t)), 1.0, 0.0]}
        for i, t in enumerate(asked.body["input"])
    ]
    return Reply(body={"data": rows[::-1]})


def options(url: str, **changes: Any) -> EndpointOptions:
    values = {"url": url, "model": "m", "backoff": 0.01, "retries": 2, "timeout": 5.0}
    return EndpointOptions(**(values | changes))


def test_an_endpoint_is_asked_in_batches_and_its_order_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMBED_KEY", "secret")
    with serve(answer) as server:
        embedder = EndpointEmbedder(options(server.url, batch=2, api_key_env="EMBED_KEY"))
        rows = embedder.embed(TEXTS[:3])
        assert embedder.dimension == 3
    assert [a.body["input"] for a in server.asked] == [TEXTS[:2], TEXTS[2:3]]
    assert server.asked[0].headers["Authorization"] == "Bearer secret"
    assert server.asked[0].path == "/v1/embeddings"
    expected = np.array([[len(t), 1.0, 0.0] for t in TEXTS[:3]])
    assert np.allclose(rows, expected / np.linalg.norm(expected, axis=1, keepdims=True))


def test_the_dimension_of_an_endpoint_is_asked_for_when_unknown() -> None:
    with serve(answer) as server:
        assert EndpointEmbedder(options(server.url)).dimension == 3
        assert EndpointEmbedder(options(server.url, dimension=7)).dimension == 7
    assert len(server.asked) == 1


def test_a_busy_endpoint_is_asked_again() -> None:
    def busy(asked: Asked, number: int) -> Reply:
        return answer(asked, number) if number == 2 else Reply(status=503, body={})

    with serve(busy) as server:
        assert EndpointEmbedder(options(server.url)).embed(["a"]).shape == (1, 3)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("reply", "word", "tries"),
    [
        (Reply(status=500, body={}), "status 500, after 3 tries", 3),
        (Reply(status=401, body={"error": "secret"}), "status 401", 1),
        (Reply(body=b"no json"), "no list `data`", 1),
        (Reply(body={"data": []}), "0 vectors for 1 texts", 1),
        (Reply(body={"data": [{"index": 4, "embedding": [1.0]}]}), "wrong indexes", 1),
        (Reply(body={"data": [{"index": 0, "embedding": None}]}), "finite numbers", 1),
        (Reply(body=b'{"data": [{"index": 0, "embedding": [NaN, 1]}]}'), "finite numbers", 1),
        (Reply(body={"data": [{"index": 0, "embedding": [0.0, 0.0]}]}), "no direction", 1),
    ],
)
def test_an_unusable_answer_is_a_clear_error(reply: Reply, word: str, tries: int) -> None:
    with serve(lambda asked, number: reply) as server:
        with pytest.raises(SkillBankError, match=word) as caught:
            EndpointEmbedder(options(server.url)).embed(["private words"])
        assert len(server.asked) == tries
    assert "private words" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_another_size_than_before_is_a_clear_error() -> None:
    with serve(answer) as server, pytest.raises(SkillBankError, match="3 dimensions, expected 4"):
        EndpointEmbedder(options(server.url, dimension=4)).embed(["a"])


def test_nobody_listening_ends_with_the_deadline() -> None:
    gone = options("http://127.0.0.1:9/v1", retries=50, deadline=0.2)
    with pytest.raises(SkillBankError, match="ConnectError"):
        EndpointEmbedder(gone).embed(["a"])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"url": "127.0.0.1"}, "must look like"),
        ({"url": "http:" + "//u:p@127.0.0.1/v1"}, "no user"),
        ({"model": ""}, "model is empty"),
        ({"api_key_env": "sk-123"}, "name of an environment"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"batch": 0}, "batch must be at least 1"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        options(**({"url": "http://127.0.0.1:1/v1"} | changes))
    assert "sk-123" not in str(caught.value)


def test_a_key_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        EndpointEmbedder(options("http://127.0.0.1:1/v1", api_key_env="NO_SUCH_KEY"))
