"""Ids sort by the time at which they were made; the clocks keep the protocol."""

from __future__ import annotations

import time

from honed.clock import Clock, WallClock, new_id
from honed.testing import VirtualClock


def test_an_id_is_a_prefix_the_milliseconds_and_eighty_random_bits() -> None:
    before = time.time_ns() // 1_000_000
    id = new_id("trace_")
    after = time.time_ns() // 1_000_000
    assert id.startswith("trace_")
    digits = id.removeprefix("trace_")
    assert len(digits) == 32
    assert before <= int(digits[:12], 16) <= after


def test_ids_differ_within_a_millisecond_and_sort_by_time() -> None:
    first = [new_id("") for _ in range(1000)]
    assert len(set(first)) == 1000
    time.sleep(0.002)
    assert new_id("") > max(first)


async def test_clocks_let_time_pass() -> None:
    clocks: list[Clock] = [WallClock(), VirtualClock()]
    for clock in clocks:
        start = clock.now()
        await clock.sleep(0.01)
        assert clock.now() - start >= 0.009  # the wall clock may be set while it runs, by little
    assert abs(WallClock().now() - time.time()) < 60
