"""Blocking calls into a loop, interrupted by signals at any moment."""

from __future__ import annotations

import subprocess
import sys

# An alarm goes off somewhere in the calls, a thousand times; whatever it interrupts, the next call has to work.
INTERRUPTED = """
import asyncio, random, signal
from saguaro.orchestrator.loop_thread import LoopThread

class Alarm(Exception):
    pass

def ring(number, frame):
    raise Alarm

signal.signal(signal.SIGALRM, ring)
loop, draw, rung = LoopThread(), random.Random(0), 0
for _ in range(1000):
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-4))
        try:
            for _ in range(50):
                loop.run(asyncio.sleep(0))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        rung += 1
    assert loop.run(asyncio.sleep(0, "well")) == "well"
loop.close()
print(rung > 100)
"""


def test_a_signal_at_any_moment_leaves_the_loop_usable() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED], capture_output=True, timeout=60, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
