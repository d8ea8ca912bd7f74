# Every target makes the environment it needs: a fresh machine wants nothing but Python 3.10+.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two tests at a time: each starts up to four workers, and most of them wait.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: quickstart test test-long test-all lint types format clean

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -q "torch>=2.11"; \
	else $(BIN)/pip install -q -r constraints-cpu.txt; fi
	$(BIN)/pip install -q -e ".[dev,examples]"
	touch $@

quickstart: $(VENV)/.ready  ## train the language model on two local workers
	$(BIN)/python -m examples.lm.train --quickstart

test: $(VENV)/.ready  ## the whole suite but the long checks
	$(PYTEST) -m "not long and not exhaustive"

test-long: $(VENV)/.ready  ## the checks of several minutes each, or as many as LIMIT lets begin
	$(PYTEST) -m long $(LIMIT)

test-all: $(VENV)/.ready  ## everything, for hours
	$(PYTEST)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
