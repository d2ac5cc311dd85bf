# Every command here is what CI and people run. No target removes build/: it is a source folder.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
PROMPT ?= Write a Python function that checks whether a string is a palindrome, with three examples.

.PHONY: setup demo test test-real test-soak soak check format size

setup: $(READY)

# torch first: the newest build for your device, unless TORCH names another (for instance TORCH="torch==2.13.0").
TORCH ?= torch==2.13.0
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[mpi,dev,serve,bench]"
	touch $@

demo: $(READY)
	$(BIN)/saguaro models pull qwen2.5-coder
	$(BIN)/saguaro build qwen2.5-coder-1.5b-cpu qwen2.5-coder-0.5b-cpu
	$(BIN)/saguaro generate --compare --max-tokens 96 "$(PROMPT)"

# Two workers, one of them for all that starts processes; each computes with one thread.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not real and not soak and not gpu" -n 2 --dist loadgroup

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

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Lines per file, largest first: a file over 250 lines needs a reason.
size:
	@git ls-files '*.py' | grep -v '^tests/' | xargs wc -l | sort -rn | head -40
	@git ls-files 'tests/*.py' | xargs cat | wc -l | xargs echo "lines of tests:"
