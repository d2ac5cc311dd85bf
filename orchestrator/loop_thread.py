"""An event loop in a thread, for callers that have none of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, so that blocking calls work anywhere, also where a loop is running already."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; interrupted, it takes the work down with it.

        Waits in a SimpleQueue, which is C all through: an exception that a signal handler raises inside the locks of a
        Future would leave them held, and the loop waiting for them for ever.
        """
        tasks: list[asyncio.Task[T]] = []
        done: SimpleQueue[asyncio.Task[T]] = SimpleQueue()

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(done.put)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(start)
        try:
            return done.get().result()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)  # after `start`; nothing if it has ended
            raise

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have the loop make a call, after those posted before; does not wait for it."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def close(self) -> None:
        """End what may be left under way, then the loop."""

        async def end_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
