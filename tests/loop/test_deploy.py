"""Releases: what deploy refuses, what it keeps of a forced one, how it goes back, and what a crash may repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.errors import CorruptData, Refused
from honed.loop.deploy import acknowledged, deploy, rollback, taken_back
from honed.store import Store, open_store
from honed.types import Verdict, Version


class FastClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


def version(number: int, digest: str | None = None) -> Version:
    parent = number - 1 if number else None
    return Version(line="m", number=number, parent=parent, digest=digest or f"sha-{number}", uri=f"blobs/{number}")


def verdict(number: int, decision: str = "promote", baseline: str | None = None) -> Verdict:
    against = baseline if baseline is not None else f"m@{number - 1}"
    return Verdict(
        id=f"verdict-{number}", version=f"m@{number}", baseline=against, decision=decision, reasons=("won",), at=1.0
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(None, tmp_path) as store:
        for number in range(1, 5):
            store.versions.put(version(number))
        yield store


async def test_a_promoted_version_is_released_with_its_verdict(store: Store) -> None:
    release = await deploy(store, "m", version(1), verdict(1), clock=FastClock())
    assert store.releases.current("m") == release
    assert (release.version, release.kind, release.verdict, release.previous) == ("m@1", "promote", "verdict-1", None)
    assert release.reason == "won"
    assert acknowledged(store, release) == {}  # nothing serves, and that is fine
    second = await deploy(store, "m", version(2), verdict(2), clock=FastClock())
    assert second.previous == "m@1"


@pytest.mark.parametrize(
    ("judged", "says"),
    [
        (None, "no verdict"),
        (verdict(1, "reject"), "'reject'"),
        (verdict(1, "inconclusive"), "'inconclusive'"),
        (verdict(2), "is about m@2"),
        (verdict(1, baseline="m@7"), "compared with m@7, and m@0 serves now"),
    ],
)
async def test_without_the_right_verdict_nothing_is_released_unless_forced(
    store: Store, judged: Verdict | None, says: str
) -> None:
    with pytest.raises(Refused, match=says):
        await deploy(store, "m", version(1), judged, clock=FastClock())
    assert store.releases.current("m") is None
    release = await deploy(store, "m", version(1), judged, clock=FastClock(), force=True, reason="a drill")
    assert release.kind == "force"
    assert "a drill" in release.reason
    assert says.split(",")[0] in release.reason


async def test_force_where_nothing_objects_is_a_promotion(store: Store) -> None:
    assert (await deploy(store, "m", version(1), verdict(1), clock=FastClock(), force=True)).kind == "promote"


async def test_the_base_models_two_names_are_one(store: Store) -> None:
    assert (await deploy(store, "m", version(1), verdict(1, baseline=""), clock=FastClock())).kind == "promote"


async def test_corrupt_files_are_found_before_the_row_is_written(store: Store) -> None:
    def verify(version: Version) -> None:
        raise CorruptData(f"{version.uri} does not match its digest")

    for force in (False, True):
        with pytest.raises(CorruptData, match="blobs/1"):
            await deploy(store, "m", version(1), verdict(1), clock=FastClock(), verify=verify, force=force)
    assert store.releases.current("m") is None


async def test_another_lines_version_is_refused_even_by_force(store: Store) -> None:
    with pytest.raises(Refused, match="belongs to the line"):
        await deploy(store, "other", version(1), verdict(1), clock=FastClock(), force=True)


async def test_a_repeated_release_is_the_first_one(store: Store) -> None:
    first = await deploy(store, "m", version(1), verdict(1), clock=FastClock())
    assert await deploy(store, "m", version(1), verdict(1), clock=FastClock()) == first
    assert len(store.releases.list("m")) == 1


async def test_rollback_goes_to_what_served_before_and_never_to_what_was_taken_back(store: Store) -> None:
    for number in (1, 2, 3):
        await deploy(store, "m", version(number), verdict(number), clock=FastClock())
    back = await rollback(store, "m", "live success fell", clock=FastClock())
    assert (back.version, back.previous, back.kind, back.reason) == ("m@2", "m@3", "rollback", "live success fell")
    assert (await rollback(store, "m", "again", clock=FastClock())).version == "m@1"
    assert (await rollback(store, "m", "and again", clock=FastClock())).version == "m@0"
    assert taken_back(store, "m") == {"m@1", "m@2", "m@3"}
    with pytest.raises(Refused, match="base model"):
        await rollback(store, "m", "once more", clock=FastClock())


async def test_files_that_were_taken_back_are_not_released_again_without_force(store: Store) -> None:
    await deploy(store, "m", version(1), verdict(1), clock=FastClock())
    await deploy(store, "m", version(2), verdict(2), clock=FastClock())
    await rollback(store, "m", "fell", clock=FastClock())
    with pytest.raises(Refused, match="taken back"):
        await deploy(store, "m", version(2), verdict(2), clock=FastClock())
    copy = version(5, digest="sha-2")
    with pytest.raises(Refused, match="served as m@2 and were taken back"):
        await deploy(store, "m", copy, verdict(5, baseline="m@1"), clock=FastClock())
    release = await deploy(store, "m", copy, verdict(5, baseline="m@1"), clock=FastClock(), force=True)
    assert release.kind == "force"
    fresh = await deploy(store, "m", version(3), verdict(3, baseline="m@5"), clock=FastClock())
    assert fresh.kind == "promote"


async def test_deploy_waits_for_the_replicas_that_served_before(store: Store) -> None:
    first = await deploy(store, "m", version(1), verdict(1), clock=FastClock())
    for replica in ("a", "b"):
        store.releases.ack(replica, first.id, "m@1")
    clock = FastClock()

    class Replicas(FastClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            current = store.releases.current("m")
            if current.version == "m@2" and self.time > clock.time + 1:
                store.releases.ack("a", current.id, "m@2")
            if current.version == "m@2" and self.time > clock.time + 2:
                store.releases.ack("b", current.id, "m@2")

    second = await deploy(store, "m", version(2), verdict(2), clock=Replicas(), timeout_seconds=60)
    assert acknowledged(store, second) == {"a": "m@2", "b": "m@2"}


async def test_a_replica_that_never_answers_does_not_hold_the_release(store: Store) -> None:
    clock = FastClock()
    first = await deploy(store, "m", version(1), verdict(1), clock=clock, timeout_seconds=5)
    assert 103.0 <= clock.time <= 104.0  # no replica is known
    store.releases.ack("a", first.id, "m@1")
    clock = FastClock()
    await deploy(store, "m", version(2), verdict(2), clock=clock, timeout_seconds=5)
    assert 105.0 <= clock.time <= 106.0


async def test_two_writers_cannot_both_release(store: Store) -> None:
    """A rollback between reading what serves and writing the row wins; the promotion is refused."""
    await deploy(store, "m", version(1), verdict(1), clock=FastClock())
    await deploy(store, "m", version(2), verdict(2), clock=FastClock())

    def verify(version: Version) -> None:
        asyncio.run(rollback(store, "m", "fell meanwhile", clock=FastClock()))

    with pytest.raises(Refused, match="another release came first"):
        await deploy(store, "m", version(3), verdict(3), clock=FastClock(), verify=verify)
    assert store.releases.current("m").version == "m@1"
