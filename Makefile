# make setup | serve | test | lint | clean: `make help` says more. All happens in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?= --maxfail=5
SAY = @printf '\033[1m== %s\033[0m\n'

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve test test-unit test-integration test-e2e test-compose lint format protos settings clean clean-all

help:  ## these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## install Baton into .venv (again only when pyproject.toml changed)

setup-dev: $(VENV)/.installed-dev

serve: setup  ## start a whole cluster here; options as in: make serve ARGS="--port 9000 --prefill 2"
	@exec $(BIN)/baton serve $(ARGS)

test: lint  ## all checks, then all tests
	$(SAY) "tests: unit, integration, e2e, fault"
	@$(BIN)/python -m pytest tests/unit tests/integration tests/e2e tests/fault $(PYTEST_ARGS)

test-unit: setup-dev  ## the tests that need no process and no socket
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

test-integration: setup-dev  ## real Redis, UCX and gRPC on loopback
	@$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)

test-e2e: setup-dev  ## whole clusters with the real model
	@$(BIN)/python -m pytest tests/e2e tests/fault $(PYTEST_ARGS)

test-compose: setup-dev  ## the compose file in containers, with the real model; needs docker or podman
	@bash scripts/test_compose.sh $(PYTEST_ARGS)

lint: setup-dev  ## style, types, import rules, protocol lint, generated code up to date
	$(SAY) "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	$(SAY) "mypy"
	@$(BIN)/mypy
	$(SAY) "import-linter"
	@$(BIN)/lint-imports
	$(SAY) "protos"
	@$(BIN)/buf lint protos
	@$(BIN)/python scripts/gen_protos.py --check

format: setup-dev  ## rewrite the code in house format
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

protos: setup-dev  ## regenerate the code of protos/
	@$(BIN)/python scripts/gen_protos.py

settings: setup-dev  ## regenerate docs/SETTINGS.md
	@$(BIN)/baton check-config --markdown > docs/SETTINGS.md

clean:  ## remove caches and build products
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean  ## the same, and .venv
	@rm -rf $(VENV)

$(BIN)/python:
	@bash scripts/check_machine.sh $(PYTHON)
	$(SAY) "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(SAY) "installing Baton; torch is large, so this takes some minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(SAY) "installing Baton and what its tests need; torch is large, so this takes some minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.installed $@

.PHONY: performance
performance: setup-dev  ## renew docs/performance/table.md (minutes; PEERS="--vllm VENV …" measures peers too)
	@$(BIN)/python -m loadtest.performance --model "$$($(BIN)/baton model fetch | tail -n 1)" $(PEERS)
