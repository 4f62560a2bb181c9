# Compiled modules are kept, because the tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

# Each target sets up what it needs, once: the file `installed` in an environment marks it as complete.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# The demo has its own environment, with the packages that the demo needs and no others.
DEMO := .venv-demo
# And so does the site.
SITE := .venv-docs
# And what is built for publication, in which an environment holds the wheel and another builds it.
DIST := .venv-dist
# What `make check` leaves out: pages, reproduction, processes and damage.
SLOW := breaking engines ranks reproduction test_docs.py test_examples.py test_play.py test_serve.py test_tutorials.py \
	training/test_packages.py
# `make check ROOM=forecast` tests one room of the package.
ROOM ?=

.PHONY: demo test pytest check quick portable lint kernels docs dist reproduce clean

demo: $(DEMO)/installed
	$(DEMO)/bin/sepsa demo

# The linters take one core as long as the kernels and the first tests take the others.
test: $(STAMP)
	$(MAKE) --jobs=2 lint pytest

pytest: kernels
	$(BIN)/pytest -n auto --dist worksteal

check: $(STAMP)
	$(MAKE) --jobs=2 lint quick

quick: kernels
	$(BIN)/pytest -q -n auto --dist worksteal --one-in 16 $(if $(ROOM),tests/$(ROOM),tests $(SLOW:%=--ignore=tests/%))

# The numerical tests and the pages under other arithmetic, before a release.
portable: $(STAMP) kernels
	$(BIN)/python tests/portable.py

# The library of compiled kernels in src/, if it is not there for these sources.
kernels: $(STAMP)
	$(BIN)/python -m sepsa.compiled.build --missing

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file examples/mypy.ini
	$(BIN)/lint-imports

# Runs of the paper that are not recorded in results/, then its tables and figures; RUN="table3 --datasets diabetes": a part.
RUN ?= all
reproduce: $(STAMP)
	$(BIN)/python -m reproduction run $(RUN)
	$(BIN)/python -m reproduction report

docs: $(SITE)/installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict
	@echo "the site is in site/: open site/index.html, or $(SITE)/bin/python -m http.server --directory site"

# Sdist and wheel in dist/, checked; README's code runs with the wheel in an empty environment, outside the repository.
dist:
	$(PYTHON) .ci/wheel $(DIST) core stream shell

$(STAMP): pyproject.toml constraints.txt
	PYTHON=$(PYTHON) .ci/install $(VENV) dev

$(DEMO)/installed: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) .ci/install $(DEMO) demo

$(SITE)/installed: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) .ci/install $(SITE) docs

clean:
	rm -rf $(VENV) $(DEMO) $(SITE) $(DIST) dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
