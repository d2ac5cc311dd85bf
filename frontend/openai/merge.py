"""Several streams of chunks as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from saguaro.frontend.openai.triton import Chunk


async def merge(streams: Sequence[AsyncGenerator[Chunk, None]], answers: int) -> AsyncGenerator[Chunk, None]:
    """Chunks as they come; those of stream i, which has `answers` answers, are numbered from i * answers on.

    The first error ends all of them, and so does closing the iterator.
    """
    queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    queue.put_nowait(replace(chunk, answer=number * answers + chunk.answer))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
