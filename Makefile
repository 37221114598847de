# `make demo` and `make test` do their own set-up: a virtual environment in .venv, pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types unit bench calibration accuracy claims format clean

demo: $(VENV)/.base
	$(BIN)/crosstie plan assistant --check
	$(BIN)/crosstie validate docs/examples/results.csv

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/pytest -n 2

bench: $(VENV)/.base
	$(BIN)/python benchmarks/step_speed.py
	$(BIN)/python benchmarks/plan_speed.py

# The shipped calibration from the shipped measurements: about five minutes on two cores.
calibration: $(VENV)/.base
	$(BIN)/crosstie calibrate --shipped -o src/crosstie/catalog/data/calibration.json

accuracy: $(VENV)/.base
	$(BIN)/python benchmarks/render_accuracy.py

claims: $(VENV)/.base
	CROSSTIE_CATALOG=/nonexistent $(BIN)/crosstie claims --markdown > docs/claims.md

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Crosstie needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
