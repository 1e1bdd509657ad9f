"""The watch: follows live success after a release and takes the version back to its parent when it falls.

It runs in the gateway, so that a dead loop can't leave a bad version in place, and it may only revert. Its state is
recomputed from the store, in the order of the outcomes, so a restart changes nothing.

What to expect is a lower bound (95 %) of the success of the version before, never its mean: of 20 outcomes the mean is
too high half of the time, and by enough to take one harmless version in five back. With the bound at most 1 % are, from
20 outcomes on (simulated, tests/api/test_watch.py). What it costs is a few requests of a bad version: a fall from 95 %
to 20 % is found after 10 outcomes (34 in the worst of a hundred) with a reference of 20, after 7 (17) with one of 72; a
fall from 80 % to nothing after 9 (18) and, with 96, 8 (9).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pydantic import Field

from honed.clock import new_id
from honed.config import Settings
from honed.economics.sequential import ReferenceWatch, success_bound
from honed.errors import HonedError
from honed.log import log
from honed.store import Store
from honed.types import Release

CONFIDENCE = 0.95
"""Of the bound on the reference: at 80 % one harmless version in thirty was taken back on a reference of 20."""


class WatchSettings(Settings):
    """[watch]: when a released version is taken back."""

    enabled: bool = True
    """Whether bad versions are taken back at all."""
    metric: str = "success"
    """The feedback metric that is followed; 1 is a success, 0 a failure."""
    tolerance: float = Field(default=0.05, ge=0, lt=1)
    """A fall below the reference by less than this is not harm."""
    alpha: float = Field(default=0.01, gt=0, lt=1)
    """Bound on the probability of taking a harmless version back."""
    min_reference: int = Field(default=20, ge=1)
    """Outcomes of the version before that are needed to know what to expect."""
    reference: int = Field(default=200, ge=1)
    """At most this many of them, the newest, make the reference."""
    poll_seconds: float = Field(default=0.5, gt=0)
    """How often outcomes are looked at."""


class Watch:
    """Watches one line's current release; `on_revert` is told of each that it takes back."""

    def __init__(
        self,
        store: Store,
        line: str,
        settings: WatchSettings,
        on_revert: Callable[[Release], None] | None = None,
    ) -> None:
        self._store, self._line, self._settings, self._on_revert = store, line, settings, on_revert
        self.value = 0.0

    def look(self) -> Release | None:
        """Judges the current release by every outcome since; the rollback that was written, if any."""
        release = self._store.releases.current(self._line)
        if release is None or release.kind == "rollback" or release.previous in (None, "", release.version):
            return None
        assert release.previous is not None
        before = self._outcomes(release.previous, until=release.at)[-self._settings.reference :]
        if len(before) < self._settings.min_reference:
            return None
        watch = expecting(before, self._settings)
        after = self._outcomes(release.version, since=release.at)
        for number, outcome in enumerate(after, 1):
            if watch.update(outcome):
                return self._revert(release, before, after[:number], watch)
        self.value = watch.value
        return None

    async def run(self) -> None:
        """Looks until cancelled."""
        while self._settings.enabled:
            try:
                await asyncio.to_thread(self.look)
            except HonedError as error:
                log("watch.waiting", error=str(error))
            await asyncio.sleep(self._settings.poll_seconds)

    def _outcomes(self, version: str, *, since: float | None = None, until: float | None = None) -> list[float]:
        rows = self._store.feedback.live(self._line, version, self._settings.metric, since)
        kept = sorted((at, value) for _, _, value, at in rows if until is None or at <= until)
        return [min(1.0, max(0.0, float(value))) for _, value in kept]

    def _revert(
        self, release: Release, before: list[float], after: list[float], watch: ReferenceWatch
    ) -> Release | None:
        assert release.previous is not None
        reason = (
            f"live {self._settings.metric} of {release.version} was {sum(after) / len(after):.0%} over its first "
            f"{len(after)} outcomes, against {sum(before) / len(before):.0%} over {len(before)} of {release.previous} "
            f"before it, of which at least {watch.floor:.0%} was to be expected; the evidence of harm reached "
            f"{watch.value:.3g}, over the {watch.threshold:.3g} that bounds false alarms at {self._settings.alpha:.1%}"
        )
        reverted = Release(
            id=new_id("release_"),
            line=release.line,
            version=release.previous,
            previous=release.version,
            kind="rollback",
            reason=reason,
            at=time.time(),
        )
        try:
            self._store.releases.put(reverted, replaces=release.version)
        except HonedError as error:  # somebody released in the same moment: their version is judged the next time
            log("watch.overtaken", error=str(error))
            return None
        log("watch.reverted", version=release.version, to=release.previous, outcomes=len(after))
        if self._on_revert is not None:
            self._on_revert(reverted)
        return reverted


def expecting(before: list[float], settings: WatchSettings) -> ReferenceWatch:
    """A fresh watch over a version that follows one with these outcomes."""
    bound = success_bound(sum(before), len(before), CONFIDENCE)
    return ReferenceWatch(min(0.99, max(0.01, bound)), settings.tolerance, settings.alpha)
