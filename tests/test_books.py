"""The gateway's books: what serving cost reaches the ledger once, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

from honed.assemble.gateway import _keep_books
from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.store import open_store


async def test_a_locked_store_gets_its_entries_later_and_each_once(tmp_path: Path) -> None:
    with open_store(None, tmp_path, busy_seconds=0.01) as store:
        meter = Meter(load_book(None), line="m", stage="serve")
        keeper = asyncio.create_task(_keep_books(meter, store, interval_seconds=0.005))
        blocker = sqlite3.connect(tmp_path / "honed.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        for _ in range(5):  # the event loop goes on while the store refuses
            meter.charge("generate", 1.0)
            await asyncio.sleep(0.05)
        assert store.ledger.list() == []
        blocker.execute("ROLLBACK")
        blocker.close()
        while len(store.ledger.list()) < 5:  # noqa: ASYNC110 (the ledger has no event)
            await asyncio.sleep(0.01)
        meter.charge("generate", 1.0)  # what comes last is written when the gateway ends
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        assert [entry.seconds for entry in store.ledger.list()] == [1.0] * 6
