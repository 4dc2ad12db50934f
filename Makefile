# Two commands do all set-up on a fresh machine: `make serve` and `make test`.
# The heavy environment (SGLang, torch: 11 GB) lives outside the checkout, one per hash of the pinned requirements, and is shared by all
# checkouts; `.venv` here is a thin layer on it that holds only this checkout. (PREFIXES: where cuda.pathfinder looks for libnvrtc.)

PYTHON  ?= python3
CACHE   ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tutti-sglang
KEY     := $(shell (cat requirements/*.txt; $(PYTHON) -V) | sha256sum | cut -c1-12)
ENV     := $(CACHE)/env-$(KEY)
BIN     := .venv/bin
SOURCES := pyproject.toml $(wildcard setup.py) $(shell find kernels -name '*.cpp' -o -name '*.hpp' -o -name '*.cuh' 2>/dev/null)

.PHONY: help env serve test test-nvme check matrix gpu bench docs clean
help:  ## what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

serve: .venv/ready  ## start a server with the tier [MODEL=path] [STORE=directory] [ARGS="further SGLang flags"]
	$(BIN)/python -m tutti_sglang.integration.launch $(if $(MODEL),--model $(MODEL)) $(if $(STORE),--store $(STORE)) $(ARGS)

test: .venv/ready  ## run all tests [TESTS="paths and pytest options"]
	$(BIN)/python -m pytest $(or $(TESTS),tests)

check: .venv/ready  ## style, types and import rules only (they are part of `make test` too)
	$(BIN)/python -m pytest tests/test_tidy.py

matrix: .venv/ready  ## a real server for each row of docs/integration.md, and the page made anew [CASES="names of rows"]
	$(BIN)/python -m tests.integration.matrix $(CASES)

gpu:  ## tests and figures that need a CUDA device, from the source tree, without installation
	$(PYTHON) -m pytest -m gpu tests/gpu && $(PYTHON) -m benchmarks.gio && $(PYTHON) -m benchmarks.pack

test-nvme: .venv/ready  ## the VFIO controller against QEMU's NVMe drives [needs qemu-system-x86 and apt]
	$(BIN)/python -m pytest tests/nvme

bench: .venv/ready  ## where this machine stands: each cache in one report [ARGS="--tiers file,with --scale 0.5"]
	$(BIN)/python -m benchmarks.compare --json build/bench/compare.json --svg build/bench/compare.svg $(ARGS)

docs: .venv/ready  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

env: .venv/ready  ## only make the environment

.venv/ready: $(ENV)/complete $(SOURCES) $(wildcard requirements/*.txt)
	$(PYTHON) -m venv --clear --without-pip .venv
	echo "import site; site.PREFIXES.append('$(ENV)'); site.addsitedir('$$($(ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/environment.pth
	$(ENV)/bin/python -m pip --python $(BIN)/python install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# flock: two checkouts may want the same environment at once. Environments that nobody used for two weeks go.
$(ENV)/complete:
	mkdir -p $(CACHE)
	find $(CACHE) -maxdepth 1 -name 'env-*' -mtime +14 -exec rm -rf {} +
	flock $(CACHE)/lock sh -e -c 'if [ ! -e $@ ]; then \
	  rm -rf $(ENV); $(PYTHON) -m venv $(ENV); \
	  $(ENV)/bin/python -m pip install --quiet --disable-pip-version-check $(patsubst %,-r %,$(sort $(wildcard requirements/*.txt))); touch $@; fi'

clean:  ## remove what was built in this checkout
	rm -rf .venv build dist *.egg-info kernels/*.so
