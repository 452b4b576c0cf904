# SPDX-License-Identifier: Apache-2.0
# A newcomer's commands. They need Python 3.11, a C++ compiler, make and a package registry.

VENV := .venv
BIN := $(VENV)/bin
NATIVE_BUILD := build/native
CXX_SOURCES = $(shell find src benchmarks -name '*.cc' -o -name '*.h')
SETUP := $(VENV)/.setup-done
TYPED := rbln_vllm rbln_host benchmarks examples tests
DEFAULT_MODEL := .models/SmolLM2-135M-Instruct

MODEL ?= $(DEFAULT_MODEL)
PORT ?=
ARGS ?=
# A file's tests stay together: they share engines. A crash ends the run, after its report.
WORKERS ?= 2
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PYTEST_ARGS ?=

IS_311 := -c 'import sys; sys.version_info[:2] == (3, 11) and print("yes")'
PYTHON ?= $(firstword $(foreach p,python3.11 python3 python,$(if $(shell $(p) $(IS_311) 2>/dev/null),$(p))))

# The demonstration model is made only when it is the one asked for.
MODEL_DIR := $(if $(filter $(DEFAULT_MODEL),$(MODEL)),$(DEFAULT_MODEL))

.PHONY: help setup native model serve routing demo lint format test sanitize wheel peers bench clean distclean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo "  variables: MODEL=<directory or name> PORT=<number> ARGS=\"<server options>\" PYTEST_ARGS=\"...\""

setup: $(SETUP) ## create .venv with everything pinned (once, and when the pins change)

$(SETUP): requirements/host.txt requirements/dev.txt requirements/kv_connectors.txt pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
	  echo "error: no Python 3.11 found as python3.11, python3 or python; name one: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; fi
	@$(PYTHON) scripts/setup_venv.py $(VENV)
	@touch $@

# What pip has built once, Ninja renews, while the CMake that pip used is there: that of an isolated
# build is not.
native: $(SETUP) ## compile what has changed of the native executor
	@[ -x "$$(sed -n 's/^CMAKE_COMMAND:INTERNAL=//p' $(NATIVE_BUILD)/CMakeCache.txt 2>/dev/null)" ] || \
	  { echo "compiling the native executor, a minute or two"; \
	    $(BIN)/pip install -q --no-build-isolation --no-deps -e .; }
	@$(BIN)/cmake --build $(NATIVE_BUILD) -- --quiet

model: $(DEFAULT_MODEL) ## make the demonstration model's directory (once)

$(DEFAULT_MODEL): | $(SETUP)
	@TQDM_DISABLE=1 $(BIN)/python scripts/make_smollm2.py $@

serve: native $(MODEL_DIR) ## serve MODEL on PORT (8000) until interrupted
	@$(BIN)/python scripts/serve.py $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

routing: native $(MODEL_DIR) ## serve MODEL twice behind a router that knows who holds which prefix
	@$(BIN)/python -m examples.kv_aware_routing $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

demo: native $(MODEL_DIR) ## serve MODEL, ask it one question, stop
	@$(BIN)/python scripts/demo.py $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

lint: $(SETUP) ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p ,$(TYPED))
	$(BIN)/mypy scripts/*.py
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

format: $(SETUP) ## let ruff and clang-format mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# Processes for each: the scheduler's tests run on vLLM's own platform, the others on ours. Servers
# have several processes already, and some of their tests look at steps of milliseconds.
test: native ## run all tests in WORKERS (2) processes; PYTEST_ARGS="tests/unit -x" narrows them
ifeq ($(PYTEST_ARGS),)
	@failed=; for run in "tests/unit $(IN_PARALLEL)" "tests/engine $(IN_PARALLEL)" tests/server; do \
	  echo "== $$run"; $(BIN)/pytest $$run || failed="$$failed $${run%% *}"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }
else
	$(BIN)/pytest $(PYTEST_ARGS)
endif

peers: $(SETUP) ## install what bench compares with, below .cache/bench-envs
	@$(BIN)/python -m benchmarks.peers

bench: native $(MODEL_DIR) ## measure limits, ours and the peers; ARGS="--sections decode"
	@$(BIN)/python -m benchmarks.run $(MODEL) $(ARGS)

sanitize: $(SETUP) ## run the kernel tests under AddressSanitizer and UBSan
	@$(BIN)/python scripts/sanitize.py $(or $(PYTEST_ARGS),$(IN_PARALLEL) tests/unit/host/native)

wheel: native ## build a wheel into dist and check that it works without a compiler
	@rm -rf dist
	@$(BIN)/pip wheel -q --no-build-isolation --no-deps --config-settings=build-dir=$(NATIVE_BUILD) -w dist .
	@$(BIN)/python scripts/check_wheel.py dist/*.whl

clean: ## remove caches and build output
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache build dist src/rbln_host/_native*.so
	find src tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## also remove .venv and .models
	rm -rf $(VENV) .models
