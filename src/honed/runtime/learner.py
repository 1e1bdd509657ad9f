"""The learner child: a trainer and the rollout engine beside it, over one base model, served on a Unix socket.

    python -m honed.runtime.learner --source smollm2 --socket PATH --settings '{"lora": {...}, "train": {...}}'

It answers the engine's calls under their names and the trainer's with the prefix "trainer.". Training and generation
take turns. The socket appears when both are ready. It dies with its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from honed import rpc
from honed.codec import from_json
from honed.config import parse
from honed.engine import worker
from honed.errors import ConfigError, CorruptData, HonedError
from honed.log import log
from honed.protocols import Chunk, Engine, Loss, Request, Scores, Snapshot, StepResult, Trainer
from honed.runtime.settings import LearnerSettings
from honed.runtime.turns import Turns
from honed.types import Sample

PARENT_CHECK_SECONDS = 1.0
Maker = Callable[[str, LearnerSettings], Coroutine[Any, Any, tuple[Engine, Trainer]]]


def handlers(engine: Engine, trainer: Trainer) -> dict[str, Callable[..., Any]]:
    """The calls that a learner answers over rpc."""
    turns = Turns()
    calls = worker.handlers(engine)

    async def submit(request: Request) -> AsyncGenerator[Chunk, None]:
        stream: Any = engine.submit(request)
        async with turns.generating(), contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    async def logprobs(ids: Sequence[int], version: str, temperature: float) -> Scores:
        async with turns.generating():
            return await engine.logprobs(ids, version, temperature)

    return {**calls, "submit": submit, "logprobs": logprobs, **_trainer_handlers(engine, trainer, turns)}


def _trainer_handlers(engine: Engine, trainer: Trainer, turns: Turns) -> dict[str, Callable[..., Any]]:
    async def forward_backward(samples: Sequence[Sample], loss: Loss) -> StepResult:
        async with turns.training():
            return await trainer.forward_backward(samples, loss)

    async def step(learning_rate: float | None) -> StepResult:
        async with turns.training():
            return await trainer.step(learning_rate)

    async def logprobs(samples: Sequence[Sample]) -> list[Scores]:
        async with turns.training():
            return await trainer.logprobs(samples)

    async def snapshot(name: str) -> Snapshot:
        async with turns.training():
            return await trainer.snapshot(name)

    async def restore(snapshot: Snapshot | None, optimiser: bool) -> None:
        async with turns.training():
            await trainer.restore(snapshot, optimiser=optimiser)

    async def publish(version: str) -> None:
        async with turns.training():
            await engine.unload(version)  # a name that an earlier turn used must not answer with its weights
            await trainer.publish(version)

    calls = (forward_backward, step, logprobs, snapshot, restore, publish)
    return {f"trainer.{call.__name__}": call for call in calls}


def main(argv: Sequence[str] | None = None, maker: Maker | None = None) -> int:
    """Runs until SIGTERM, SIGINT or the parent's death. 0 = asked to stop, 1 = could not start, 2 = wrong usage.

    `maker` makes the engine and the trainer in place of `make`.
    """
    options = _parser().parse_args(argv)
    parent = options.parent or os.getppid()
    worker.die_with_parent()
    try:
        settings = parse(LearnerSettings, from_json(options.settings, dict), source="--settings")
        os.nice(settings.niceness)
        worker.limit_threads(settings.threads)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need on a GPU
        asyncio.run(_serve(maker or make, options.source, settings, options.socket, parent))
    except (HonedError, OSError) as error:
        print(f"honed learner: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | CorruptData) else 1
    return 0


async def make(source: str, settings: LearnerSettings) -> tuple[Engine, Trainer]:
    """Loads `source` once, for an engine with packed weights of its own and a trainer, joined by a channel in memory.

    Where an adapter learns, the two share what neither changes (embeddings, norms). Where all weights learn, the engine
    has weights of its own, and the trainer's are in float32.
    """
    from honed.model.load import load, prepare

    prepared = await asyncio.to_thread(prepare, source)  # a model that is not there is said before torch is loaded

    import torch
    import transformers

    from honed.engine.local import LocalEngine
    from honed.sync.memory import MemoryChannel
    from honed.train.local import LocalTrainer

    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    started = time.monotonic()
    loaded = await asyncio.to_thread(load, prepared, dtype=settings.engine.dtype, device=settings.engine.device)
    log("learner.loaded", source=source, seconds=round(time.monotonic() - started, 2))
    full = settings.train.method == "full"
    # A whole model is taken over at once and can be handed over again from the trainer, so one is held.
    channel = MemoryChannel(limit=1 if full else 4)
    extra = (settings.precision,) if settings.precision else ()
    engine = LocalEngine(loaded, settings.engine, channel, extra)  # first: the trainer changes the model's layers
    if full:  # weights of its own, never rounded to what the engine serves in
        loaded = await asyncio.to_thread(load, prepared, dtype="float32", device=settings.engine.device)
    trainer = LocalTrainer(loaded, settings.lora, settings.train, Path(settings.blobs), channel)
    channel.config = trainer.config
    return engine, trainer


async def _serve(maker: Maker, source: str, settings: LearnerSettings, path: str, parent: int) -> None:
    engine, trainer = await maker(source, settings)
    server = rpc.Server(handlers(engine, trainer))
    Path(path).unlink(missing_ok=True)
    await server.listen_unix(path)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    log("learner.ready", socket=path, pid=os.getpid())
    try:
        while not stop.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PARENT_CHECK_SECONDS)
    finally:
        await server.close()
        await engine.close()
        await trainer.close()
        Path(path).unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m honed.runtime.learner", description="Serves a trainer and its rollout engine over a socket."
    )
    parser.add_argument("--source", required=True, help="smollm2, a .gguf file, a folder or owner/name")
    parser.add_argument("--socket", required=True, help="where to listen; its folder must be private")
    parser.add_argument("--settings", default="{}", help="LearnerSettings as JSON")
    parser.add_argument("--parent", type=int, default=0, help="end when this is no longer the parent's process id")
    return parser


if __name__ == "__main__":
    sys.exit(main())
