# Everything runs from a checkout: `make quickstart` installs into .venv and trains once.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install cuda12 cuda13 tpu plan-gpu plan-tpu quickstart test slow parity lint format wheel lock clean

help:  ## Show what each target does
	@grep -E '^[a-z0-9 -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F '\t' '{printf "  %-18s %s\n", $$1, $$2}'

# The lock holds names, versions and hashes; the index is whatever pip is configured for.
# The checkout itself goes in last, without dependencies and without a second build environment.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); sys.exit(None if ok else "error: Python 3.11, 3.12 or 3.13 is needed, found %d.%d; choose one with make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

install: $(STAMP)  ## Create .venv and install the locked dependencies (once)

cuda12 cuda13 tpu: $(STAMP)  ## Add that accelerator's plugin for the installed jax
	$(PY) -m pip install --disable-pip-version-check \
	    "jax[$@]==$$($(PY) -c 'import importlib.metadata as m; print(m.version("jax"))')"

plan-gpu: cuda12  ## Add the compiler for GPUs that are not here (4.4 GB; no driver needed)
plan-tpu: tpu  ## Add the compiler for TPUs that are not here

quickstart: $(STAMP)  ## Generate games, train a tiny policy on the CPU and evaluate it
	$(PY) -m launch train launch/configs/household_quick.yaml

test: $(STAMP)  ## Run the fast tests, in two processes
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

slow: $(STAMP)  ## Run the slow tests
	$(PY) -m pytest -q -m "slow and not parity"

# torch is needed by nothing else, so it lives in an environment of its own.
PARITY := $(VENV)-parity
$(PARITY)/.installed: $(STAMP)
	test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check "torch>=2.9,<3" "peft>=0.17,<1"
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

parity: $(PARITY)/.installed  ## Compare live with the PyTorch reference (installs torch); JAXCREDIT_QWEN=FOLDER adds real weights
	$(PARITY)/bin/python -m pytest -q -m parity

lint: $(STAMP)  ## Check style, types and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(STAMP)  ## Rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

wheel: $(STAMP)  ## Build the wheel and check that it holds the library alone
	rm -rf dist
	$(PY) -m build --wheel --no-isolation --outdir dist . >/dev/null
	$(PY) -c 'import glob, zipfile; \
	    tops = {n.split("/")[0] for w in glob.glob("dist/*.whl") for n in zipfile.ZipFile(w).namelist()}; \
	    extra = sorted(n for n in tops if n != "jaxcredit" and not n.endswith(".dist-info")); \
	    raise SystemExit("error: the wheel also holds %s" % extra if extra else None)'

lock:  ## Resolve requirements.lock again (needs uv)
	uv pip compile pyproject.toml --extra stack --extra alfworld --extra scienceworld --extra dev --universal \
	    --python-version 3.11 --generate-hashes --no-header --no-annotate \
	    --no-emit-index-url --no-emit-find-links --quiet -o requirements.lock

clean:  ## Remove environments, caches and build output; runs and data stay
	rm -rf $(VENV) $(PARITY) dist build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
