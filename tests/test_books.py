"""The gateway's books: what serving cost reaches the ledger once, whatever the store does meanwhile, and the price of a
success is told for every version."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from honed.assemble import Config, ledger_of
from honed.assemble.gateway import _keep_books
from honed.assemble.ledger import unpaid
from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.log import configure
from honed.store import Store, open_store
from honed.types import Captured, Feedback, Message, Sampling, Span, Turn, Usage


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


CONFIG = Config.model_validate({"model": {"source": "scripted", "line": "m"}})


def serve(store: Store, trace: str, versions: list[str], *, good: bool) -> list[Turn]:
    """A stored conversation, each turn answered by the next of `versions`: ten tokens and a CPU second a turn."""
    turns = [
        Turn(
            id=f"{trace}.{number}", trace=trace, reply=Message(role="assistant", content="x"), sampling=Sampling(),
            model="m", versions=(Span(version=version, count=2),), finish="stop",
            usage=Usage(prompt=8, cached=0, output=2, seconds=1.0), at=1.0 + number,
        )
        for number, version in enumerate(versions)
    ]  # fmt: skip
    said = Feedback(id=f"f{trace}", target=turns[-1].id, name="success", value=good, at=9.0)
    records = [*(Captured(turn=turn, line="m") for turn in turns), Captured(feedback=said, line="m")]
    store.traces.capture(records, trace, 1)
    return turns


def test_what_a_killed_gateway_did_not_charge_is_charged_once_from_its_turns(tmp_path: Path) -> None:
    with open_store(None, tmp_path) as store:
        meter = Meter(load_book(None), line="m", stage="serve")
        first, second = serve(store, "a", ["m@1"], good=True) + serve(store, "b", ["m@1"], good=False)
        store.ledger.add([meter.charge_turn(first)])  # the second's entry died with the gateway
        assert [entry.id for entry in unpaid(CONFIG, store)] == [f"turn:{second.id}"]
        (cost,) = ledger_of(CONFIG, store).successes
        assert (cost.num_unpriced, cost.num_requests) == (0, 2)
        assert cost.dollars_per_success == 2 * (meter.drain()[0].dollars or 0.0)
        for _ in range(2):
            store.ledger.add(unpaid(CONFIG, store))
        assert store.ledger.add([meter.charge_turn(second)]) == 0
        assert len(store.ledger.list("m", stage="serve")) == 2


def test_a_version_s_tokens_per_success_are_those_of_its_own_turns(tmp_path: Path) -> None:
    with open_store(None, tmp_path) as store:
        serve(store, "a", ["m@1", "m@2"], good=True)
        serve(store, "b", ["m@1"], good=True)
        serve(store, "c", ["m@2", "m@2"], good=False)
        one, two = ledger_of(CONFIG, store).successes
        assert (one.version, one.tokens, one.tokens_per_success) == ("m@1", 20, 20.0)
        assert (two.version, two.tokens, two.tokens_per_success) == ("m@2", 30, 30.0)
