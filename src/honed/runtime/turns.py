"""Who computes now, in a process that both generates and trains: many requests together, or one pass alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """A lock with two kinds of holders. A pass that waits goes before requests that come after it.

    Between passes nothing is paused: a request that runs is finished first, so its tokens are of one version.
    """

    def __init__(self) -> None:
        self._generating = 0
        self._waiting = 0
        self._training = False
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Holds the turn together with other requests."""
        while self._training or self._waiting:
            await self._change()
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            self._changed.set()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Holds the turn alone."""
        self._waiting += 1
        try:
            while self._training or self._generating:
                await self._change()
            self._training = True
        finally:
            self._waiting -= 1
            self._changed.set()
        try:
            yield
        finally:
            self._training = False
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()  # who waits already has been woken by a set, whatever happens to the flag afterwards
        await self._changed.wait()
