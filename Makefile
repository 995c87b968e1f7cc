# Every target sets up .venv by itself. PYTHON picks the interpreter it is made from; constraints.txt is for Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pytest-benchmark is installed, too, its warning that processes share the cores would be an error here.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -p no:benchmark -n 3 --dist loadfile --no-loadscope-reorder
DEV := $(VENV)/.dev-installed
DOCS := $(VENV)/.docs-installed

.DEFAULT_GOAL := help
.PHONY: help demo test thorough lint bench gpu docs package clean

help:  ## show this list
	@echo "narrowband: make TARGET"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1	\2/p' $(MAKEFILE_LIST)

demo: $(DEV)  ## train a small GPT on four ranks with and without compression, and print a verdict (minutes)
	$(BIN)/narrowband demo

# Processes share the cores: a thread that spins while it waits takes them from another test. And tests start hundreds of
# interpreters: where bytecode may not be written, each would compile all modules again.
test: $(DEV)  ## run the tests, three files at a time (a quarter to half of an hour on 2 slow cores); PYTEST_ADDOPTS="-k ranks" narrows them
	$(PYTEST)

thorough: $(DEV)  ## run these and the tests that only combine once more what they run, or take minutes (half as long again)
	$(PYTEST) --thorough

lint: $(DEV)  ## ruff (lint and format), mypy, the floors of the architecture, and no two files that import each other
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV)  ## time every kernel against a plain copy of the same tensor
	$(BIN)/narrowband bench kernels

gpu: $(DEV)  ## on a machine with a GPU: test its loops byte for byte, time them and training, and write gpu.json to send us
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "no GPU that this build of torch can use: narrowband doctor says why")'
	$(BIN)/narrowband bench gpu --json gpu.json -- env $(PYTEST) -n auto --maxprocesses 10 tests/kernels/backends tests/gpu

docs: $(DOCS)  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

package: $(DEV)  ## build wheel and sdist into dist/, look at what is in them, and try the wheel in an environment of its own
	@$(BIN)/nox

clean:  ## remove .venv and everything that was built, cached or run
	rm -rf $(VENV) .nox site runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Modules are compiled here, on all cores: pip uses one, and Python's own cache may be switched off, which would double the
# time of every import. A few files of some packages are no Python for this version.
$(DEV): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; PyTorch is large, this takes minutes on a slow network)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

$(DOCS): $(DEV)
	@echo "installing the documentation tools into $(VENV)"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
