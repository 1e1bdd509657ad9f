"""The fleet: follows releases, says so, refuses what is corrupt, and swaps under traffic without an abort."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from honed.engine.fleet import Fleet
from honed.engine.process import EngineProcess
from honed.engine.scripted import ByteRenderer, ScriptedEngine, ScriptedSettings
from honed.engine.token_model import TokenModel
from honed.errors import EngineError, NotFound, StoreError
from honed.protocols import Call
from honed.store import Store, open_store
from honed.types import Message, Release, Sampling, Turn, Version

LINE = "support"


@pytest.fixture
def store(tmp_path: Path):  # type: ignore[no-untyped-def]
    with open_store(None, tmp_path) as opened:
        yield opened


def fleet_of(store: Store, **script: object) -> Fleet:
    return Fleet(ScriptedEngine(ScriptedSettings.model_validate(script)), store, LINE, "replica-1")


def release(store: Store, number: int, previous: int | None = None) -> Release:
    """Releases a version, which is stored first where it is not the base."""
    id = f"{LINE}@{number}"
    if number:
        store.versions.put(Version(line=LINE, number=number, parent=0, uri="scripted", digest="d", at=1.0))
    row = Release(
        id=f"release_{number}_{len(store.releases.list(LINE))}",
        line=LINE,
        version=id,
        previous=None if previous is None else f"{LINE}@{previous}",
        kind="promote",
        at=2.0,
    )
    store.releases.put(row)
    return row


async def test_without_a_release_the_base_serves_and_other_lines_are_unknown(store: Store) -> None:
    fleet = fleet_of(store)
    assert await fleet.follow() is False
    assert fleet.version_of(LINE) == "support@0"
    with pytest.raises(NotFound, match="nobody"):
        fleet.version_of("nobody")


async def test_a_release_is_loaded_served_and_acknowledged_once(store: Store) -> None:
    fleet = fleet_of(store)
    row = release(store, 1)
    assert [await fleet.follow(), await fleet.follow()] == [True, False]
    assert fleet.version_of(LINE) == "support@1"
    assert (await fleet.engine.status()).versions == ("support@1",)
    assert store.releases.acks(row.id) == {"replica-1": "support@1"}


async def test_a_corrupt_version_is_refused_while_the_one_before_serves(store: Store) -> None:
    fleet = fleet_of(store, corrupt=["support@2"])
    release(store, 1, 0)
    await fleet.follow()
    bad = release(store, 2, 1)
    assert [await fleet.follow(), await fleet.follow()] == [False, False]
    assert fleet.version_of(LINE) == "support@1"
    assert store.releases.acks(bad.id) == {}
    release(store, 3, 1)
    assert await fleet.follow() is True
    assert fleet.version_of(LINE) == "support@3"


async def test_a_replica_that_starts_on_a_corrupt_release_serves_the_one_before_and_not_the_base(store: Store) -> None:
    release(store, 1, 0)
    release(store, 2, 1)
    fleet = fleet_of(store, corrupt=["support@2"])
    await fleet.follow()
    assert fleet.version_of(LINE) == "support@1"


async def test_a_rollback_to_the_base_is_a_release_like_another(store: Store) -> None:
    fleet = fleet_of(store)
    release(store, 1, 0)
    await fleet.follow()
    back = release(store, 0, 1)
    assert await fleet.follow() is True
    assert fleet.version_of(LINE) == "support@0"
    assert store.releases.acks(back.id) == {"replica-1": "support@0"}


async def test_pins_reach_the_base_and_what_is_loaded_and_old_versions_are_forgotten(store: Store) -> None:
    fleet = fleet_of(store)
    for number in (1, 2, 3):
        release(store, number, number - 1)
        await fleet.follow()
    assert [fleet.pinned(f"support@{number}") for number in (0, 2, 3)] == ["support@0", "support@2", "support@3"]
    with pytest.raises(NotFound, match="support@2, support@3"):
        fleet.pinned("support@1")
    assert (await fleet.engine.status()).versions == ("support@2", "support@3")


async def test_sixteen_requests_in_flight_during_two_swaps_end_whole_each_under_one_version(store: Store) -> None:
    fleet = fleet_of(store, delay_seconds=0.001, load_seconds=0.01)
    release(store, 1, 0)
    await fleet.follow()
    model = TokenModel(fleet.engine, ByteRenderer(), fleet.version_of)

    async def ask(number: int) -> Turn:
        text = f"{number} " + "x" * (20 + 10 * number)
        turn = await model.reply(
            Call(
                id=f"t{number}", messages=(Message(role="user", content=text),), line=LINE,
                sampling=Sampling(max_tokens=300),
            )
        )  # fmt: skip
        assert turn.reply.content == text
        return turn

    running = [asyncio.create_task(ask(number)) for number in range(16)]
    await asyncio.sleep(0.005)
    for number in (2, 3):
        release(store, number, number - 1)
        await fleet.follow()
    late = [asyncio.create_task(ask(number)) for number in range(16, 20)]
    turns = await asyncio.gather(*running, *late)
    assert {turn.finish for turn in turns} == {"stop"}
    assert all(len({span.version for span in turn.versions}) == 1 for turn in turns)
    assert [turn.versions[0].version for turn in turns] == ["support@1"] * 16 + ["support@3"] * 4
    assert (await fleet.engine.status()).versions == ("support@2", "support@3")


class Away:
    """Passes everything on to `inner`, but for `name`, which fails once with `error`."""

    def __init__(self, inner: object, name: str, error: Exception) -> None:
        self._inner, self._name, self._error = inner, name, error

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            self._name = ""

            def fail(*_: object) -> None:
                raise self._error

            return fail
        return getattr(self._inner, name)


async def test_an_acknowledgement_that_the_store_missed_is_said_again(store: Store) -> None:
    fleet = fleet_of(store)
    row = release(store, 1, 0)
    real, store.releases = store.releases, Away(store.releases, "ack", StoreError("away"))  # type: ignore[assignment]
    with pytest.raises(StoreError):
        await fleet.follow()
    assert fleet.version_of(LINE) == "support@1"
    assert await fleet.follow() is False
    assert real.acks(row.id) == {"replica-1": "support@1"}


async def test_a_release_that_comes_while_the_engine_is_away_is_followed_later(store: Store) -> None:
    fleet = fleet_of(store)
    release(store, 1, 0)
    fleet.engine = Away(fleet.engine, "load", EngineError("restarting", retryable=True))  # type: ignore[assignment]
    following = asyncio.create_task(fleet.run(0.001))
    while fleet.serving != "support@1":  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    following.cancel()
    assert fleet.version_of(LINE) == "support@1"


async def test_a_replica_with_no_version_that_can_be_loaded_serves_the_base_that_was_released(store: Store) -> None:
    release(store, 1, 0)
    fleet = fleet_of(store, corrupt=["support@1"])
    assert await fleet.follow() is False
    assert fleet.version_of(LINE) == "support@0"
    release(store, 2, 0)
    assert await fleet.follow() is True
    assert fleet.version_of(LINE) == "support@2"


async def test_a_version_that_the_engine_lost_is_loaded_again(store: Store) -> None:
    fleet = fleet_of(store)
    release(store, 1, 0)
    await fleet.follow()
    await fleet.engine.unload("support@1")
    assert await fleet.follow() is False
    assert fleet.version_of(LINE) == "support@1"
    assert (await fleet.engine.status()).versions == ("support@1",)


@pytest.mark.parametrize("taken_back", [False, True])
async def test_a_version_that_became_corrupt_is_replaced_by_the_last_good_one(store: Store, taken_back: bool) -> None:
    """As when a release is bad at its first load; never by a version that the watch took back."""
    fleet = fleet_of(store)
    for number in (1, 2, 3):
        release(store, number, number - 1)
        await fleet.follow()
    if taken_back:
        back = msgspec.structs.replace(release(store, 2, 3), id="release_back", kind="rollback")
        store.releases.put(back)
        await fleet.follow()
    lost = fleet.serving
    assert isinstance(fleet.engine, ScriptedEngine)
    fleet.engine.settings = ScriptedSettings(corrupt=(lost,))
    await fleet.engine.unload(lost)
    assert await fleet.follow() is False
    assert fleet.version_of(LINE) == ("support@1" if taken_back else "support@2")
    with pytest.raises(NotFound):
        fleet.pinned(lost)
    model = TokenModel(fleet.engine, ByteRenderer(), fleet.version_of)
    hello = Message(role="user", content="hello")
    turn = await model.reply(Call(id="t", messages=(hello,), line=LINE, sampling=Sampling(max_tokens=20)))
    assert turn.versions[0].version == fleet.serving
    release(store, 4, 3)
    assert await fleet.follow() is True
    assert fleet.version_of(LINE) == "support@4"


async def test_an_engine_that_gave_up_is_a_problem_and_one_that_restarts_is_none(store: Store) -> None:
    fleet = fleet_of(store)
    real = fleet.engine
    for error, problem in ((EngineError("stays down"), "stays down"), (EngineError("soon", retryable=True), "")):
        fleet.engine = Away(real, "status", error)  # type: ignore[assignment]
        with pytest.raises(EngineError):
            await fleet.follow()
        assert fleet.problem == problem


async def test_a_child_that_comes_back_without_what_serves_falls_back(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A real child, killed; meanwhile the files of what serves have become corrupt."""
    folder = tmp_path_factory.mktemp("e")
    source = folder / "corrupt"
    source.write_text("")
    tests = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    engine = EngineProcess(
        str(source), {}, folder=folder / "run", log_path=folder / "e.log", module="engine.rotting_worker",
        backoff_seconds=0.01, environment={"PYTHONPATH": tests},
    )  # fmt: skip
    await engine.start()
    fleet = Fleet(engine, store, LINE, "replica-1")
    for number in (1, 2):
        release(store, number, number - 1)
        await fleet.follow()
    source.write_text("support@2")
    os.kill(engine.pid, signal.SIGKILL)
    await asyncio.sleep(0.05)
    following = asyncio.create_task(fleet.run(0.01))
    while fleet.serving != "support@1":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    following.cancel()
    assert (await engine.status()).versions == ("support@1",)
    await engine.close()
