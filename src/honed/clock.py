"""Time and ids. A Clock can be replaced (the planner's is virtual); ids sort by the time they were made."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from: seconds since the epoch, and a way to let it pass."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def new_id(prefix: str) -> str:
    """`prefix` followed by 32 hex digits: 48 bits of milliseconds, then 80 random bits (the layout of UUIDv7)."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{prefix}{milliseconds:012x}{os.urandom(10).hex()}"
