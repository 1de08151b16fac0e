# Every target does its own set-up: a virtual environment in this folder, with the pinned versions.

PYTHON ?= python3
VENV   ?= .venv
# The versions to install; build/lowest.txt: the oldest that pyproject.toml allows; /dev/null: the newest.
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin
PYTEST_ARGS ?=
# The tests wait for processes, servers and deadlines part of their time: one more at once than there are cores. Each
# process of a run imports what the tests import, and has servers of its own.
WORKERS     ?= 3
# All tests of a file run in one process: what is dear to set up (a cluster, wheels, a framework) is so once. The files
# that take longest come first (tests/conftest.py), not those with the most tests.
SPREAD      := --dist loadfile --no-loadscope-reorder
# Tests and benchmarks start thousands of processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
DEMO_ARGS   ?=
PEERS_VENV  ?= .venv-peers
MLPERF_VENV ?= .venv-mlperf
BENCH_ARGS    ?= --save
PEERS_ARGS    ?= --save
ACCURACY_ARGS ?= --save
MLPERF_ARGS   ?= --save

# Packages of their own, beside ours: they add formats, and are tested with it.
PLUGINS := plugins/cachestream-lance plugins/cachestream-video
# What an installed copy is made from: pip builds the part in C when it installs.
PART_IN_C := cachestream/training/batches/_gather
MADE_FROM := pyproject.toml $(CONSTRAINTS) setup.py $(PART_IN_C).c $(PLUGINS:=/pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help demo test e2e check docs docs-serve pytest soak sanitize wheels bench results bench-peers bench-accuracy bench-mlperf clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-demo  ## set up, then train on a growing cache: two ranks, real images, no network
	$(BIN)/cachestream demo $(DEMO_ARGS)

# Side by side: the checks take one core, and the tests wait half of their time.
test: $(VENV)/.ready-dev  ## set up, then check and test the library
	@$(MAKE) --no-print-directory --jobs 2 check pytest

check: $(VENV)/.ready-dev docs  ## lint, formatting, types, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strictly: a link that leads nowhere, or a public name without a description, is an error (not with --quiet, which drops warnings).
# The variable silences an advertisement.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(VENV)/.ready-dev  ## build the documentation in build/site
	$(MKDOCS) build --strict

docs-serve: $(VENV)/.ready-dev  ## show the documentation on http://127.0.0.1:8000, built anew at every change
	$(MKDOCS) serve

pytest: $(VENV)/.ready-dev  ## the tests alone (PYTEST_ARGS="tests/storage -k limit")
	$(BIN)/python -m pytest -n $(WORKERS) $(SPREAD) $(PYTEST_ARGS)

# What is dear: docs/decisions/0020.
e2e: $(VENV)/.ready-dev  ## the tests of whole programs, clusters and kills, which CI runs after `make test`
	$(BIN)/python -m pytest -n $(WORKERS) $(SPREAD) -m "e2e and not slow" $(PYTEST_ARGS) \
	  $$(grep -rl --include='test_*.py' 'mark\.e2e' tests plugins)

soak: $(VENV)/.ready-dev  ## the tests that take long, more examples of Hypothesis, planted faults; with coverage
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "slow or hypothesis" --hypothesis-profile thorough -o timeout=1200 -o faulthandler_timeout=7300 $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# In a copy of the package: what is built here must not be what the other targets run with.
SANITIZED := build/sanitized
sanitize: $(VENV)/.ready-dev  ## test the part in C under gcc's address and undefined-behaviour sanitizers
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r cachestream tests pyproject.toml $(SANITIZED)
	gcc -g -O1 -fsanitize=address,undefined -fno-sanitize-recover -std=c11 -Wall -Wextra -pthread -shared -fPIC \
	  -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	  $(PART_IN_C).c -o $(SANITIZED)/$(PART_IN_C).abi3.so
	cd $(SANITIZED) && ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  $(abspath $(BIN))/python -m pytest -n 2 -m "not slow" tests/training $(PYTEST_ARGS)

wheels: $(VENV)/.ready-dev  ## what a release holds, in dist: the source, and the wheel of this kind of machine
	rm -rf dist build/lib build/wheel
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('build/wheel')"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

build/lowest.txt: pyproject.toml
	mkdir -p build
	sed -n '/^dependencies = \[/,/^\]/s/^ *"\([a-z0-9]*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml > $@

bench: $(VENV)/.ready-dev  ## measure this machine (BENCH_ARGS="warm small --rounds 1"); then make results
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

results: $(VENV)/.ready-dev  ## make benchmarks/RESULTS.md from what was measured
	$(BIN)/python -m benchmarks.page

bench-peers: $(PEERS_VENV)/.ready-peers  ## measure other loaders beside ours (PEERS_ARGS="--rounds 1 --only LitData,Epoch")
	$(PEERS_VENV)/bin/python -m benchmarks.peers $(PEERS_ARGS)

bench-accuracy: $(PEERS_VENV)/.ready-peers  ## time to accuracy over a slow remote, beside them (ACCURACY_ARGS="--seeds 1")
	$(PEERS_VENV)/bin/python -m benchmarks.peers.accuracy $(ACCURACY_ARGS)

bench-mlperf: $(MLPERF_VENV)/.ready-mlperf  ## accelerators of MLPerf Storage that this machine feeds, by DLIO
	$(MLPERF_VENV)/bin/python -m benchmarks.mlperf $(MLPERF_ARGS)

clean:  ## remove what was made here, the virtual environment too
	rm -rf $(VENV) $(PEERS_VENV) $(MLPERF_VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	rm -f cachestream/training/batches/*.so .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up with the extras named after the dash; made anew only when what it depends on has changed.
$(VENV)/.ready-%: $(MADE_FROM) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$*]' \
	  $(if $(filter dev,$*),$(addprefix -e ./,$(PLUGINS)))
	@# What the tests import, by all cores, as pip does not; packages hold templates that are no Python.
	@$(if $(filter dev,$*),$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true)
	@touch $@

# An environment of their own: what the other loaders ask for cannot be had together, nor beside our tests.
$(PEERS_VENV)/.ready-peers: $(MADE_FROM) benchmarks/peers/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements.txt
	@touch $@

# DLIO asks for frameworks that it does not use here.
$(MLPERF_VENV)/.ready-mlperf: $(MADE_FROM) benchmarks/mlperf-requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(MLPERF_VENV)
	$(MLPERF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(MLPERF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/mlperf-requirements.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "cachestream needs Python 3.10 or newer: make PYTHON=/path/to/python3.x $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
