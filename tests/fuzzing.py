"""How many inputs a fuzz test tries: some in every run, many where there is time (`make test-soak`)."""

import os

import pytest

FEW = 100
MANY = int(os.environ.get("SAGUARO_FUZZ", "5000"))
AMOUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.soak, id="many")]
