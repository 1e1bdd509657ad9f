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
from honed.errors import EngineError, HonedError
from honed.log import log

RESTART_SECONDS = 1.0
PROBLEM_SECONDS = 1.0
"""How often the fleet is asked whether it can serve; for about as long /healthz says why it can't."""


async def serve(
    gateway: Gateway,
    background: list[Callable[[], Coroutine[Any, Any, None]]],
    *,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; running requests end, and the capture log is drained, before it returns.

    `background` are the coroutines that run beside it (fleet, drainer, watch). `ready` is told the port. Raises
    EngineError, after the same end, when the fleet says that nothing can be served any more: a supervisor begins anew.
    """
    settings = gateway.settings
    config = uvicorn.Config(
        build(gateway), host=settings.host, port=settings.port, log_level="warning", access_log=False,
        timeout_graceful_shutdown=int(settings.drain_seconds), lifespan="off", server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    _outlive_signals()
    tasks = [asyncio.create_task(_kept_up(run)) for run in background]
    asides = [asyncio.create_task(_announce(server, ready)), asyncio.create_task(_end_on_problem(server, gateway))]
    try:
        await server.serve()
    finally:
        for task in (*tasks, *asides):
            task.cancel()
        await asyncio.gather(*tasks, *asides, return_exceptions=True)
        gateway.capture.close()
        with contextlib.suppress(HonedError, OSError):
            await asyncio.to_thread(gateway.drainer.drain_once)
    if gateway.fleet.problem:
        raise EngineError(gateway.fleet.problem)


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


async def _end_on_problem(server: uvicorn.Server, gateway: Gateway) -> None:
    while not gateway.fleet.problem:  # noqa: ASYNC110 (it may come and go again)
        await asyncio.sleep(PROBLEM_SECONDS)
    log("serve.giving_up", reason=gateway.fleet.problem)
    server.should_exit = True


async def _announce(server: uvicorn.Server, ready: Callable[[int], None] | None) -> None:
    while not server.started:  # noqa: ASYNC110 (uvicorn has a flag and no event)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    log("serve.ready", port=port)
    if ready is not None:
        ready(port)
