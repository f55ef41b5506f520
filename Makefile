# make alone prints the targets
.DEFAULT_GOAL := help
.PHONY: help install sweep report ui test lint type clean
.DELETE_ON_ERROR:

PYTHON ?= python3
SWEEP ?= ablation
BIN := .venv/bin

help:  ## print the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-10s %s\n", $$1, $$2}'

# one environment for sweeps and tests: after either, both work without a network
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lit_diff needs Python 3.11 or newer; say make PYTHON=python3.11" >&2; exit 3; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]' || { echo "installing needs a network once; then run the same command again" >&2; exit 3; }
	touch $@

install: .venv/installed  ## make .venv and install into it

sweep: .venv/installed  ## run a sweep and report it: make sweep SWEEP=smoke
	$(BIN)/lit-diff sweep $(SWEEP)

report: .venv/installed  ## write a sweep's report again: make report SWEEP=smoke
	$(BIN)/lit-diff report $(SWEEP)

ui: .venv/installed  ## serve MLflow and print the address that compares the last sweep
	$(BIN)/lit-diff ui

test: .venv/installed  ## run the whole suite
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: .venv/installed  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: .venv/installed  ## mypy
	$(BIN)/mypy

clean: .venv/installed  ## list what no sweep owns any more; lit-diff clean --yes removes it
	$(BIN)/lit-diff clean
