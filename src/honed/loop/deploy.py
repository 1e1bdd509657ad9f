"""Puts a version into serving by committing a release row, or takes one back. Moves no weights: engines poll the row.

Nothing is released without a promote verdict against what serves now, unless forced, and then the reason is kept. A
version that was taken back is not released again from the same files without force. The live watch, which may revert by
itself, lives in the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from honed.clock import Clock, WallClock, new_id
from honed.errors import NotFound, Refused
from honed.log import log
from honed.store import Store
from honed.types import Release, Verdict, Version

UNKNOWN_SECONDS = 3.0
"""Wait so long for replicas of which nothing is known: perhaps none serves this line yet."""


async def deploy(
    store: Store,
    line: str,
    version: Version,
    verdict: Verdict | None,
    *,
    clock: Clock | None = None,
    force: bool = False,
    reason: str = "",
    timeout_seconds: float = 10.0,
    poll_seconds: float = 0.1,
    verify: Callable[[Version], object] | None = None,
) -> Release:
    """Releases `version` on `line` and waits up to `timeout_seconds` for the serving replicas to acknowledge it.

    `verify` reads the version's files against its digest before anything is written (it raises CorruptData). Raises
    Refused without a promote verdict for this version against what serves now, for a version of another line, and for
    files that were taken back before; `force` overrides these, and `reason` is kept. That no replica acknowledged is
    no error (nothing may be serving): it is logged, and `acknowledged` tells; where none ever did, the wait is short.
    What serves already is not released again: its release is returned, so a loop that died right after a release can
    repeat the call.
    """
    clock = clock or WallClock()
    current = await asyncio.to_thread(store.releases.current, line)
    if current is not None and current.version == version.id:
        return current
    problems = await asyncio.to_thread(_problems, store, line, version, verdict, current)
    if problems and not force:
        raise Refused(f"{version.id} was not released: {'; '.join(problems)}. Force it with a reason to override.")
    if version.line != line:
        raise Refused(f"{version.id} belongs to the line {version.line!r} and can't serve {line!r}.")
    if verify is not None and version.number > 0:
        await asyncio.to_thread(verify, version)
    release = Release(
        id=new_id("release_"),
        line=line,
        version=version.id,
        previous=current.version if current else None,
        kind="force" if problems else "promote",
        verdict=verdict.id if verdict else None,
        reason=_reason(reason, problems, verdict),
        at=clock.now(),
    )
    return await _commit(store, release, current, clock, timeout_seconds, poll_seconds)


async def rollback(
    store: Store,
    line: str,
    reason: str,
    *,
    clock: Clock | None = None,
    timeout_seconds: float = 10.0,
    poll_seconds: float = 0.1,
) -> Release:
    """Takes back what serves `line`: the latest version that served before and was never taken back serves again.

    Raises Refused when nothing but the base model serves.
    """
    clock = clock or WallClock()
    current = await asyncio.to_thread(store.releases.current, line)
    if current is None or current.version == f"{line}@0":
        raise Refused(f"{line!r} already serves its base model: there is nothing older to go back to.")
    target = await asyncio.to_thread(_last_good, store, line, current)
    release = Release(
        id=new_id("release_"),
        line=line,
        version=target,
        previous=current.version,
        kind="rollback",
        reason=reason,
        at=clock.now(),
    )
    return await _commit(store, release, current, clock, timeout_seconds, poll_seconds)


def acknowledged(store: Store, release: Release) -> dict[str, str]:
    """Which replicas serve the release: {replica: version}."""
    return store.releases.acks(release.id)


def taken_back(store: Store, line: str) -> set[str]:
    """Ids of the versions of `line` that a rollback removed from serving."""
    return {
        release.previous for release in store.releases.list(line) if release.kind == "rollback" and release.previous
    }


def _problems(store: Store, line: str, version: Version, verdict: Verdict | None, current: Release | None) -> list[str]:
    problems = []
    serving = current.version if current else f"{line}@0"
    if verdict is None:
        problems.append("it has no verdict")
    elif verdict.version != version.id:
        problems.append(f"the verdict {verdict.id} is about {verdict.version}")
    elif verdict.decision != "promote":
        problems.append(f"its verdict {verdict.id} is {verdict.decision!r}")
    elif (verdict.baseline or f"{line}@0") != serving:
        problems.append(f"it was compared with {verdict.baseline or 'the base model'}, and {serving} serves now")
    for old in sorted(taken_back(store, line)):
        if old == version.id or (version.digest and _digest(store, old) == version.digest):
            problems.append(f"these files served as {old} and were taken back")
    return problems


def _reason(reason: str, problems: Sequence[str], verdict: Verdict | None) -> str:
    if problems:
        return f"forced although {'; '.join(problems)}" + (f": {reason}" if reason else "")
    return reason or (verdict.reasons[0] if verdict and verdict.reasons else "")


def _last_good(store: Store, line: str, current: Release) -> str:
    """The latest version that served before and was never taken back; the base model when there is none."""
    refused = {*taken_back(store, line), current.version}
    served = [release.version for release in store.releases.list(line) if release.version not in refused]
    return served[-1] if served else f"{line}@0"


def _digest(store: Store, id: str) -> str:
    try:
        return store.versions.find(id).digest
    except NotFound:
        return ""


async def _commit(
    store: Store, release: Release, current: Release | None, clock: Clock, timeout_seconds: float, poll_seconds: float
) -> Release:
    known = await asyncio.to_thread(acknowledged, store, current) if current else {}
    replaces = current.version if current else None
    await asyncio.to_thread(lambda: store.releases.put(release, replaces=replaces))
    log("deploy.released", line=release.line, version=release.version, kind=release.kind, previous=release.previous)
    timeout_seconds = timeout_seconds if known else min(timeout_seconds, UNKNOWN_SECONDS)
    acks = await _wait(store, release, max(1, len(known)), clock, timeout_seconds, poll_seconds)
    late = sorted(set(known) - set(acks))
    log("deploy.acknowledged", release=release.id, replicas=sorted(acks), late=late, none=not acks)
    return release


async def _wait(
    store: Store, release: Release, wanted: int, clock: Clock, timeout_seconds: float, poll_seconds: float
) -> dict[str, str]:
    """Waits until as many replicas as served the last release (at least one) have acknowledged, or time is up."""
    deadline = clock.now() + timeout_seconds
    while True:
        acks = await asyncio.to_thread(acknowledged, store, release)
        if len(acks) >= wanted or clock.now() >= deadline:
            return acks
        await clock.sleep(poll_seconds)
