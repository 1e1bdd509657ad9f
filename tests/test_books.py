"""The gateway's books: what serving cost reaches the ledger once, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from honed.assemble.gateway import _keep_books
from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.log import configure
from honed.store import open_store


async def test_a_locked_store_gets_its_entries_later_and_each_once(tmp_path: Path) -> None:
    with open_store(None, tmp_path, busy_seconds=0.01) as store:
        meter = Meter(load_book(None), line="m", stage="serve")
        keeper = asyncio.create_task(_keep_books(meter, store, interval_seconds=0.005))
        with locked(tmp_path):
            for _ in range(5):  # the event loop goes on while the store refuses
                meter.charge("generate", 1.0)
                await asyncio.sleep(0.05)
            assert store.ledger.list() == []
        while len(store.ledger.list()) < 5:  # noqa: ASYNC110 (the ledger has no event)
            await asyncio.sleep(0.01)
        meter.charge("generate", 1.0)  # what comes last is written when the gateway ends
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        assert [entry.seconds for entry in store.ledger.list()] == [1.0] * 6


async def end(keeper: asyncio.Task[None]) -> None:
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper


async def test_a_store_that_is_locked_at_the_end_is_asked_again_for_a_while(tmp_path: Path) -> None:
    with open_store(None, tmp_path, busy_seconds=0.01) as store:
        meter = Meter(load_book(None), line="m", stage="serve")
        keeper = asyncio.create_task(_keep_books(meter, store, interval_seconds=0.005))
        with locked(tmp_path):
            meter.charge("generate", 1.0)
            await asyncio.sleep(0.05)
            meter.charge("generate", 2.0)
            ending = asyncio.create_task(end(keeper))
            await asyncio.sleep(0.05)
            assert not ending.done()
        await ending
        assert [entry.seconds for entry in store.ledger.list()] == [1.0, 2.0]


async def test_what_the_store_refuses_to_the_end_is_counted(tmp_path: Path) -> None:
    with open_store(None, tmp_path, busy_seconds=0.01) as store:
        meter = Meter(load_book(None), line="m", stage="serve")
        keeper = asyncio.create_task(_keep_books(meter, store, interval_seconds=0.005, flush_seconds=0.1))
        events = io.StringIO()
        configure(events)
        try:
            with locked(tmp_path):
                meter.charge("generate", 1.0)
                meter.charge("generate", 2.5)
                await asyncio.sleep(0.05)
                await end(keeper)
        finally:
            configure()
        (lost,) = [row for row in map(json.loads, events.getvalue().splitlines()) if row["event"] == "books.lost"]
        assert (lost["entries"], lost["seconds"]) == (2, 3.5)
        assert lost["dollars"] > 0


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """The store's file, held by somebody else."""
    blocker = sqlite3.connect(root / "honed.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        blocker.execute("ROLLBACK")
        blocker.close()
