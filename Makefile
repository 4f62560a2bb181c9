# `make demo` and `make test` each do all their own set-up, once: the stamp says what is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# The demo has an environment of its own, with what the demo needs and nothing else.
DEMO := .venv-demo

.PHONY: demo test lint docs clean

demo: $(DEMO)/installed
	$(DEMO)/bin/sepsa demo

test: lint
	$(BIN)/pytest -n auto --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file examples/mypy.ini
	$(BIN)/lint-imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "the site is in site/: open site/index.html, or $(BIN)/python -m http.server --directory site"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(DEMO)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[demo]'
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
