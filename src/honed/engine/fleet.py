"""Follows the store's releases with one engine: stages a version, switches to it, acknowledges, forgets the old ones.

Learning reaches serving only through the `releases` table. A version whose files fail their digest never serves: the
one before goes on. After an engine's restart its versions are loaded again before it is asked anything.
"""

from __future__ import annotations

import asyncio

from honed.errors import EngineError, HonedError, NotFound, StoreError
from honed.log import log
from honed.protocols import Engine
from honed.store import Store
from honed.types import Release, Version


class Fleet:
    """The version that serves `line` on this replica. `engine` is its only engine; `serving` the version's id."""

    def __init__(self, engine: Engine, store: Store, line: str, replica: str) -> None:
        self.engine, self.line = engine, line
        self._store, self._replica = store, replica
        self._release: Release | None = None
        self._acknowledged = ""
        self._refused: set[str] = set()
        self._loaded: dict[str, Version] = {}
        self.serving = f"{line}@0"

    def version_of(self, line: str) -> str:
        """The version that answers `line` now. Raises NotFound for a line that is not served here."""
        if line != self.line:
            raise NotFound(f"the model {line!r} is not served here; served: {self.line}.")
        return self.serving

    def pinned(self, version: str) -> str:
        """A version that a caller asked for by name. Raises NotFound when it is not loaded."""
        if version == f"{self.line}@0" or version in self._loaded:
            return version
        known = ", ".join(sorted({f"{self.line}@0", *self._loaded}))
        raise NotFound(f"the version {version!r} is not loaded here; loaded: {known}.")

    async def follow(self) -> bool:
        """One look at the releases: switches when there is a new one. Returns whether it switched."""
        release = await asyncio.to_thread(self._store.releases.current, self.line)
        if release is None or release.id in self._refused:
            return False
        if self._release is not None and release.id == self._release.id:
            await self._acknowledge(release)
            return False
        if not await self._stage(release.version):
            self._refused.add(release.id)
            if self._release is None:
                await self._serve_an_earlier_one()
            return False
        previous, self.serving, self._release = self.serving, release.version, release
        log("fleet.switched", version=release.version, previous=previous, kind=release.kind)
        await self._acknowledge(release)
        await self._forget({release.version, previous, release.previous or ""})
        return True

    async def run(self, interval_seconds: float = 0.25) -> None:
        """Follows until cancelled; a store or an engine that is away is tried again."""
        while True:
            try:
                await self.follow()
            except HonedError as error:
                log("fleet.waiting", error=str(error))
            await asyncio.sleep(interval_seconds)

    async def _stage(self, name: str) -> bool:
        """Loads a version beside what serves; whether it can be served. Asking again would not mend one that can't."""
        try:
            version = await asyncio.to_thread(self._store.versions.find, name)
            if version.number:
                await self.engine.load(version)
                self._loaded[version.id] = version
        except (EngineError, StoreError):  # away: the next look tries again
            raise
        except HonedError as error:
            log("fleet.refused", version=name, error=str(error))
            return False
        return True

    async def _serve_an_earlier_one(self) -> None:
        """At start there is nothing loaded to go on with: the newest earlier release that can be loaded serves."""
        releases = await asyncio.to_thread(self._store.releases.list, self.line)
        for name in dict.fromkeys(
            name for each in reversed(releases) for name in (each.version, each.previous) if name
        ):
            if await self._stage(name):
                self.serving = name
                log("fleet.fell_back", version=name)
                return

    async def _acknowledge(self, release: Release) -> None:
        """Tells the store, once; when the store is away the next look tries again."""
        if self._acknowledged != release.id:
            await asyncio.to_thread(self._store.releases.ack, self._replica, release.id, release.version)
            self._acknowledged = release.id

    async def _forget(self, kept: set[str]) -> None:
        """Unloads what neither serves nor served last; the engine lets running requests end first."""
        for name in [name for name in self._loaded if name not in kept]:
            await self.engine.unload(name)
            del self._loaded[name]
