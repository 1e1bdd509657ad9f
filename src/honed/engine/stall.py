"""Tells an engine that has stalled from one that is busy: by its heartbeat, asked for over whatever reaches it.

A process that is stopped answers nothing; a thread that hangs leaves the heartbeat as it was while there is work. Time
is counted in questions asked, so that a machine that slept is not taken for an engine that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from honed.protocols import EngineStatus

QUESTION_SECONDS = 1.0


async def until_stalled(status: Callable[[], Awaitable[EngineStatus]], seconds: float) -> str:
    """Returns the reason once the engine says that it is broken, or made no progress for about `seconds`.

    No progress: no answer, or the same heartbeat again. Raises what `status` raises.
    """
    pause = min(QUESTION_SECONDS, seconds / 4)
    silent, seen = 0.0, None
    while silent < seconds:
        await asyncio.sleep(pause)
        try:
            told = await asyncio.wait_for(status(), pause)
        except TimeoutError:
            silent += 2 * pause
            continue
        if told.failure:
            return told.failure
        silent = 0.0 if told.heartbeat is None or told.heartbeat != seen else silent + pause
        seen = told.heartbeat
    return f"no progress for {seconds:g} s"
