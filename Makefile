# `make` lists what there is. The targets set up all they need in .venv, and again only after pyproject.toml changed.

PYTHON ?= python3
# What to install if $(PYTHON) has no torch of its own; one that is there is used as it is.
TORCH ?= torch==2.13.0
# More arguments for demo, test and bench: make demo ARGS="--mode ssp:4", make test ARGS="-k ssp -x"
ARGS ?=
# How long `make fuzz` runs.
SECONDS ?= 60
# What `make simulate` runs: so many seeds in each mode, or one seed, in one mode; TRACE=1 prints what happens.
SEEDS ?= 200
SEED ?=
MODE ?=
TRACE ?=

IN_VENV := .venv/bin
PIP := $(IN_VENV)/python -m pip -qq --disable-pip-version-check
PIP_PROTO := .venv-proto/bin/python -m pip -qq --disable-pip-version-check
RELEASED := proto/released.binpb
FRAMEWORK_TESTS := tests/frameworks
HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-frameworks test-docker bench simulate fuzz lint format proto proto-release reference clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/demo.stamp ## train a small GPT on two shards and two workers, in about two minutes
	@$(IN_VENV)/python examples/demo.py $(ARGS)

# Two at a time, because tests of clusters wait more than they compute; a file's tests share what it has started.
test: .venv/dev.stamp ## run the tests
	@$(IN_VENV)/python -m pytest -q -m 'not docker and not frameworks' -n 2 --dist loadfile $(ARGS)

test-frameworks: .venv/dev.stamp .venv/frameworks.stamp ## install Lightning and Hugging Face's Trainer, and train with them
	@$(IN_VENV)/python -m pytest -q -m frameworks $(FRAMEWORK_TESTS) $(ARGS)

test-docker: .venv/dev.stamp ## run the tests that build and start the containers; needs a Docker engine
	@$(IN_VENV)/python -m pytest -q -m docker $(ARGS)

bench: .venv/dev.stamp ## a short form of every benchmark; writes docs/benchmarks.md
	@$(IN_VENV)/python -m bench all --short $(ARGS)

simulate: .venv/dev.stamp ## clusters in virtual time, with faults, a seed each: make simulate SEEDS=1000
	@$(IN_VENV)/python -m tests.simulation --seeds $(SEEDS) \
		$(if $(SEED),--seed $(SEED)) $(if $(MODE),--mode $(MODE)) $(if $(TRACE),--trace)

fuzz: .venv/dev.stamp ## throw hostile input at every handler, guided by coverage: make fuzz SECONDS=600
	@$(PIP) install --constraint constraints.txt --editable '.[fuzz]' || echo "atheris cannot be installed here"
	@$(IN_VENV)/python -m tests.tools.fuzz --seconds $(SECONDS)

lint: .venv/dev.stamp ## check style, format and types, and that the contract breaks no released one
	$(IN_VENV)/python -m ruff check .
	$(IN_VENV)/python -m ruff format --check .
	$(IN_VENV)/python -m mypy
	$(IN_VENV)/python -m tests.tools.buf lint
	$(IN_VENV)/python -m tests.tools.buf format --diff --exit-code
	$(IN_VENV)/python -m tests.tools.buf breaking --against $(RELEASED)

format: .venv/dev.stamp ## put the code into its format, and mend what ruff can mend
	$(IN_VENV)/python -m ruff check --fix .
	$(IN_VENV)/python -m ruff format .
	$(IN_VENV)/python -m tests.tools.buf format --write

proto: .venv-proto/stamp ## generate ps_protocol/v1 from proto/
	@.venv-proto/bin/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/ps_protocol/v1/*.proto

proto-release: .venv/dev.stamp ## with a release: take the contract as the one that later ones must not break
	@$(IN_VENV)/python -m tests.tools.buf build --exclude-source-info --output $(RELEASED)

reference: .venv/dev.stamp ## write docs/reference.md from the docstrings
	@$(IN_VENV)/python docs/make_reference.py

clean: ## remove what make made, except runs/
	rm -rf .venv .venv-proto build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- setting up ---

# If $(PYTHON) has torch, the packages beside it are let in, after .venv's own: a torch that someone chose is neither
# replaced nor installed again. Unlike --system-site-packages this also works if $(PYTHON) is in a virtual environment.
$(IN_VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, but $(PYTHON) is " \
		+ sys.version.split()[0] + "; name another: make PYTHON=python3.11 ...")'
	@echo "setting up .venv: a minute or a few, once"
	@$(PYTHON) -m venv .venv
	@$(PYTHON) -c '$(HAS_TORCH); import pathlib; print("import site; site.addsitedir(%r)" \
		% str(pathlib.Path(torch.__file__).parents[1]))' > .venv/outer.pth 2>/dev/null \
		&& mv .venv/outer.pth .venv/lib/python*/site-packages/ || rm .venv/outer.pth

.venv/%.stamp: $(IN_VENV)/python pyproject.toml constraints.txt
	@$(IN_VENV)/python -c '$(HAS_TORCH)' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install '$(TORCH)'; }
	@echo "installing this project, with its extra '$*'"
	@$(PIP) install --constraint constraints.txt --editable '.[$*]'
	@touch $@

# As old as the oldest protobuf and grpcio that pyproject.toml allows: generated code runs with what generated it and
# with what came later. Its setuptools is the last kind that has pkg_resources, which grpc_tools needs.
.venv-proto/stamp: Makefile
	@$(PYTHON) -m venv .venv-proto
	@$(PIP_PROTO) install 'grpcio-tools==1.64.3' 'setuptools<81'
	@touch $@
