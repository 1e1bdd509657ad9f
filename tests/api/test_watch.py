"""The watch takes a bad version back, says why, leaves a good one, and never takes its own rollback back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from honed.api.watch import Watch, WatchSettings, expecting
from honed.store import Store, open_store
from honed.types import Captured, Feedback, Message, Release, Sampling, Span, Turn, Version

LINE = "support"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(None, tmp_path) as opened:
        yield opened


class Live:
    """Traffic with a clock of its own: one outcome a second."""

    def __init__(self, store: Store) -> None:
        self.store, self.at, self.count = store, 100.0, 0

    def outcomes(self, version: str, values: list[float]) -> None:
        """Turns that `version` answered, each with its feedback."""
        for value in values:
            self.at, self.count = self.at + 1.0, self.count + 1
            turn = Turn(
                id=f"t{self.count}", trace=f"trace_{self.count}", reply=Message(role="assistant", content="x"),
                output=(1,), logprobs=(-0.5,), raw_logprobs=(-0.5,), sampling=Sampling(), model=LINE,
                versions=(Span(version=version, count=1),), finish="stop", at=self.at,
            )  # fmt: skip
            said = Feedback(id=f"f{self.count}", target=turn.id, name="success", value=value, at=self.at)
            rows = [Captured(turn=turn, line=LINE), Captured(feedback=said, line=LINE)]
            self.store.traces.capture(rows, "log", self.count)

    def release(self, number: int, previous: int, kind: str = "promote") -> Release:
        """Releases a version at this moment."""
        self.at += 1.0
        self.store.versions.put(Version(line=LINE, number=number, parent=previous, uri="u", digest="d", at=1.0))
        row = Release(
            id=f"release_{self.at}", line=LINE, version=f"{LINE}@{number}", previous=f"{LINE}@{previous}",
            kind=kind, at=self.at,
        )  # type: ignore[arg-type]  # fmt: skip
        self.store.releases.put(row)
        return row


GOOD = [1.0, 1.0, 1.0, 1.0, 0.0] * 8  # 80 %
BAD = [0.0, 0.0, 0.0, 0.0, 1.0] * 8  # 20 %


def watch_of(store: Store, **settings: object) -> Watch:
    return Watch(store, LINE, WatchSettings.model_validate(settings))


def test_a_bad_run_is_taken_back_to_the_version_before_with_a_reason(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD)
    bad = live.release(1, 0)
    live.outcomes("support@1", BAD)
    reverted = watch_of(store).look()
    assert reverted is not None
    assert store.releases.current(LINE) == reverted
    assert (reverted.kind, reverted.version, reverted.previous) == ("rollback", "support@0", bad.version)
    assert "support@1" in reverted.reason
    assert "80%" in reverted.reason


def test_a_good_run_stays(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD)
    good = live.release(1, 0)
    live.outcomes("support@1", GOOD * 5)
    watch = watch_of(store)
    assert watch.look() is None
    assert store.releases.current(LINE) == good
    assert watch.value < 1.0


def test_a_rollback_is_never_taken_back_however_bad_the_traffic(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD)
    live.release(1, 0)
    live.outcomes("support@1", BAD)
    watch = watch_of(store)
    assert watch.look() is not None
    live.at += 1e10  # after the rollback, whose time is the wall clock's
    live.outcomes("support@0", BAD)
    assert watch.look() is None
    assert len(store.releases.list(LINE)) == 2


def test_a_restart_changes_nothing(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD)
    live.release(1, 0)
    looks: list[tuple[bool, float]] = []
    kept = watch_of(store)
    for value in BAD:
        live.outcomes("support@1", [value])
        fresh = watch_of(store)
        found = fresh.look()
        looks.append((found is not None, fresh.value))
        if found is not None:
            break
        assert kept.look() is None
        assert kept.value == fresh.value
    assert looks[-1][0]
    assert kept.look() is None  # the rollback is there already
    assert len(store.releases.list(LINE)) == 2


def test_too_few_outcomes_of_the_version_before_decide_nothing(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD[:19])
    live.release(1, 0)
    live.outcomes("support@1", BAD)
    assert watch_of(store, min_reference=20).look() is None
    assert watch_of(store, min_reference=19).look() is not None


def simulated(rng: np.random.Generator, before: float, after: float, num_before: int, num_after: int) -> int | None:
    """After how many outcomes of a version with success `after` the alarm is up, if ever."""
    watch = expecting([float(y) for y in rng.random(num_before) < before], WatchSettings())
    outcomes = rng.random(num_after) < after
    return next((at for at, y in enumerate(outcomes, 1) if watch.update(float(y))), None)


@pytest.mark.parametrize("success", [0.5, 0.8])
def test_a_harmless_version_is_taken_back_no_more_often_than_is_said(success: float) -> None:
    rng, runs = np.random.default_rng(7), 300
    alarms = sum(simulated(rng, success, success, 20, 300) is not None for _ in range(runs))
    assert alarms <= WatchSettings().alpha * runs


@pytest.mark.parametrize(
    ("before", "after", "num_before", "typical", "worst"),
    [(0.95, 0.2, 20, 12, 48), (0.95, 0.2, 72, 9, 24), (0.8, 0.0, 20, 11, 24), (0.8, 0.0, 96, 9, 12)],
)
def test_a_real_fall_is_found_within_the_requests_that_are_promised(
    before: float, after: float, num_before: int, typical: int, worst: int
) -> None:
    rng = np.random.default_rng(11)
    found = sorted(simulated(rng, before, after, num_before, 200) or 1000 for _ in range(200))
    assert found[100] <= typical
    assert found[-3] <= worst


def test_outcomes_of_other_versions_and_metrics_do_not_count(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD)
    live.release(1, 0)
    live.outcomes("support@0", BAD)  # answers of the version before, told late
    assert watch_of(store).look() is None
    assert watch_of(store, metric="other").look() is None


async def test_it_looks_by_itself_and_tells_who_counts(store: Store) -> None:
    live, told = Live(store), list[Release]()
    live.outcomes("support@0", GOOD)
    live.release(1, 0)
    live.outcomes("support@1", BAD)
    await Watch(store, LINE, WatchSettings(enabled=False)).run()
    assert len(store.releases.list(LINE)) == 1
    running = asyncio.create_task(Watch(store, LINE, WatchSettings(poll_seconds=0.001), told.append).run())
    while not told:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    running.cancel()
    assert told == [store.releases.current(LINE)]


def test_a_release_of_what_serves_already_is_not_taken_back_to_itself(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@1", GOOD)
    live.release(1, 1)
    live.outcomes("support@1", BAD)
    assert watch_of(store).look() is None


def test_a_release_that_came_meanwhile_is_left_alone(store: Store) -> None:
    live = Live(store)
    live.outcomes("support@0", GOOD)
    bad = live.release(1, 0)
    live.outcomes("support@1", BAD)
    newer = live.release(2, 1)
    watch = watch_of(store)
    assert watch._revert(bad, [1.0], [0.0], _alarmed()) is None
    assert store.releases.current(LINE) == newer


def _alarmed():  # type: ignore[no-untyped-def]
    from honed.economics.sequential import ReferenceWatch

    return ReferenceWatch(0.8)
