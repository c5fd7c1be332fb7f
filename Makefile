# `make` lists what there is. The targets set up all they need in .venv, and again only after pyproject.toml changed.

PYTHON ?= python3
# What to install if $(PYTHON) has no torch of its own; one that is there is used as it is.
TORCH ?= torch==2.13.0
# Where from, if not from PyPI, whose build for Linux needs CUDA and is 5 GB with it. Without a GPU:
# make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH_FROM = $(if $(TORCH_INDEX),from $(TORCH_INDEX),from PyPI: for Linux CUDA's build (5 GB). \
	Without a GPU stop this and give make TORCH_INDEX=https://download.pytorch.org/whl/cpu)
# More arguments for demo, test and bench: make demo ARGS="--mode ssp:4", make test ARGS="-k ssp -x"
ARGS ?=
# How long `make fuzz` runs.
SECONDS ?= 60
# What `make simulate` runs: so many seeds in each mode, or one seed, in one mode; TRACE=1 prints what happens. TABLES=1: all
# jobs have tables. READERS=3 RELAYS=2: so many processes follow each job, some of them at relays. MEMBERS=2: each worker is a
# group of so many. SHARING=1: the workers of all seeds share memory with shards. TURN=1: one mode a seed, in turn, not all modes
# with each seed. NATIVE=off: with numpy.
SEEDS ?= 200
SEED ?=
MODE ?=
TURN ?=
NATIVE ?=
TRACE ?=

IN_VENV := .venv/bin
PIP := $(IN_VENV)/python -m pip -qq --disable-pip-version-check
# torch is most of what is downloaded, so its progress is shown.
PIP_TORCH := $(IN_VENV)/python -m pip --disable-pip-version-check install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# Of all else the names, as they come. There is no pipefail in sh: what follows on it removes a file that only a success left.
PIP_NAMED = { $(IN_VENV)/python -m pip --disable-pip-version-check install $(1) && touch $@.whole; } \
	| sed -nu 's/^Collecting \([^ ;=<>~[]*\).*/  \1/p'; rm $@.whole
PIP_PROTO := .venv-proto/bin/python -m pip -qq --disable-pip-version-check
RELEASED := proto/released.binpb
# Versions that belong together on every Python from 3.10 on, as markers say.
LOCK := $(IN_VENV)/python -m tests.tools.requirements lock
RESOLVE := .venv-lock/bin/uv pip compile --quiet --no-header --universal --python-version 3.10 --generate-hashes \
	--constraint constraints.txt --output-file
# What depends on the libraries' versions most: the wire, errors, TLS, metrics, checkpoints, optimizers, one cluster, tables.
RANGE_TESTS := tests/protocol tests/project/test_supply_chain.py tests/security/test_tls.py tests/cluster/test_push_pull.py \
	tests/tables/test_modules.py tests/tables/test_table.py
FRAMEWORK_TESTS := tests/frameworks
# Each file that has a long test has this text: tests/project/test_house.py.
LONG_MARK := pytest.mark.long
HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4)

# A .pth file that lets in the packages beside torch, after an environment's own.
PRINT_OUTER := $(HAS_TORCH); import pathlib; print("import site; site.addsitedir(%r)" % \
	str(pathlib.Path(torch.__file__).parents[1]))

# Where an image has set it, each process that a test starts would compile this project anew: half a second of its two.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo native test test-long test-repeats test-frameworks test-ray test-slurm test-remote test-browser \
	test-javascript test-kubernetes test-docker test-release test-pythons test-floors test-newest audit sbom bench \
	simulate fuzz lint format lock proto proto-release alerts reference docs dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/examples.stamp ## train a small GPT on two shards and two workers, in about two minutes
	@$(IN_VENV)/python examples/demo.py $(ARGS)

# Four at a time on 2 cores: for half of the time a test waits, for processes, leases and signals. Each takes the next tests
# of one part, so that a file's tests share what it has started, and the one that is done first takes over some of another's.
test: .venv/dev.stamp .venv/library ## run the tests
	@$(IN_VENV)/python -m pytest -q \
	  -m 'not (docker or frameworks or ray or browser or kubernetes or release or remote or repeat or slurm or long)' \
	  -n 4 --dist worksteal $(ARGS)

# These wait for processes and leases much of the time. Only the files that have some are collected, one in six: all files would
# take the three processes half a minute of CPU before the first test.
test-long: .venv/dev.stamp .venv/library ## run the tests that start many processes one after the other, or wait for leases
	@$(IN_VENV)/python -m pytest -q -m 'long and not (frameworks or repeat)' -n 3 --dist worksteal \
	  $(or $(ARGS),$$(grep -rlF --include='test_*.py' $(LONG_MARK) tests | sort))

test-repeats: .venv/dev.stamp ## run the further cases of claims that have one in test or test-long
	@$(IN_VENV)/python -m pytest -q -m 'repeat and not (docker or kubernetes or remote)' -n 3 --dist worksteal $(ARGS)

# Two at a time on 2 cores: a worker is one thread, and most tests have two, which wait for each other.
test-frameworks: .venv/dev.stamp .venv/frameworks.stamp ## install Lightning, Hugging Face's Trainer and trackers, and train with them
	@$(IN_VENV)/python -m pytest -q -m frameworks -n 2 --dist worksteal $(FRAMEWORK_TESTS) $(ARGS)

test-ray: .venv/dev.stamp .venv/ray.stamp ## install Ray, and train on three nodes of it
	@$(IN_VENV)/python -m pytest -q -m ray tests/ray $(ARGS)

test-remote: .venv/dev.stamp .venv/remote-tests.stamp ## keep checkpoints in an object store: a server that speaks S3
	@$(IN_VENV)/python -m pytest -q -m remote tests/server tests/launch $(ARGS)

test-browser: .venv/dev.stamp .venv/browser.stamp ## look at the page in Chromium, which has to be installed
	@$(IN_VENV)/python -m pytest -q -m browser tests/browser $(ARGS)

test-javascript: .venv/dev.stamp .venv/javascript/stamp ## install a gRPC library for Node.js, and call servers with it
	@$(IN_VENV)/python -m pytest -q tests/protocol/test_other_languages.py $(ARGS)

test-kubernetes: .venv/dev.stamp .venv/kubernetes.stamp ## render and check deploy/kubernetes, and run its pods
	@$(IN_VENV)/python -m pytest -q -m kubernetes tests/kubernetes $(ARGS)

test-slurm: .venv/dev.stamp ## run the batch files under a real Slurm, which has to be installed; needs root
	@$(IN_VENV)/python -m pytest -q -m slurm tests/launch $(ARGS)

test-docker: .venv/dev.stamp ## run the tests that build and start the containers; needs a Docker engine
	@$(IN_VENV)/python -m pytest -q -m docker $(ARGS)

test-release: .venv/dev.stamp .venv/release.stamp ## build wheel, sdist and site, and look into them as a stranger would
	@$(IN_VENV)/python -m pytest -q -m release tests/project $(ARGS)

test-floors: .venv-floors/stamp ## a part of the tests, with the oldest versions that pyproject.toml allows
	@.venv-floors/bin/python -m pytest -q -m 'not (long or repeat)' -n 2 --dist worksteal $(RANGE_TESTS) $(ARGS)

test-pythons: .venv/dev.stamp ## what needs no torch, on each Python from 3.10 to 3.13 that is here
	@$(IN_VENV)/python -m tests.tools.pythons

test-newest: .venv-newest/stamp ## the same part, with the newest versions that there are
	@.venv-newest/bin/python -m pytest -q -m 'not (long or repeat)' -n 2 --dist worksteal $(RANGE_TESTS) $(ARGS)

audit: .venv-audit/stamp ## look for known vulnerabilities in what is locked
	@.venv-audit/bin/python -m tests.tools.audit requirements.lock requirements-dev.lock

bench: .venv/dev.stamp ## a short form of every benchmark; writes docs/benchmarks.md
	@$(IN_VENV)/python -m bench all --short $(ARGS)

simulate: .venv/dev.stamp ## clusters in virtual time, with faults, a seed each: make simulate SEEDS=1000
	@$(IN_VENV)/python -m tests.simulation --seeds $(SEEDS) \
		$(if $(SEED),--seed $(SEED)) $(if $(MODE),--mode '$(MODE)') $(if $(TABLES),--tables) $(if $(SHARING),--sharing) \
		$(if $(READERS),--readers $(READERS)) $(if $(RELAYS),--relays $(RELAYS)) \
		$(if $(MEMBERS),--members $(MEMBERS)) \
		$(if $(TURN),--in-turn) $(if $(NATIVE),--native $(NATIVE)) $(if $(TRACE),--trace)

fuzz: .venv/dev.stamp ## throw hostile input at every handler, guided by coverage: make fuzz SECONDS=600
	@$(PIP) install --constraint constraints.txt --group fuzz --editable . || echo "atheris cannot be installed here"
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

lock: .venv/dev.stamp .venv-lock/stamp ## write the locks anew: every version of constraints.txt and below, with hashes
	@$(LOCK) examples | $(RESOLVE) requirements.lock -
	@$(LOCK) dev | $(RESOLVE) requirements-dev.lock -

proto: .venv-proto/stamp ## generate ps_protocol/v1 from proto/
	@.venv-proto/bin/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/ps_protocol/v1/*.proto

proto-release: .venv/dev.stamp ## with a release: take the contract as the one that later ones must not break
	@$(IN_VENV)/python -m tests.tools.buf build --exclude-source-info --output $(RELEASED)

alerts: .venv/dev.stamp ## write the alerts of deploy/kubernetes from those of deploy/prometheus
	@$(IN_VENV)/python -m tests.tools.prometheus_rule

reference: .venv/dev.stamp ## write docs/reference.md from the docstrings
	@$(IN_VENV)/python docs/make_reference.py

docs: .venv/dev.stamp .venv/release.stamp ## make the docs' site in build/site, strictly
	@$(IN_VENV)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky -d build/doctrees docs build/site
	@echo "build/site/index.html"

# A wheel with the library for each machine, compiled for glibc 2.17 by ziglang, and one without it for all others.
ZIG = CC="$(IN_VENV)/python -m ziglang cc -target $(1)-linux-gnu.2.17"
BUILD := $(IN_VENV)/python -m build --no-isolation --outdir dist
dist: .venv/dev.stamp .venv/release.stamp ## build the wheels and the sdist in dist/, and check them
	@rm -rf dist build/lib *.egg-info
	@PS_NATIVE=off $(BUILD)
	@for machine in x86_64 aarch64; do \
		$(call ZIG,$$machine) $(BUILD) --wheel -C--build-option=--plat-name=manylinux_2_17_$$machine || exit 1; done
	@$(IN_VENV)/python -m twine check --strict dist/*

native: .venv/dev.stamp ## compile the library for tables again, beside its source: CC names the compiler
	@$(IN_VENV)/python setup.py -q build_library --inplace

sbom: .venv/dev.stamp .venv/release.stamp ## list what the image and `make` install, torch apart: build/sbom.cdx.json (CycloneDX)
	@mkdir -p build
	@$(IN_VENV)/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --mc-type library \
		--output-reproducible --output-file build/sbom.cdx.json requirements.lock

clean: ## remove what make made, except runs/
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- setting up ---

# If $(PYTHON) has torch, the packages beside it are let in, after .venv's own: a torch that someone chose is neither
# replaced nor installed again. Unlike --system-site-packages this also works if $(PYTHON) is in a virtual environment.
$(IN_VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, but $(PYTHON) is " \
		+ sys.version.split()[0] + "; name another: make PYTHON=python3.11 ...")'
	@echo "setting up .venv: a minute or a few, once"
	@$(PYTHON) -m venv .venv
	@$(PYTHON) -c '$(PRINT_OUTER)' > .venv/outer.pth 2>/dev/null \
		&& mv .venv/outer.pth .venv/lib/python*/site-packages/ || rm .venv/outer.pth

# What is locked is checked by its hash. The constraints hold what no lock has (frameworks, release). pip is upgraded because
# the one that comes with a Python is too old for groups of dependencies, which it knows since 25.1.
EXTRAS := examples ray
UPGRADE_PIP = $(1) install --constraint constraints.txt --upgrade pip
.venv/%.stamp: $(IN_VENV)/python pyproject.toml constraints.txt requirements.lock requirements-dev.lock
	@$(IN_VENV)/python -c '$(HAS_TORCH)' 2>/dev/null || { \
		echo "$(PYTHON) has no torch of 2.4 or later: installing $(TORCH) in .venv $(TORCH_FROM)"; $(PIP_TORCH) '$(TORCH)'; }
	@echo "installing this project and what it needs, with '$*': a minute or two, in which pip fetches"
	@$(call UPGRADE_PIP,$(PIP))
	@$(call PIP_NAMED,--require-hashes --requirement $(if $(filter dev,$*),requirements-dev.lock,requirements.lock))
	@echo "compiling what tables run on, and what '$*' has beside:"
	@$(call PIP_NAMED,--no-build-isolation --constraint constraints.txt \
		$(if $(filter $(EXTRAS),$*),--editable '.[$*]',--group $* --editable .))
	@touch $@

# An editable install has compiled the library; again when its sources have changed.
.venv/library: .venv/dev.stamp setup.py $(wildcard ps_tables/native/*.[ch]) ps_tables/native/libraries.py
	@$(IN_VENV)/python setup.py -q build_library --inplace
	@touch $@

# Environments with the oldest and the newest versions. torch is large: that of .venv is taken, whatever its version is,
# unless one is named, as `make test-floors RANGE_TORCH=torch==2.4.0` does.
RANGE_TORCH ?=
INSTALL_RANGE = $(if $(RANGE_TORCH),$(1)/bin/python -m pip -qq install '$(RANGE_TORCH)',\
		$(IN_VENV)/python -c '$(PRINT_OUTER)' > $(1)/outer.pth && mv $(1)/outer.pth $(1)/lib/python*/site-packages/) \
	&& $(call UPGRADE_PIP,$(1)/bin/python -m pip -qq --disable-pip-version-check) \
	&& $(1)/bin/python -m pip -qq --disable-pip-version-check install $(2) --group dev --editable . && touch $(1)/stamp

.venv-floors/stamp: .venv/dev.stamp
	@$(IN_VENV)/python -m venv --clear .venv-floors
	@$(IN_VENV)/python -m tests.tools.requirements floors | grep -v '^torch==' > .venv-floors/floors.txt
	@$(call INSTALL_RANGE,.venv-floors,--constraint .venv-floors/floors.txt)

.venv-newest/stamp: .venv/dev.stamp
	@$(IN_VENV)/python -m venv --clear .venv-newest
	@$(call INSTALL_RANGE,.venv-newest,--upgrade)

# In no package.json: the versions stand here alone. Their install scripts only print.
.venv/javascript/stamp: Makefile $(IN_VENV)/python
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix .venv/javascript \
		@grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1
	@touch $@

.venv-audit/stamp: Makefile
	@$(PYTHON) -m venv --clear .venv-audit
	@.venv-audit/bin/python -m pip -qq --disable-pip-version-check install 'pip-audit==2.10.1'
	@touch $@

.venv-lock/stamp: Makefile
	@$(PYTHON) -m venv --clear .venv-lock
	@.venv-lock/bin/python -m pip -qq --disable-pip-version-check install 'uv==0.13.8'
	@touch $@

# As old as the oldest protobuf and grpcio that pyproject.toml allows: protobuf promises that generated code runs with
# the version that generated it, with later ones of the same major version, and with the next major version.
.venv-proto/stamp: Makefile
	@$(PYTHON) -m venv --clear .venv-proto
	@$(PIP_PROTO) install 'grpcio-tools==1.84.0'
	@touch $@
