# Two commands need nothing but Python >= 3.11, make and g++:  make serve  and  make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: help setup serve shell test test-slow test-gpu lint format clean

help:
	@echo "make serve      set up everything and serve the default model on http://127.0.0.1:1919 (ARGS='--port 8000' to change flags)"
	@echo "make shell      chat with the default model in the terminal"
	@echo "make test       set up everything, lint, check types, run the tests"
	@echo "make test-slow  the slow tests;  make test-gpu  those that need a CUDA device"
	@echo "make format     format the code;  make clean  remove what make set up here"

# The stamp is newer than what it was made from, so a second run starts at once.
$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@echo "==> [1/3] $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "minisgl needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> [2/3] installing the packages (CPU build of torch: a few minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints-cpu.txt -e '.[dev,bench]'
	@touch $@

setup: $(VENV)/.installed
	@echo "==> [3/3] the default model and the CPU kernels"
	@$(BIN)/python -m minisgl.setup

serve: setup
	@$(BIN)/python -m minisgl $(ARGS)

shell: setup
	@$(BIN)/python -m minisgl --shell $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup lint
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
