"""The OpenAI front end within the test's event loop, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from byte_tokenizer import byte_level
from saguaro.engines.manifest import Manifest
from saguaro.frontend.openai.app import create_app
from saguaro.frontend.openai.server import Server
from saguaro.frontend.openai.settings import Settings

MODEL = "tiny"
CONTEXT = 128


def engine_folder(folder: Path) -> Path:
    """An engine directory without weights: the front end needs none."""
    byte_level().save(str(folder / "tokenizer.json"))
    manifest = Manifest(
        format=1,
        recipe="test",
        recipe_hash="0" * 64,
        engine="pytorch",
        model=MODEL,
        source_sha256="0" * 64,
        family="llama",
        dtype="float32",
        tp=1,
        vocab_size=275,
        max_model_len=CONTEXT,
        eos_token_ids=(2,),
        token_map_sha256="0" * 64,
        device="cpu",
        shards={},
        versions={},
    )
    manifest.write(folder)
    return folder


class RunningServer:
    def __init__(self, server: Server, app: FastAPI) -> None:
        self.server = server
        self.app = app
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.clients: list[AsyncOpenAI] = []

    def client(self, key: str = "none") -> AsyncOpenAI:
        self.clients.append(AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20))
        return self.clients[-1]


@asynccontextmanager
async def front_end(triton: str, engine: Path, *, grace: float = 10, **settings: Any) -> AsyncIterator[RunningServer]:
    app = create_app(Settings(triton, settings.pop("socket", engine / "no.sock"), engine, MODEL, **settings))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on")
    server = Server(config, grace)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        assert not task.done()
    running = RunningServer(server, app)
    try:
        yield running
    finally:
        for client in running.clients:
            await client.close()
        server.should_exit = True
        await asyncio.wait_for(task, 20)
