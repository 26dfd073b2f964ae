# Two commands do everything from a fresh clone: `make demo` runs the main job, `make test` passes the tests.
# Each makes its own environment in .venv first (about half a minute, once).

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CORPUS := build/corpus
JOBS ?= 2
FUZZ_SEED ?= 1
MUTATION_SHARE ?= 0
MUTATION_SEED ?= 0
MUTATION_TOLERANCE ?= 5
MUTATE = PYTHONPATH=tests $(BIN)/python -m mutations.run --jobs $(JOBS)
FUZZ = PYTHONPATH=tests $(BIN)/python -m fuzz.run --seed $(FUZZ_SEED) --jobs $(JOBS)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint corpus format clean

help:  ## say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@echo "==> making the environment in .venv (first run only)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adapterd needs Python 3.11 or newer; set PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@$(BIN)/uv pip install --python $(BIN)/python $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"} \
	    --compile-bytecode -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "==> environment ready: .venv/bin/adapterctl"

demo: $(READY)  ## publish, verify, load and serve adapters of two tenants on embedded defaults
	@$(BIN)/adapterctl demo

test: $(READY)  ## the whole test suite but the slow part
	@echo "==> tests (SQLite and PostgreSQL, local disk and S3; everything listens on loopback only)"
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope -m "not slow"

test-all: $(READY)  ## the test suite with its slow part: mutations, faults, long property tests, fuzzing
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope
	@echo "==> mutations of fences and generations (a share of all others, too: make test-all MUTATION_SHARE=20)"
	@$(MUTATE) --share $(MUTATION_SHARE) --seed $(MUTATION_SEED) --tolerate $(MUTATION_TOLERANCE)
	@echo "==> fuzzing, seed $(FUZZ_SEED) (another one: make test-all FUZZ_SEED=…)"
	@$(FUZZ) --target header --runs 200000
	@$(FUZZ) --target config --runs 50000
	@$(FUZZ) --target oms --target admission --runs 20000
	@$(FUZZ) --target package --runs 4000

lint: $(READY)  ## ruff, mypy --strict, import-linter
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> import-linter"
	@$(BIN)/lint-imports

corpus: $(READY)  ## every corpus adapter through the whole path, every bad one refused
	@PYTHONPATH=tests $(BIN)/python -m corpus.run_corpus --corpus $(CORPUS)

format: $(READY)  ## rewrite the sources as `make lint` wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove the environment and all outputs
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
