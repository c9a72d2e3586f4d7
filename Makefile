# `make run` and `make test` do everything a fresh machine needs: Python >= 3.10, pip and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Test workers side by side, one thread each: threads of several processes would share the cores.
WORKERS ?= auto
# Bytecode is kept, also where the environment says otherwise: the tests start mprun many times.
PYTEST  := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# Where the results are written as a file, too: JUNIT=results.xml
JUNIT   ?=
PYTEST  += $(if $(JUNIT),--junitxml $(JUNIT))

# A part of the exhaustive tests: `make test-exhaustive SHARD=3/8` runs the third of eight.
SHARD   ?=
SPLIT   := $(if $(SHARD),--splitting-algorithm least_duration --group $(subst /, --splits ,$(SHARD)))

.PHONY: run install-dev test test-exhaustive test-all check docs site bench clean help
.DEFAULT_GOAL := help

help:
	@echo "make run    install, then train FashionMNIST in bf16, in less than three minutes"
	@echo "make test   install, then run the tests"
	@echo "make test-exhaustive  the sweeps that make test leaves out (SHARD=3/8: the third of eight parts)"
	@echo "make test-all  both"
	@echo "make check  lint, format check and types"
	@echo "make docs   rewrite the quick example outputs of the docs (EXAMPLES='timed long': others)"
	@echo "make site   build the documentation into site/ (python -m http.server -d site)"
	@echo "make bench  mprun against other ways to train, in under 15 minutes (installs Lightning, Accelerate, Keras)"
	@echo "make clean  remove the virtual environment and the caches"

# A stamp is written last, so an interrupted install is begun again.
$(VENV)/.installed: pyproject.toml setup.py $(wildcard mprun/precision/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "mprun needs Python >= 3.10, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@echo "Installing mprun and PyTorch into $(VENV) (several GB, a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]"
	@touch $@

run: $(VENV)/.installed
	$(BIN)/mprun recipe=fashion_mnist precision=bf16_mixed train.max_time_s=160 data.fallback=generated

install-dev: $(VENV)/.installed-dev

test: $(VENV)/.installed-dev
	$(PYTEST)

test-exhaustive: $(VENV)/.installed-dev
	$(PYTEST) -m exhaustive $(SPLIT)

test-all: test test-exhaustive

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Other example outputs: make docs EXAMPLES="timed sweep", by cost or by name (docs/examples.py)
docs: $(VENV)/.installed-dev
	$(BIN)/python -m docs.examples $(EXAMPLES)

# The site of docs/ (mkdocs.yml), strictly
site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Options: make bench BENCH="--threads 1 --readme"
bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.bench $(BENCH)

clean:
	rm -rf $(VENV) build dist site *.egg-info mprun/precision/kernels/_prebuilt.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
