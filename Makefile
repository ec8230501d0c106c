SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# DEVICE is cpu or cuda. Empty means: whatever .venv was last set up for, else cpu.
DEVICE ?=
PYTHON ?= python3
CONFIG ?= serve_config.yaml
ARGS ?=

# These tests start Ray or vLLM, or need a GPU: they run one after another, and all others side by side, in at most four
# processes, since each imports Ray. Only the folders that are run are collected.
ALONE := tests/integration tests/gpu
UNIT := tests $(ALONE:%=--ignore=%) --ignore=tests/image
WORKERS := --numprocesses=logical --maxprocesses=4 --dist=worksteal
# pytest ends with 5 if there is nothing to run: ARGS may choose from one part of the tests only.
MAY_BE_EMPTY = $(if $(ARGS),|| [[ $$? == 5 ]])

BIN := $(CURDIR)/.venv/bin

BUILD_IMAGE = DEVICE="$(DEVICE)" PYTHON="$(PYTHON)" IMAGE="$(IMAGE)" deploy/image/build.sh

# What every command below runs with. Nothing this project starts reports home.
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# Ray starts `python` by name in places, so the environment's has to come first.
export PATH := $(BIN):$(PATH)

.PHONY: help setup serve check format-check lint types imports unit test test-long contract image image-test figures \
	format lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s%s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  DEVICE=cpu|cuda (default: as last set up, else cpu)   PYTHON=python3.12   CONFIG=serve_config.yaml"
	@echo "  ARGS=... is passed on to pytest and to serve run"

setup: ## Make .venv hold what the lock files pin; does nothing if it does already
	@DEVICE="$(DEVICE)" PYTHON="$(PYTHON)" requirements/setup.sh

serve: setup ## Start the service on this machine, with the settings in CONFIG
	exec python -m app.serve --with-parent $(ARGS) "$(CONFIG)"

check: format-check lint types imports unit ## Formatting, lint, types, import rules and unit tests

format-check: setup
	ruff format --check .

lint: setup
	ruff check .

types: setup
	mypy

imports: setup
	lint-imports --no-logo

unit: setup ## Unit tests only
	pytest $(UNIT) -m "not slow" $(WORKERS) $(ARGS)

test: setup ## All unit tests, and a selection of those of the real application
	pytest $(UNIT) $(WORKERS) $(ARGS) $(MAY_BE_EMPTY)
	pytest $(ALONE) $(ARGS) $(MAY_BE_EMPTY)

test-long: export MELL_TEST_LONG := 1
test-long: test ## All tests, with the full counts of random cases (up to ten times as many)

contract: setup ## Compare versions of vLLM and Ray with what Mell needs (VLLM=0.33.0, RAY=2.60.0; neither is installed)
	@test -n "$(VLLM)$(RAY)" || { echo "make contract: give VLLM=VERSION, RAY=VERSION or both" >&2; exit 2; }
	python -m deploy.contract $(VLLM:%=vllm==%) $(RAY:%=ray==%)

image: ## Build the container image (PYTHON=python3.11; IMAGE=NAME: default mell:VERSION)
	@$(BUILD_IMAGE)

image-test: setup ## Build the image, run it as Kubernetes does, and ask it
	image=$$($(BUILD_IMAGE)) && MELL_IMAGE="$$image" pytest --capture=no tests/image $(ARGS)

# TRACES is the folder of traces and lengths; FAST=1 takes fewer seeds and shorter runs, and leaves docs/ alone.
figures: setup ## Renew the tables and figures of docs/evaluation.md (TRACES=DIR, FAST=1: quick look in .figures/fast)
	@test -n "$(TRACES)" || { echo "make figures: give TRACES=DIR, the folder that holds the traces" >&2; exit 2; }
	python -m benchmarks.evaluation --traces "$(TRACES)" $(if $(FAST),--fast) $(ARGS)

format: setup ## Format the code and apply ruff's safe fixes
	ruff check --fix-only .
	ruff format .

lock: ## Resolve the lock files anew from requirements/*.in (UPGRADE=1: newest versions)
	PYTHON="$(PYTHON)" requirements/lock.sh

clean: ## Remove .venv, caches and reports
	rm -rf .venv .image .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
