# make demo   builds the package in a virtual environment in this folder, and runs a tensor-parallel MLP
# make train, make generate   the same, and run an example
# make test   the same, and runs every test that this machine can run
# make sanitize   the tests of the CPU backend, compiled with gcc's sanitizers for addresses and undefined behaviour
#
# SYSTEM_PYTHON=1    uses the current python3 and its packages: no virtual environment, no download
# TORCH=2.14.1       another version of torch: in a virtual environment of its own, on a copy of the sources in build/
# BUILD=0            uses the extension module that is there
# FLUX_BUILD_CUDA=1  requires the CUDA kernels; 0 leaves them out
# PYTHON=...         the Python that makes the virtual environment;  ARGS="..."  more arguments for what is run

SHELL := /bin/bash
VENV := $(if $(TORCH),.venv-torch-$(TORCH),.venv)
ARGS ?=
# Where it is built and run: one folder holds one extension module, which is made for one torch.
HERE := $(CURDIR)$(if $(TORCH),/build/torch-$(TORCH))
export PYTHONPATH := $(HERE)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifeq ($(SYSTEM_PYTHON),1)
  ifdef TORCH
    $(error TORCH=$(TORCH) is for a virtual environment of its own, SYSTEM_PYTHON=1 for none: set one of them)
  endif
  PY := $(or $(PYTHON),python3)
  ENVIRONMENT :=
  TOOLS :=
  CUTLASS :=
  MEGATRON :=
  VLLM :=
  PLOT :=
else
  PY := $(VENV)/bin/python
  ENVIRONMENT := $(VENV)/.torch-installed
  TOOLS := $(VENV)/.tools-installed
  CUTLASS := $(if $(filter 0,$(FLUX_BUILD_CUDA)),,$(VENV)/.cutlass-installed)
  MEGATRON := $(VENV)/.megatron-installed
  VLLM := $(if $(TORCH),,$(VENV)/.vllm-installed)
  PLOT := $(VENV)/.plot-installed
  export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif

HAS_GPU := $(wildcard /dev/nvidia[0-9]*)
CPP_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh')
RUN = $(if $(TORCH),env --chdir=$(HERE) $(abspath $(PY)),$(PY))
BUILD_COMMAND = $(RUN) setup.py --quiet build_ext --inplace
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo train generate test sanitize gpu-test bench build build-for-machine copy lint format clean

demo: build-for-machine
	$(RUN) benchmarks/demo.py $(ARGS)

train: build-for-machine $(if $(findstring --plot,$(ARGS)),$(PLOT))
	$(RUN) examples/train_tp.py $(ARGS)

generate: build-for-machine
	$(RUN) examples/generate_tp.py $(ARGS)

test: build-for-machine $(MEGATRON) $(VLLM)
	$(RUN) -m pytest $(ARGS)

gpu-test: build
	$(RUN) -m pytest tests/gpu $(ARGS)

bench: build
	$(RUN) -m flux_ops bench $(ARGS)

# ---- a copy of the sources, whose extension module is another

copy_to = mkdir -p $(1) \
  && find $(1) \( -path $(1)/build -o -path $(1)/benchmarks/results \) -prune -o ! -type d ! -name '*.so' -exec rm {} + \
  && git ls-files --cached --others --exclude-standard | while read -r file; do [ ! -e "$$file" ] || echo "$$file"; done \
  | xargs cp --parents --no-dereference --preserve=timestamps --target-directory $(1)
COPY := $(if $(TORCH),copy)
copy:
	@$(call copy_to,$(HERE))

# ---- the extension module

ifeq ($(BUILD),0)
build build-for-machine: $(COPY) $(ENVIRONMENT) $(TOOLS)
	@echo "BUILD=0: using the extension module that is there."
else
build: $(COPY) $(ENVIRONMENT) $(TOOLS) $(CUTLASS)
	@$(BUILD_COMMAND)

# The CUDA kernels take minutes to compile, so a machine that can't run them builds them only when told to.
ifneq ($(HAS_GPU)$(FLUX_BUILD_CUDA),)
build-for-machine: build
else
build-for-machine: $(COPY) $(ENVIRONMENT) $(TOOLS)
	@echo "No GPU here, so the CUDA kernels are left out; FLUX_BUILD_CUDA=1 compiles them too."
	@FLUX_BUILD_CUDA=0 $(BUILD_COMMAND)
endif
endif

# ---- memory errors: such a copy, too

SANITIZED := build/sanitized$(if $(TORCH),-torch-$(TORCH))
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
RUNTIMES = $(foreach name,asan ubsan stdc++,$(shell gcc -print-file-name=lib$(name).so))
WHOLE_PY = $(abspath $(shell command -v $(PY)))

sanitize: $(ENVIRONMENT) $(TOOLS)
	@$(call copy_to,$(SANITIZED))
	@cd $(SANITIZED) && CFLAGS="$(SANITIZERS) -g1 -D_GLIBCXX_ASSERTIONS" LDFLAGS="$(SANITIZERS)" FLUX_BUILD_CUDA=0 \
	  $(WHOLE_PY) setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && PYTHONPATH=$(abspath $(SANITIZED)) LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 \
	  $(WHOLE_PY) -m pytest $(or $(ARGS),tests/distributed tests/unit)

# ---- the virtual environment

TORCH_PACKAGE = $(if $(TORCH),torch==$(TORCH),$$(cat requirements/torch.txt))
$(VENV)/bin/python:
	@python=$$(tools/find_python.sh "$(PYTHON)") && echo "Making a virtual environment in $(VENV) with $$python." \
	  && $$python -m venv $(VENV)

$(VENV)/.torch-installed: requirements/torch.txt | $(VENV)/bin/python
	@echo "Installing $(TORCH_PACKAGE) and its CUDA libraries into $(VENV): a download of 2.7 GB, 4.7 GB on disk."
	@$(PIP) $(if $(TORCH),$(TORCH_PACKAGE),-r $<) && touch $@

$(VENV)/.tools-installed: requirements/dev.txt | $(VENV)/.torch-installed
	@echo "Installing the build and test tools into $(VENV): a download of 30 MB."
	@$(PIP) -r $< && touch $@
	@echo "$(HERE)" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/flux_ops.pth"

$(VENV)/.cutlass-installed: requirements/cutlass.txt | $(VENV)/.torch-installed
	@echo "Installing the CUTLASS headers into $(VENV): a download of 6 MB."
	@$(PIP) --no-deps -r $< && touch $@

$(VENV)/.megatron-installed: requirements/megatron.txt | $(VENV)/.torch-installed
	@echo "Installing megatron-core, for its tests, into $(VENV): a download of 3 MB."
	@$(PIP) --no-deps -r $< && touch $@

# In a folder of its own, which its tests add to their path: the other tests see none of its packages.
$(VENV)/.vllm-installed: requirements/vllm.txt | $(VENV)/.torch-installed
	@echo "Installing vLLM, for its tests, into $(VENV)/vllm: a download of 350 MB, 880 MB on disk."
	@$(PIP) --no-deps --no-compile --upgrade --target $(VENV)/vllm -r $< && touch $@

$(VENV)/.plot-installed: requirements/plot.txt | $(VENV)/.torch-installed
	@echo "Installing matplotlib, for a picture, into $(VENV): a download of 20 MB."
	@$(PIP) -r $< && touch $@

# ---- style

lint: $(ENVIRONMENT) $(TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@echo 'clang-format --dry-run -Werror: the C++ and CUDA files of csrc and tests'
	@clang-format --dry-run -Werror $(CPP_FILES)

format: $(ENVIRONMENT) $(TOOLS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@clang-format -i $(CPP_FILES)

clean:
	rm -rf build dist *.egg-info flux_ops/*.so .pytest_cache .ruff_cache
