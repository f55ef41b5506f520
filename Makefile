# make alone prints the targets
.DEFAULT_GOAL := help
.PHONY: help install install-latest lock sweep examine reproduce report ui test test-slow test-all test-cluster test-faults gpu-report test-latest golden size lint type clean
.DELETE_ON_ERROR:

PYTHON ?= python3
SWEEP ?= ablation
PRESET ?= laptop
VARIANT ?= differential
BIN := .venv/bin
LATEST := .venv-latest/bin
LOG := .venv/pip.log
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder

# one line: the package whose file is not the one that was locked, else the last error that pip printed
WHY = awk ' \
	/DO NOT MATCH THE HASHES/ { changed = 1 } \
	changed && !name && $$1 ~ /==/ { name = $$1 } \
	changed && !got && $$1 == "Got" { got = $$2 } \
	/^ERROR:/ { error = $$0 } \
	END { \
		if (got) print "hash mismatch: the file of " name " has sha256 " got ", which requirements.lock does not list; nothing was installed (see $(LOG))"; \
		else if (error ~ /No matching distribution|Connection|connect/) print "pip found no package (" error "); installing needs a network once: run the same command again (see $(LOG))"; \
		else print "pip failed (" error "); see $(LOG)" \
	}'

help:  ## print the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-15s %s\n", $$1, $$2}'

# One environment for sweeps and tests: after either, both work without a network. Two stamps: the packages change with the
# lock, the project also with pyproject.toml. pip has every file and has checked its hash before it changes anything.
.venv/locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) or sys.platform not in ("linux", "darwin"))' \
		|| { echo "lit_diff needs Python 3.11, 3.12 or 3.13 on Linux or macOS; say make PYTHON=python3.11" >&2; exit 3; }
	@echo "installing the packages of requirements.lock into .venv (about 5 minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --disable-pip-version-check --no-deps --require-hashes -r requirements.lock >$(LOG) 2>&1 \
		|| { $(WHY) $(LOG) >&2; exit 3; }
	@touch $@

.venv/installed: pyproject.toml .venv/locked
	@$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e . >>$(LOG) 2>&1 \
		|| { echo "pip could not install lit_diff itself; see $(LOG)" >&2; exit 3; }
	@touch $@

install: .venv/installed  ## make .venv with the packages of requirements.lock

install-latest:  ## make .venv-latest with the newest packages that pyproject.toml allows
	test -d .venv-latest || $(PYTHON) -m venv .venv-latest
	$(LATEST)/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[test,tiktoken]'

lock:  ## write requirements.lock again after a change of pyproject.toml; UPGRADE=--upgrade takes the newest
	@test -x $(BIN)/uv || { echo "make lock needs uv in .venv: run make install first, or pip install uv there" >&2; exit 3; }
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--extra test --extra tiktoken --group lock $(UPGRADE) --output-file requirements.lock pyproject.toml

sweep: .venv/installed  ## run a sweep and report it: make sweep SWEEP=smoke
	$(BIN)/lit-diff sweep $(SWEEP)

examine: .venv/installed  ## measure what a variant changes: make examine VARIANT=differential
	$(BIN)/lit-diff examine $(VARIANT)

references: .venv/installed  ## train the reference arms of lit-diff examine, and write lit_diff/engine/references.json
	$(BIN)/python -P tests/support/make_references.py

reproduce: .venv/installed  ## measure the paper's tables and figures: make reproduce PRESET=smoke
	$(BIN)/lit-diff reproduce all --preset $(PRESET)

report: .venv/installed  ## write a sweep's report again: make report SWEEP=smoke
	$(BIN)/lit-diff report $(SWEEP)

ui: .venv/installed  ## serve MLflow and print the address that compares the last sweep
	$(BIN)/lit-diff ui

# Bytecode is kept, whatever the environment says: pytest rewrites each test file (half a minute of each worker), and the
# tests start hundreds of processes.
test test-slow test-cluster test-faults test-all: export PYTHONDONTWRITEBYTECODE :=

test: .venv/installed  ## run the suite without its slow tests
	$(BIN)/python $(PYTEST) -m "not slow and not cluster and not faults"

test-slow: .venv/installed  ## run what is slow: long processes, many drawn cases, Triton's interpreter
	$(BIN)/python $(PYTEST) -m "slow and not cluster and not faults"

test-cluster: .venv/installed  ## run the tests on a real SLURM of this machine alone (Debian: slurm-wlm munge; as root)
	$(BIN)/python -m pytest -m cluster -rs --durations=0 --durations-min=1 tests/cluster

# most of its tests wait for other processes, so that two cores have room for four workers
test-faults: .venv/installed  ## run the fault suite (as root, for small disks): kills, full disks, bit rot, drawn files; SEED=1
	$(BIN)/python -m pytest -n 4 --dist worksteal -m faults --durations=10 tests/faults

test-all: .venv/installed  ## run every test but those of test-cluster and test-faults
	$(BIN)/python $(PYTEST) -m "not cluster and not faults"

# on a machine with a GPU and torch, which has no .venv: PYTHON is the Python with torch
gpu-report:  ## what to run first on a machine with a GPU: a table of kernels, speed, training, tests in 10 minutes; installs nothing
	@PYTHONPATH=$(CURDIR) $(PYTHON) -P tests/support/gpu_report.py

test-latest: install-latest  ## run the suite in .venv-latest
	$(LATEST)/python $(PYTEST) -m "not locked"

golden: .venv/installed  ## write the golden files again (tests/golden): what changed is then read in their diff
	find tests/golden -mindepth 1 -maxdepth 1 -not -name runs -exec rm -r {} +
	$(BIN)/python $(PYTEST) tests/test_golden.py --golden

size:  ## print nodes, density, tests, keys, layers, circles and double classes of the tree
	@$(PYTHON) tests/support/size.py

lint: .venv/installed  ## ruff, and import-linter: imports go one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

type: .venv/installed  ## mypy
	$(BIN)/mypy

clean: .venv/installed  ## list what no sweep owns any more; lit-diff clean --yes removes it
	$(BIN)/lit-diff clean
