# make demo and make test do everything on a fresh machine with Python 3.11 or newer and a C compiler.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -name '*.[ch]') native/build.py
WORKERS ?= 2

.PHONY: demo demo-real quality test lint docs test-runtime test-families clean

demo: $(VENV)/.ktforge
	$(BIN)/python demo/demo.py

# A small real model, converted in every way, heard and measured: a quarter of an hour on two cores.
demo-real: $(VENV)/.test
	$(BIN)/python demo/real.py

# The same in numbers, for the table of docs/quality.md.
quality: $(VENV)/.test
	$(BIN)/python demo/real.py --page docs/quality.md

test: lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

test-runtime: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps kt-kernel==0.7.2 -r requirements/runtime.txt
	$(BIN)/python -m pytest -m runtime

# Every MoE family of the installed transformers, which docs/sources.md has a table of; two minutes on two cores.
test-families: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m families

# Not --quiet, which would keep --strict from counting the warnings.
docs: $(VENV)/.docs docs/assets/mermaid.min.js docs/assets/iframe-worker.js
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the documentation begins at site/index.html"

# Scripts for drawings, and for search in pages from a folder. Without npm the pages take them from the network when
# they are looked at.
docs/assets/mermaid.min.js: ; $(call from-npm,mermaid,11.16.0,dist/mermaid.min.js)
docs/assets/iframe-worker.js: ; $(call from-npm,iframe-worker,1.0.4,shim/index.js)
define from-npm
	-@if command -v npm >/dev/null; then mkdir -p docs/assets $(VENV)/npm && \
	npm pack --silent --pack-destination $(VENV)/npm $(1)@$(2) >/dev/null && \
	tar -xzOf $(VENV)/npm/$(1)-$(2).tgz package/$(3) >$(VENV)/npm/script && mv $(VENV)/npm/script $@; fi
endef

# What these run, they run in the environment.
RUN := $(abspath $(BIN))/python
include benchmarks/bench.mk tests/reliability.mk
test-asan: $(VENV)/.test
fuzz: $(VENV)/.fuzz
bench: $(VENV)/.bench

# The extension is rebuilt when a C file or the metadata changed.
$(VENV)/.ktforge: pyproject.toml setup.py $(NATIVE)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.test: $(VENV)/.ktforge requirements/test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	touch $@

$(VENV)/.fuzz: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	touch $@

$(VENV)/.docs: $(VENV)/.ktforge requirements/docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	touch $@

clean:
	rm -rf $(VENV) build dist demo/out site docs/assets ktforge/_native*
