# `make` lists the targets. The first call of any of them makes the environment; later calls start at once.
METHOD  ?= feddymem
DATA    ?=
TABLE   ?=
STUDY   ?= feddymem_th
N_TRIALS ?=
JOBS    ?= 2
ARGS    ?=
PYTHON  ?= python3
VENV    ?= .venv
LOCK    ?= requirements-dev.lock
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
TASKS   := help install lock train evaluate predict watch update export serve sweep report screenshots privacy docs test coverage test-slow test-nightly test-matrix lint format ui bench clean

.PHONY: $(TASKS)
.DEFAULT_GOAL := help
# Compiled files are kept, whatever the shell says: without them each process compiles the package and its tests anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make train METHOD=feddymem ARGS="experiment=real_mixture data.root=DIR backbone.weights=FILE out=DIR"'
	@echo '  methods: $(notdir $(basename $(wildcard conf/method/*.yaml)))'
	@echo '  data:    $(notdir $(basename $(wildcard conf/data/*.yaml)))'

install: $(READY) ## Make the environment (done by every other target when needed): HASHES=1 checks the lock's hashes

# The environment is marked ready only when everything is in it, so that an interrupted install is done again.
# The lock's hashes are those of the public index; another index may carry builds of its own, such as torch for CPUs.
# pip leaves files uncompiled: a first import compiles what it needs, a fifth of them.
$(READY): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lit_fedad needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Making the environment in $(VENV) (once, some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef HASHES
	@$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement $(LOCK)
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --editable .
else
	@cat $(LOCK) /dev/null | sed -e 's/ \\$$//' -e '/--hash=/d' > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt --editable ".[dev]"
endif
	@touch $(READY)

# Without the environment's packages, which a lock that lacks a new dependency may not allow.
lock: ## Write the versions that the environment is made of, for every Python and system: ARGS=--upgrade for the newest
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet uv
	@UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 \
	  --extra dev --no-annotate --generate-hashes --output-file requirements-dev.lock $(ARGS) pyproject.toml

train: $(READY) ## Run an experiment: METHOD=, DATA=, ARGS="key=value ..."
	@$(BIN)/lit-fedad train method=$(METHOD) $(if $(DATA),data=$(DATA)) $(ARGS)

evaluate: $(READY) ## Recompute a run's metrics: ARGS="run=DIR or id"
	@$(BIN)/lit-fedad evaluate $(ARGS)

predict: $(READY) ## Score new images: ARGS="run=DIR or id images=FOLDER"
	@$(BIN)/lit-fedad predict $(ARGS)

watch: $(READY) ## Score a folder as it grows, with an alarm of drift: ARGS="run=DIR or id images=FOLDER"
	@$(BIN)/lit-fedad watch $(ARGS)

update: $(READY) ## Fold new normal images into a detector made of sums: ARGS="run=DIR or id images=FOLDER"
	@$(BIN)/lit-fedad update $(ARGS)

sweep: $(READY) ## Join a study as a worker: STUDY=, N_TRIALS=, ARGS="storage=... out=DIR"
	@$(BIN)/lit-fedad sweep study=$(STUDY) $(if $(N_TRIALS),n_trials=$(N_TRIALS)) $(ARGS)

report: $(READY) ## Write a page of all tracked runs; with TABLE=feddymem_1 ..., make a paper's table: ARGS="root.mpdd=DIR"
	@$(BIN)/lit-fedad report $(if $(TABLE),table=$(TABLE)) $(ARGS)

screenshots: $(READY) ## Picture the report and MLflow, or the operator's page, with headless Chromium: ARGS="out=DIR experiment=NAME ui=RUN"
	@$(BIN)/python scripts/screenshots.py $(ARGS)

export: $(READY) ## Write a trained detector as ONNX, torch.export or for OpenVINO: ARGS="run=DIR or id"
	@$(BIN)/lit-fedad export $(ARGS)

serve: $(READY) ## Answer HTTP requests with an exported detector: ARGS="run=DIR or id"
	@$(BIN)/lit-fedad serve $(ARGS)

privacy: $(READY) ## Attack what a run shares: ARGS="run=DIR or id attack=lira, inversion, dcor or report"
	@$(BIN)/lit-fedad privacy $(ARGS)

test: $(READY) ## Run the quick tests, JOBS= at a time
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile $(ARGS)

coverage: $(READY) ## Run the quick tests and show which lines they miss
	@$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term:skip-covered $(ARGS)

# Many slow tests wait for processes that they start: two more at a time than JOBS keep the cores busy.
SLOW := -n $$(($(JOBS) + 2)) --dist loadfile --no-loadscope-reorder
test-slow: $(READY) ## Run the slow tests (real data where LIT_FEDAD_DATA names it), JOBS= and two more at a time
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not nightly" $(SLOW) $(ARGS)

test-nightly: $(READY) ## Run the tests that take CI too long: every method in every kind of run, minutes on real data
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly $(SLOW) $(ARGS)

test-matrix: $(READY) ## Run the quick tests as other CPUs, more threads and other orders would
	@PYTHON=$(BIN)/python scripts/test_matrix.sh -n $(JOBS) --dist loadfile $(ARGS)

lint: $(READY) ## Check style, types and the direction of imports
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy --num-workers $(JOBS) && $(BIN)/lint-imports

format: $(READY) ## Format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

ui: $(READY) ## Open the tracked runs in a browser (http://127.0.0.1:5000)
	@$(BIN)/mlflow ui $(if $(filter sqlite:%,$(MLFLOW_TRACKING_URI)),--backend-store-uri $(MLFLOW_TRACKING_URI))

docs: $(READY) ## Build the documentation as a site in docs/_build/html; a warning is an error
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --builder html --doctree-dir docs/_build/doctrees docs docs/_build/html

bench: $(READY) ## Measure speed and memory: ARGS= names one benchmark
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove the environment, caches and run folders (not mlruns, not mlflow.db)
	rm -rf $(VENV) outputs docs/_build docs/reference .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
