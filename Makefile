# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.

# The first Python that is new enough; `make test PYTHON=/path/to/python` takes another.
PYTHON = $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALL = $(PIP) install --no-compile --constraint constraints.txt --editable
# What is imported is compiled then, and that is kept: a tenth of all that is installed. Here once, alone: the processes of a cluster, which
# start together, would each do it.
COMPILE = $(BIN)/python -c 'import zephon_ray.feed.service, ray.dashboard.optional_deps' || true
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench soak format clean

help:
	@echo 'make demo      set up, then run the pipeline on real text, on Ray, and show that it can be resumed bit for bit'
	@echo 'make test      set up, then run the tests (minutes)'
	@echo 'make test-all  the tests with their long forms'
	@echo 'make check     ruff, mypy --strict, import-linter, pip check'
	@echo 'make bench     the measurements, one after the other; keep the machine idle'
	@echo 'make soak      20 minutes of a feed under slow ranks, and whether anything grows (SOAK_SECONDS=60 for a look)'
	@echo 'make format    let ruff format and mend what it can'
	@echo 'make clean     remove what the tools and the demo left (not $(VENV))'

demo: $(VENV)/.installed
	$(BIN)/zephon-ray demo

test: $(VENV)/.installed-dev
	$(PYTEST) --numprocesses 2 --dist loadgroup tests

test-all: $(VENV)/.installed-dev
	$(PYTEST) --numprocesses 2 --dist loadgroup --timeout 3600 -m 'not bench' tests

bench: $(VENV)/.installed-dev
	$(PYTEST) --capture no --timeout 3600 -m bench tests

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench.soak

check: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python -m pip check

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .demo build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find zephon_ray tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from, so that an install happens once for each change.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) .
	$(COMPILE)
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch $@ $(VENV)/.installed

$(VENV)/.made:
	@test -n '$(PYTHON)' || { echo 'zephon-ray needs Python 3.11 or newer: install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python'; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip  # one that came with Python may take twice as long to choose among releases
	touch $@
