# One command per thing a person does; each sets up .venv first if it has to.
#   make demo | test | test-full | plugins | triton-server | lint | format | clean
#   make test-gpu | bench   on a machine with an NVIDIA GPU
# PYTHON=/path/to/python chooses the interpreter, TORCH=... the torch requirement,
# CUDA_ARCHITECTURES=90 the GPUs that `make plugins` compiles for.
SHELL := /bin/bash
.DEFAULT_GOAL := help
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile
NOT_HERE := not gpu and not multi_gpu and not nightly
CUDA_ARCHITECTURES ?= 80;90
LIBRARY := build/cuda/liblooptrt_plugins.so
CXX_SOURCES = $(shell find plugins tests/emulator -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

# A candidate counts only if it runs: shims of absent versions sit on PATH on some machines.
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3 python)

.PHONY: help venv demo test test-full test-gpu bench plugins triton-server lint cxx-format format clean

help:
	@sed -n 's/^#   //p; s/^# PYTHON/PYTHON/p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml CMakeLists.txt
	@python=""; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c '$(IS_SUPPORTED)' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "looptrt needs Python 3.11, 3.12 or 3.13 and found none that runs (tried:" \
	    $(CANDIDATES)"); install one or say make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1 \
	    || ! $(BIN)/python -c '$(IS_SUPPORTED)'; then \
	  if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python cannot make virtual environments: apt-get install python3-venv (or pythonX.Y-venv)" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating .venv with $$("$$python" --version)"; \
	  "$$python" -m venv --clear .venv; \
	fi
	@echo "Installing $(TORCH)"
	@$(BIN)/python -m pip install "$(TORCH)"
	@echo "Installing looptrt and its tools"
	@$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

demo: venv
	@$(BIN)/python examples/demo.py

test: venv
	$(PYTEST) -m "$(NOT_HERE) and not full"

test-full: venv
	$(PYTEST) -m "$(NOT_HERE) and full"

# What only a GPU can show; a test that is skipped there fails.
test-gpu: plugins
	$(PYTEST) -m "gpu or multi_gpu" --require-gpu

# Every figure of the GPU tables into out/bench, and README's table; a step that misses a target or
# finds a fault does not keep the others from running, and makes the whole fail.
bench: plugins
	@mkdir -p out/bench; failed=""; \
	run() { \
	  echo "== benchmarks/$$1.py"; \
	  $(BIN)/python benchmarks/$$1.py --out out/bench/$$1.json "$${@:2}" || failed="$$failed $$1"; \
	}; \
	for step in kernels attention decode_step; do run $$step --library $(LIBRARY); done; \
	run joined_projections; \
	run serving; \
	$(BIN)/python benchmarks/report.py --results out/bench/serving.json || failed="$$failed report"; \
	if [ -n "$$failed" ]; then echo "failed or missed a target:$$failed" >&2; exit 1; fi

# The CUDA plugin library, with nvcc on PATH or else the compiler of PyPI's wheels.
plugins: venv
	@command -v nvcc >/dev/null || $(BIN)/python -m pip install '.[cuda-build]'
	$(BIN)/cmake -S . -B build/cuda -DLOOPTRT_CUDA=ON \
	  -DLOOPTRT_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" -DPython3_EXECUTABLE=$(BIN)/python
	$(BIN)/cmake --build build/cuda --parallel

# A Triton Inference Server in an environment of its own, under the user's cache directory.
triton-server: venv
	$(BIN)/looptrt triton --install_server

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(MAKE) --no-print-directory cxx-format

cxx-format: venv
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
