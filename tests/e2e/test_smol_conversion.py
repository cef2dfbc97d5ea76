"""The packaged 135M model becomes an ordinary model directory, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.real]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_packaged_model_is_converted_once_and_then_loads_as_any_other(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distill.pretrained import resolve_model

    found = resolve_model("package:smollm2", home=tmp_path, revision=None)
    path = Path(found.dir_or_id)
    assert found.source == "package"
    assert len(found.revision or "") == 64
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config

    times = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert resolve_model("package:smollm2", home=tmp_path, revision=None) == found
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == times

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France? One short sentence."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    reply = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
