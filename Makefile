# Each target sets itself up: a virtual environment in .venv with everything in it, made once and
# again when pyproject.toml changes. `make demo` and `make test` are all that a newcomer types.
#
#   make demo     a prompt through two CPU ranks, with the speculation statistics
#   make test     the tests that need no device, and of the network only the package index (PYTEST_ARGS="-k name --slow")
#   make chaos    strikes ranks with FAULTS faults under traffic, and sees that no request notices
#   make soak     the same for MINUTES minutes, a fault every 20 s: what an engine holds must not grow
#   make mutants  plants faults in copies of the tree and sees that a test finds each (docs/mutants.md)
#   make check    ruff, formatting and pyright
#   make audit    known vulnerabilities of the installed packages; asks PyPI about each, so not in check
#   make bench    tokens per second here, as JSON on the last line
#   make clean    remove .venv, caches and build outputs
#
# FAULTS, MINUTES, SEED  of make chaos and make soak
# MUTANTS      words of the names of the faults to plant; none: all
# PYTHON       the interpreter to build .venv from, 3.11 or newer
# TORCH_INDEX  an extra package index for torch, such as PyTorch's own index of CPU wheels

SHELL := /bin/bash
PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
MUTANTS ?=
FAULTS ?= 200
MINUTES ?= 30
SEED ?= 0

# Tests that only compute, on one thread each: they run in several processes. The others start
# processes and measure time, so they have the machine for themselves.
COMPUTE_TESTS := tests/model tests/parallel
# With PYTEST_ARGS, one of the two parts may hold no test that is wanted (exit status 5 of pytest).
NONE_IS_FINE := $(if $(PYTEST_ARGS),|| [ $$$$? -eq 5 ])

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
RUN := .venv/.installed
DEV := .venv/.installed-dev
CODE := actors parallel model benchmarks examples tests

DEMO_PROMPT ?= If you want to write your own template tag,
export DEMO_PROMPT
DEMO := $(BIN)/outrider generate --config cluster.yaml --model examples/tiny --echo \
	--tensor-parallel 2 --draft-tokens 3 --max-tokens 120

.PHONY: demo test chaos soak mutants check audit bench clean
.DELETE_ON_ERROR:

demo: $(RUN)
	@echo "Two CPU ranks (TP2) share the bundled checkpoint's layers and head; each drafts 3 tokens an"
	@echo "iteration with its own copy of the draft body. Prompt and continuation, then statistics:"
	@echo
	@$(DEMO) --prompt "$$DEMO_PROMPT"

test: $(DEV)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(COMPUTE_TESTS) $(PYTEST_ARGS) $(NONE_IS_FINE)
	$(BIN)/python -m pytest $(COMPUTE_TESTS:%=--ignore=%) $(PYTEST_ARGS) $(NONE_IS_FINE)

chaos: $(DEV)
	@$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED)

soak: $(DEV)
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

mutants: $(DEV)
	$(BIN)/python -m tests.mutants $(MUTANTS)

check: $(DEV)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyright

audit: $(DEV)
	test -x .venv/audit/bin/pip-audit || { $(PYTHON) -m venv .venv/audit && \
	  .venv/audit/bin/python -m pip install --disable-pip-version-check --quiet pip-audit; }
	.venv/audit/bin/pip-audit --skip-editable --path $(wildcard .venv/lib/python*/site-packages)

bench: $(DEV)
	@$(BIN)/python -m outrider.benchmarks.bench

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv whose pip does not answer is unfinished or was moved: it is made anew.
$(RUN): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "error: $(PYTHON) is older than Python 3.11; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
	|| $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv; } \
	|| { echo "error: $(PYTHON) has no venv module: sudo apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv (once; a few minutes where nothing is cached) ..."
	@$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml | $(RUN)
	@echo "Installing the development tools into .venv ..."
	@$(PIP) -e '.[dev]'
	@touch $@
