"""The engine child: serves one engine over a Unix socket, and dies with its parent.

    python -m honed.engine.worker --source smollm2 --socket PATH --settings '{"slots": 8}'

The source "scripted" needs neither torch nor a model. The socket appears when the engine is ready. Threads stay awake
for less than a millisecond, so that a child beside a server leaves it the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from honed import rpc
from honed.config import parse
from honed.errors import ConfigError, HonedError
from honed.log import log
from honed.protocols import Chunk, Engine, EngineStatus, Request, Scores
from honed.types import Version

PARENT_CHECK_SECONDS = 1.0
SPINS = "20000"
"""Turns of libgomp's waiting loop before a thread sleeps: over the gaps of a step (a sixth of the speed at one to eight
requests on two AVX2 cores), and no longer."""
_PR_SET_PDEATHSIG = 1


def handlers(engine: Engine) -> dict[str, Callable[..., Any]]:
    """The calls that an engine answers over rpc."""

    async def submit(request: Request) -> AsyncGenerator[Chunk, None]:
        # a generator of its own, so that a cancelled call closes the engine's
        stream: Any = engine.submit(request)
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    async def cancel(id: str) -> None:
        await engine.cancel(id)

    async def logprobs(ids: Sequence[int], version: str, temperature: float) -> Scores:
        return await engine.logprobs(ids, version, temperature)

    async def load(version: Version) -> None:
        await engine.load(version)

    async def unload(version: str) -> None:
        await engine.unload(version)

    async def status() -> EngineStatus:
        return await engine.status()

    return {
        "submit": submit,
        "cancel": cancel,
        "logprobs": logprobs,
        "load": load,
        "unload": unload,
        "status": status,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM, SIGINT or the parent's death. 0 = asked to stop, 1 = could not start, 2 = wrong usage."""
    options = _parser().parse_args(argv)
    parent = os.getppid()
    die_with_parent()
    if options.nice:
        os.nice(options.nice)
    try:
        settings = json.loads(options.settings)
        limit_threads(int(settings.get("threads", 0)) if isinstance(settings, dict) else 0)
        engine = make(options.source, settings)
    except (HonedError, json.JSONDecodeError) as error:
        print(f"honed engine: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | json.JSONDecodeError) else 1
    asyncio.run(serve(engine, options.socket, parent))
    return 0


def make(source: str, settings: Any) -> Callable[[], Engine]:
    """A factory of the engine, its model already loaded. Raises ConfigError for wrong settings."""
    if not isinstance(settings, dict):
        raise ConfigError(f"--settings must be a JSON object, not {settings!r}.")
    if source == "scripted":
        from honed.engine.scripted import ScriptedEngine, ScriptedSettings

        script = parse(ScriptedSettings, settings, source="--settings")
        return lambda: ScriptedEngine(script)
    from honed.engine.settings import EngineSettings

    chosen = parse(EngineSettings, settings, source="--settings")
    from honed.model.load import load, prepare

    prepared = prepare(source)  # a model that is not there is said before torch is loaded
    from honed.engine.local import LocalEngine

    loaded = load(prepared, dtype=chosen.dtype, device=chosen.device)
    return lambda: LocalEngine(loaded, chosen)


async def serve(factory: Callable[[], Engine], path: str, parent: int) -> None:
    """Serves until a signal, or until `parent` is no longer this process's parent."""
    engine = factory()
    server = rpc.Server(handlers(engine))
    Path(path).unlink(missing_ok=True)
    await server.listen_unix(path)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    log("engine.ready", socket=path, pid=os.getpid())
    try:
        while not stop.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PARENT_CHECK_SECONDS)
    finally:
        await server.close()
        await engine.close()
        Path(path).unlink(missing_ok=True)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends; elsewhere the parent's id is watched."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit_threads(num_threads: int) -> None:
    """Sets OpenMP's threads (0: one a core), and how long they stay awake. Must come before torch is imported."""
    os.environ["GOMP_SPINCOUNT"] = SPINS
    if num_threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m honed.engine.worker", description="Serves one engine over a socket."
    )
    parser.add_argument("--source", required=True, help="smollm2, a .gguf file, a folder, owner/name, or scripted")
    parser.add_argument("--socket", required=True, help="where to listen; its folder must be private")
    parser.add_argument("--settings", default="{}", help="EngineSettings as JSON")
    parser.add_argument("--nice", type=int, default=0, help="added to the priority: higher yields to others")
    return parser


if __name__ == "__main__":
    sys.exit(main())
