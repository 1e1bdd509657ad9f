"""Runs a gateway: HTTP, the fleet that follows releases, the drainer and the watch, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from honed.api.app import build
from honed.api.gateway import Gateway
from honed.errors import HonedError
from honed.log import log

RESTART_SECONDS = 1.0


async def serve(
    gateway: Gateway,
    background: list[Callable[[], Coroutine[Any, Any, None]]],
    *,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; running requests end, and the capture log is drained, before it returns.

    `background` are the coroutines that run beside it (fleet, drainer, watch). `ready` is told the port.
    """
    settings = gateway.settings
    config = uvicorn.Config(
        build(gateway), host=settings.host, port=settings.port, log_level="warning", access_log=False,
        timeout_graceful_shutdown=int(settings.drain_seconds), lifespan="off", server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    _outlive_signals()
    tasks = [asyncio.create_task(_kept_up(run)) for run in background]
    announce = asyncio.create_task(_announce(server, ready))
    try:
        await server.serve()
    finally:
        for task in (*tasks, announce):
            task.cancel()
        await asyncio.gather(*tasks, announce, return_exceptions=True)
        gateway.capture.close()
        with contextlib.suppress(HonedError, OSError):
            await asyncio.to_thread(gateway.drainer.drain_once)


async def _kept_up(run: Callable[[], Coroutine[Any, Any, None]], pause_seconds: float = RESTART_SECONDS) -> None:
    """Begins `run` again when something nobody foresaw ends it: serving needs its drainer, fleet and watch."""
    while True:
        try:
            return await run()
        except Exception as error:
            log("serve.background_failed", error=repr(error))
            await asyncio.sleep(pause_seconds)


def _outlive_signals() -> None:
    """uvicorn raises the signal that ended it once more when it is done; that must not end the drain below it."""
    with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: nobody sends signals there
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)


async def _announce(server: uvicorn.Server, ready: Callable[[int], None] | None) -> None:
    while not server.started:  # noqa: ASYNC110 (uvicorn has a flag and no event)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    log("serve.ready", port=port)
    if ready is not None:
        ready(port)
