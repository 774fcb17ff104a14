# Targets: up, test, chaos, check, bench. Each makes .venv first, and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: up test chaos check bench clean help
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Shoal into $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		$(if $(SHOAL_TORCH_INDEX),--extra-index-url $(SHOAL_TORCH_INDEX)) "torch>=2.13,<2.14"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

up: $(STAMP) ## start everything on this machine; Ctrl-C stops it
	@exec $(BIN)/shoal up

test: $(STAMP) ## run all the tests, then the fault scripts
	@$(BIN)/python -m pytest -n 2 --dist loadgroup
	@$(BIN)/shoal simulate --chaos --seeds 2000

chaos: $(STAMP) ## two thousand fault scripts on the real actors in virtual time
	@$(BIN)/shoal simulate --chaos --seeds 2000

check: $(STAMP) ## ruff and mypy strict
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(STAMP) ## the benchmarks that need no running system, one table each
	@$(BIN)/shoal bench bus
	@$(BIN)/shoal bench frontend
	@$(BIN)/shoal bench engine
	@$(BIN)/shoal bench kv
	@$(BIN)/shoal bench cost
	@echo 'What a second turn costs: $(BIN)/shoal bench turns, while a system runs (make up)'

clean: ## remove the environment and all state
	rm -rf $(VENV) .shoal
