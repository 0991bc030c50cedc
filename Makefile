# Every target sets up what it needs: `make test` on a fresh machine is the whole setup.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rd2h needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,demo,inspect,proxy]'
	$(BIN)/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

.PHONY: setup
setup: $(STAMP) ## create .venv and install rd2h with its development tools

.PHONY: lint
lint: $(STAMP) ## formatter, linter, types, import contracts, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m codegen check

.PHONY: browser
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	  then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; \
	  else echo "one test needs a browser: sudo apt-get install chromium chromium-driver" >&2; exit 1; fi

.PHONY: test
test: lint browser ## every check and every test, with coverage
	$(BIN)/pytest --cov

.PHONY: test-fast
test-fast: $(STAMP) ## the tests that spawn nothing; under a minute
	$(BIN)/pytest -m 'not slow'

.PHONY: demo
demo: $(STAMP) ## move a DeepSeek-V3.2-shaped cache between real processes, and check every byte
	$(BIN)/rd2h demo $(ARGS)

.PHONY: bench
bench: $(STAMP) ## every benchmark; each against a baseline in the same run
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.round_trip --grow
	$(BIN)/python -m benchmarks.planning --grow
	$(BIN)/python -m benchmarks.idle
	$(BIN)/python -m benchmarks.host_engine
	$(BIN)/python -m benchmarks.proxy

.PHONY: generate
generate: $(STAMP) ## write everything that follows from schemas/
	$(BIN)/python -m codegen generate

.PHONY: format
format: $(STAMP) ## format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
