"""The gateway, joined: an engine child, the fleet that follows releases, the recorder, the watch."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from honed.api.gateway import Gateway
from honed.api.serve import serve
from honed.api.watch import Watch
from honed.assemble.config import Config
from honed.assemble.ledger import unpaid
from honed.assemble.model import open_store, prepared, price_book, renderer_of
from honed.economics.meter import Meter
from honed.engine.fleet import Fleet
from honed.engine.process import EngineProcess
from honed.engine.token_model import TokenModel
from honed.errors import HonedError
from honed.log import log
from honed.record import CaptureLog, Drainer, Recorder
from honed.store import Store
from honed.types import Entry, Turn


async def serve_gateway(config: Config, *, port: int | None = None, ready: Callable[[int], None] | None = None) -> None:
    """`honed serve`: brings the engine child up, serves the line's released version, and records until SIGTERM."""
    root = Path(config.store.root).absolute()
    records = open_store(config)
    renderer = renderer_of(config)  # before the child: a conversion shall not run twice
    prepared(config)
    settings = config.scripted if config.model.source == "scripted" else config.engine
    engine = EngineProcess(
        config.model.source, settings.model_dump(mode="json"), folder=root / "run", log_path=root / "log" / "engine.log"
    )
    await engine.start()
    try:
        fleet = Fleet(engine, records, config.model.line, replica=f"{socket.gethostname()}-{os.getpid()}")
        await fleet.follow()
        capture = CaptureLog(root / "capture", fsync=config.serve.fsync)
        meter = Meter(price_book(config), line=config.model.line, stage="serve", cores=os.cpu_count() or 1)
        recorder = Recorder(TokenModel(engine, renderer, fleet.version_of), capture, on_turn=_charge(meter))
        drainer = Drainer(root / "capture", records)
        serving = config.serve if port is None else config.serve.model_copy(update={"port": port})
        gateway = Gateway(
            model=recorder,
            fleet=fleet,
            store=records,
            capture=capture,
            drainer=drainer,
            decode=renderer.decode,
            settings=serving,
        )
        watch = Watch(records, config.model.line, config.watch, lambda reverted: gateway.meters.rollbacks.inc())
        poll = config.serve.poll_seconds
        background: list[Callable[[], Coroutine[Any, Any, None]]] = [
            functools.partial(fleet.run, poll),
            functools.partial(drainer.run, poll),
            functools.partial(_keep_books, meter, records),
            watch.run,
        ]
        await asyncio.to_thread(_settle, config, drainer, records)
        await serve(gateway, background, ready=ready)
    finally:
        await engine.close()


def _settle(config: Config, drainer: Drainer, records: Store) -> None:
    """Charges what an earlier gateway served and was killed before it had charged."""
    try:
        drainer.drain_once()
        records.ledger.add(unpaid(config, records))
    except (HonedError, OSError) as error:  # the next start, or the report, does it
        log("books.waiting", error=str(error), entries=0)


def _charge(meter: Meter) -> Callable[[Turn], None]:
    def charge(turn: Turn) -> None:
        meter.charge_turn(turn, activity="generate")

    return charge


async def _keep_books(meter: Meter, records: Store, interval_seconds: float = 1.0, flush_seconds: float = 10.0) -> None:
    """Moves what serving cost into the ledger, a second late at most. A store that is away gets it later, and never
    holds up the event loop. At the end the store is asked for `flush_seconds`; what it refuses until then is lost, and
    the log says how much."""
    owed: list[Entry] = []

    async def pay() -> bool:
        owed.extend(meter.drain())
        try:
            await asyncio.to_thread(records.ledger.add, tuple(owed))  # an entry that was added already is left alone
        except HonedError as error:
            log("books.waiting", error=str(error), entries=len(owed))
            return False
        owed.clear()
        return True

    try:
        while True:
            await asyncio.sleep(interval_seconds)
            await pay()
    finally:
        try:
            async with asyncio.timeout(flush_seconds):
                while not await pay():  # noqa: ASYNC110 (a locked store has no event)
                    await asyncio.sleep(min(interval_seconds, 0.1))
        except TimeoutError:
            seconds, dollars = sum(entry.seconds for entry in owed), sum(entry.dollars or 0.0 for entry in owed)
            log("books.lost", entries=len(owed), seconds=seconds, dollars=dollars)
