# Every command sets everything up itself: Python 3.11 or newer is all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: test pytest test-numerics demo docs wheel lint clean
.DEFAULT_GOAL := test

test: $(VENV)/.dev             ## set up, lint, type-check, test
	$(MAKE) --jobs=2 lint pytest  # side by side: mypy alone would leave a core idle for a minute

pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup

# Stand-ins for another CPU: ATen without vector instructions, oneDNN with AVX2 at most.
test-numerics: $(VENV)/.dev    ## set up, then run the numeric tests as on another CPU
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup -m numeric

demo: $(VENV)/.ready           ## set up, then train a small tree beside standard training
	$(BIN)/rbdc train --recipe demo --output runs/demo

docs: $(VENV)/.docs            ## set up, then build the documentation: build/docs/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

wheel: $(VENV)/.dev            ## set up, then build dist/*.whl and train the demo from it alone
	rm -rf dist build/empty
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet dist/*.whl
	cd build/empty && bin/rbdc train --recipe demo --output demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/rumdl check .
	$(BIN)/shellcheck --severity=warning .ci/run examples/slurm/*.sbatch
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable .[docs]
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable .[dev]
	touch $@

clean:
	rm -rf $(VENV) runs build dist
