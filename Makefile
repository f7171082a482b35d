# The same commands everywhere; CI runs `make check` and `make test`.
#   make VENV= test         use the current interpreter and install nothing
#   make test ARGS="-k all_reduce"      more arguments for pytest, the demo or the benchmarks
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Each test worker also keeps pairs of ranks alive. Three workers share two cores: while tests of
# one wait for a deadline, the others run.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, max(3, (os.cpu_count() or 2) // 2)))')

ifeq ($(strip $(VENV)),)
READY :=
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
else
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python
endif

.PHONY: demo test check format bench models memcheck doctor setup clean

demo: setup
	@$(RUN) -m commlib demo $(ARGS)

test: setup
	@$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup
	@$(RUN) -m commlib bench $(ARGS)

# Compares every program of tests/models with eager code and writes docs/models.md; on GPUs if
# the machine has any, else on the CPU.
models: setup
	@$(RUN) -m tests.models $(ARGS)

# Needs GPUs and compute-sanitizer, from the CUDA toolkit or the wheel nvidia-cuda-sanitizer-api.
SANITIZER ?= compute-sanitizer
RANKS ?= 2
memcheck: setup
	FLAGS_dynamic_static_unified_comm=1 $(SANITIZER) --tool memcheck --report-api-errors no \
	  --target-processes all --error-exitcode 1 env $(RUN) -m torch.distributed.run --standalone \
	  --nproc-per-node $(RANKS) tests/programs/memcheck.py

doctor: setup
	@$(RUN) -m commlib doctor

setup: $(READY)
	@:

ifneq ($(READY),)
$(READY): setup.cfg pyproject.toml constraints.txt tools/bootstrap_env.py
	@$(PYTHON) -I tools/bootstrap_env.py $(VENV)
	@touch $@
endif

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
