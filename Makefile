# Everything runs in .venv, made here from requirements.lock: nothing else needs to be installed.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: help demo up test lint format lock clean

help:
	@echo "make demo [DOC=path]  read a document with a real model and ask it two questions"
	@echo "make up               start the service on this machine"
	@echo "make test             run all tests          make lint    ruff and mypy"
	@echo "make lock             renew requirements.lock from pyproject.toml"

demo: .venv/ready
	@$(BIN)/python examples/demo.py

up: .venv/ready
	@$(BIN)/longleaf up

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: .venv/ready
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --extra dev --no-header \
		--no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .longleaf* build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/ready: requirements.lock pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "Longleaf needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || echo none)." >&2; \
		echo "Install one, or name it: make demo PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
		f"Longleaf needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}.")'
	@"$(PYTHON)" -m venv --clear .venv || { echo "Could not make .venv with $(PYTHON) -m venv" \
		"(on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "Installing the locked packages into .venv ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
