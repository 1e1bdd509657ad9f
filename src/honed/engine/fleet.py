"""Follows the store's releases with one engine: stages a version, switches to it, acknowledges, forgets the old ones.

Learning reaches serving only through the `releases` table. A version whose files fail their digest never serves: the
one before goes on. After an engine's restart its versions are loaded again before it is asked anything; one that has
become corrupt meanwhile is lost to the engine, and the one before serves then too.
"""

from __future__ import annotations

import asyncio

from honed.errors import EngineError, HonedError, NotFound, StoreError
from honed.log import log
from honed.protocols import Engine
from honed.store import Store
from honed.types import Release, Version


class Fleet:
    """The version that serves `line` on this replica. `engine` is its only engine; `serving` the version's id.

    `problem` says why nothing can be served any more, though asked again; "" while all is well.
    """

    def __init__(self, engine: Engine, store: Store, line: str, replica: str) -> None:
        self.engine, self.line = engine, line
        self._store, self._replica = store, replica
        self._release: Release | None = None
        self._acknowledged = ""
        self._refused: set[str] = set()
        self._loaded: dict[str, Version] = {}
        self.serving = f"{line}@0"
        self.problem = ""

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
        """One look at the engine and the releases: switches when there is a new one. Returns whether it switched."""
        await self._notice_losses()
        release = await asyncio.to_thread(self._store.releases.current, self.line)
        if release is None or release.id in self._refused:
            return False
        if self._release is not None and release.id == self._release.id:
            await self._acknowledge(release)
            return False
        if not await self._stage(release.version):
            self._refused.add(release.id)
            if self._release is None:
                await self._serve_an_earlier_one(lost=release.version)
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

    async def _notice_losses(self) -> None:
        """Compares what is loaded with what serves: a version that the engine lost is loaded again, or replaced."""
        try:
            held = (await self.engine.status()).versions
        except EngineError as error:
            self.problem = "" if error.retryable else str(error)
            raise
        self.problem = ""
        for name in [name for name in self._loaded if name not in held]:
            del self._loaded[name]
            log("fleet.version_lost", version=name, serving=self.serving)
        if (
            self.serving != f"{self.line}@0"
            and self.serving not in self._loaded
            and not await self._stage(self.serving)
        ):
            await self._serve_an_earlier_one(lost=self.serving)

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

    async def _serve_an_earlier_one(self, lost: str) -> None:
        """The newest released version that can be loaded serves, but none that was taken back; the base if none can."""
        releases = await asyncio.to_thread(self._store.releases.list, self.line)
        names, taken_back = dict[str, None](), set[str]()
        for each in reversed(releases):
            if each.kind == "rollback" and each.previous and each.previous not in names:
                taken_back.add(each.previous)
            names |= dict.fromkeys(name for name in (each.version, each.previous) if name and name not in taken_back)
        for name in [*(name for name in names if name != lost), f"{self.line}@0"]:
            if await self._stage(name):
                self.serving = name
                log("fleet.fell_back", version=name, lost=lost)
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
