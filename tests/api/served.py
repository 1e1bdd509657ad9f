"""A real gateway over the scripted engine, served by uvicorn in a thread, for the tests of this folder."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from honed.api.app import build
from honed.api.gateway import Gateway
from honed.api.settings import ServeSettings
from honed.engine.fleet import Fleet
from honed.engine.scripted import ByteRenderer, ScriptedEngine, ScriptedSettings
from honed.engine.token_model import TokenModel
from honed.protocols import Engine
from honed.record import CaptureLog, Drainer, Recorder
from honed.store import Store, open_store

LINE = "support"


class Served:
    """A running gateway: its address, its store and its parts."""

    def __init__(self, url: str, store: Store, gateway: Gateway, fleet: Fleet) -> None:
        self.url, self.store, self.gateway, self.fleet = url, store, gateway, fleet

    def drain(self) -> int:
        """Moves what was captured into the store."""
        return self.gateway.drainer.drain_once()


@contextmanager
def serving(
    folder: Path, settings: ScriptedSettings, *, renderer: Any = None, engine: Engine | None = None
) -> Iterator[Served]:
    """Serves until the block ends; the renderer is bytes and the engine scripted where no other is given."""
    store = open_store(None, folder)
    renderer = renderer or ByteRenderer()
    engine = engine or ScriptedEngine(settings, renderer)
    fleet = Fleet(engine, store, LINE, "replica-1")
    capture = CaptureLog(folder / "capture")
    recorder = Recorder(TokenModel(engine, renderer, fleet.version_of), capture)
    gateway = Gateway(
        model=recorder,
        fleet=fleet,
        store=store,
        capture=capture,
        drainer=Drainer(folder / "capture", store),
        decode=renderer.decode,
        settings=ServeSettings(max_tokens=80),
    )
    config = uvicorn.Config(build(gateway), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=functools.partial(_run, server, fleet), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", store, gateway, fleet)
    finally:
        server.should_exit = True
        thread.join(10)
        store.close()


def _run(server: uvicorn.Server, fleet: Fleet) -> None:
    async def both() -> None:
        follower = asyncio.create_task(fleet.run(0.02))
        await server.serve()
        follower.cancel()

    asyncio.run(both())
