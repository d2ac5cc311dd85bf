"""`saguaro serve` with everything in it under mixed load: all that is asked ends, and nothing grows. `make soak`.

`SAGUARO_SOAK_S` has the seconds of load. test_serve has a short run of the same.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from conftest import in_loop
from soak import processes, soak
from test_serve import deployment, home, saguaro, serving

__all__ = ["home"]  # a fixture
pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("SAGUARO_SOAK_S", "120"))
SLOWER = 4.0  # times the first part's p99 latency, which the last one's must not exceed


@in_loop
async def test_everything_ends_and_nothing_grows(home: Path, store: Path, nothing_left: None) -> None:
    with serving(deployment(home, "soak"), home / "soak.log", store) as process:
        addresses = json.loads(saguaro("status", "soak", "--json").stdout)["addresses"]
        assert len(processes(process.pid)) == 9
        soaked = await soak(process.pid, addresses, "soak", SECONDS)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 120) == 0
    assert len(soaked.ended) == 12, "every kind of request has been made"
    assert soaked.p99[2] < SLOWER * soaked.p99[0]
    log = (home / "soak.log").read_text()
    assert "Traceback" not in log
    assert "failed to stop server" not in log
