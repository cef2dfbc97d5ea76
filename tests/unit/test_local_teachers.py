"""Frozen teachers in fewer bits: smaller, nearly the same, and clear about what is missing."""

from __future__ import annotations

import sys

import pytest
import torch

from distill.body import require_known_head
from distill.distributions import HiddenDistribution
from distill.divergence import forward_kl
from distill.errors import CheckpointError, MissingExtra
from distill.models import build_model, char_tokenizer
from distill.policy import Policy
from distill.sections import ModelBuild
from distill.types import ScoreRequest, TeacherView
from flows.local_teachers import load_frozen, weights_digest
from helpers import ALPHABET, random_rollouts
from scoring_endpoint import make_scorer, serving
from teachers.local import LocalTeacher
from teachers.views import Plain

CPU = torch.device("cpu")
WORST = {"int8": 1e-3, "int4": 0.1}
"""Largest mean KL from the exact teacher, in nats; measured: 8e-5 and 6e-3."""
FEWER = {"int8": 0.4, "int4": 0.25}
"""Largest share of the float32 model's bytes; embeddings and head stay as they are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with weights that matter."""
    build = ModelBuild(hidden_size=128, head_dim=32, intermediate_size=256)
    model = build_model(build, char_tokenizer(ALPHABET), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    place = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(str(place))
    return place


def views():
    return [v for v in Plain().build(random_rollouts(12), {}) if v is not None]


def teacher(model):
    return LocalTeacher(Policy(model, base="t", trainable=False), name="t")


def all_log_probs(model):
    found = teacher(model).distribution(views())
    assert isinstance(found, HiddenDistribution)
    return found.log_probs(torch.arange(len(found.hidden)))


def test_without_quantisation_it_is_the_model_itself(folder):
    model = load_frozen(folder, dtype="float32", quantize="none", device=CPU)
    again = load_frozen(folder, dtype="float32", quantize="none", device=CPU)
    torch.testing.assert_close(all_log_probs(model), all_log_probs(again), rtol=0, atol=0)
    assert next(model.parameters()).dtype == torch.float32
    half = load_frozen(folder, dtype="bfloat16", quantize="none", device=CPU)
    assert next(half.parameters()).dtype == torch.bfloat16


def test_a_missing_library_is_named_with_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra, match=r'quantize = "int8".*distill-nightly\[quant\]'):
        load_frozen(folder, dtype="float32", quantize="int8", device=CPU)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantised_teacher_is_smaller_and_nearly_the_same(folder, quantize):
    pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
    exact = load_frozen(folder, dtype="float32", quantize="none", device=CPU)
    model = load_frozen(folder, dtype="float32", quantize=quantize, device=CPU)
    require_known_head(model)
    size = model.get_memory_footprint() / exact.get_memory_footprint()
    assert size < FEWER[quantize]
    gap = float(forward_kl(all_log_probs(model), all_log_probs(exact)).mean())
    assert 1e-7 < gap < WORST[quantize]
    assert model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_its_scores_do_not_depend_on_what_is_scored_beside_them(folder, quantize):
    pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
    model = load_frozen(folder, dtype="float32", quantize=quantize, device=CPU)
    with torch.no_grad():  # outliers in some rows, which then must not count for all of them
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 5.0
            layer.post_attention_layernorm.weight[3] *= 5.0
    made, rows = teacher(model), torch.randint(3, 40, (6, 20), generator=torch.Generator())
    # Of one length: padding changes last bits, which rounding to 8 bits can make larger.
    same = [
        TeacherView(token_ids=tuple(row), positions=(5, 9, 19), kind="plain", id="v")
        for row in rows.tolist()
    ]
    together = made.score(same, ScoreRequest())
    for view, score in zip(same, together, strict=True):
        (alone,) = made.score([view], ScoreRequest())
        assert score.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_quantised_teacher_is_served_as_it_is(folder):
    pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
    model = load_frozen(folder, dtype="float32", quantize="int8", device=CPU)
    expected = teacher(model).score(views(), ScoreRequest(entropy=True))
    with serving(make_scorer(model)) as endpoint:
        remote = endpoint.teacher()
        found = remote.score(views(), ScoreRequest(entropy=True))
        rows = torch.arange(5)
        full = remote.distribution(views()).log_probs(rows)
    assert [s.logprobs for s in found] == [s.logprobs for s in expected]
    torch.testing.assert_close(full, all_log_probs(model)[:5])


def test_weights_are_named_by_their_bytes_and_how_they_are_computed_with(folder, tmp_path):
    names = {
        weights_digest(folder, dtype=dtype, quantize=quantize)
        for dtype in ("float32", "bfloat16")
        for quantize in ("none", "int8", "int4")
    }
    assert len(names) == 6
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    same = weights_digest(tmp_path, dtype="float32", quantize="none")
    assert same == weights_digest(folder, dtype="float32", quantize="none")
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert weights_digest(tmp_path, dtype="float32", quantize="none") not in names


def test_a_damaged_model_is_named(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_frozen(tmp_path, dtype="float32", quantize="none", device=CPU)
    pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
    with pytest.raises(CheckpointError, match="cannot be loaded in int4 on cpu"):
        load_frozen(tmp_path, dtype="float32", quantize="int4", device=CPU)


def test_weights_in_the_older_format_have_names_too_and_none_are_refused(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="it holds none"):
        weights_digest(tmp_path, dtype="float32", quantize="none")
    names = []
    for content in (b"one", b"two"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        names.append(weights_digest(tmp_path, dtype="float32", quantize="none"))
    assert names[0] != names[1]
