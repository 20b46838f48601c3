# `make demo` and `make test` set everything up on a fresh machine: a virtual environment and pinned packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test quick-tests test-all browser chaos check dist format docs tutorials setup clean

demo: $(INSTALLED)
	$(BIN)/fairmesh demo

# Two processes of one thread each: with more threads than cores, small tensor operations wait for each other. A file's
# tests stay together, since many share a mesh or ranks that take long to start; they run in the order of
# tests/conftest.py. Bytecode is kept even where the environment says otherwise: without it, every process of the tests
# compiles the package and its own tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# At most five minutes on two cores: a cover of every product of parameters, and one run of each kind over processes.
# The checks run next to the tests, since the type checker uses one core.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 check quick-tests

quick-tests: $(READY)
	$(PYTEST)

# Everything: the tests marked as slow too, and more examples of every property.
test-all: check browser
	FAIRMESH_TESTS=thorough $(PYTEST) -m ''

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

# Chromium, for the tests of the live page, where apt-get can install it. Without it those tests are skipped.
browser:
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 && apt-get update -qq \
	&& apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	|| echo 'no Chromium: tests of the live page are skipped; as root: apt-get install chromium'

# Peers killed, cut off and robbed of their disks: a few minutes. Its figures are read by a test.
chaos: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mesh.chaos --write benchmarks/results/chaos-cpu.json

# Executes the notebooks in docs/tutorials and writes their outputs: a few minutes.
tutorials: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python docs/tutorials/execute.py

# The wheel and the sdist of a release. tests/release/try_release.py tries them in an empty environment.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, in docs/_build/html. It needs no network.
docs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --write-all --jobs auto docs docs/_build/html
	@echo "open docs/_build/html/index.html"

setup: $(READY)

# The package with what the demo needs.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fairmesh needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[plot]'
	touch $(INSTALLED)

# And all extras, with the tools that check and test it.
$(READY): $(INSTALLED)
	$(PIP) -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) docs/_build docs/reference/api docs/repository .pytest_cache .ruff_cache .hypothesis .import_linter_cache
