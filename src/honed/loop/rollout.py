"""The third arrow: attempts at tasks, many at once, each ending as a Trace with a score or a fault.

A bad rollout is data: a timeout, a dead environment or a verifier that raises becomes a Fault on that one trace, masked
by the algorithms and counted, and never a zero or a crash. Only the death of the engine itself is raised, because
resampling belongs to whoever can restart it. What is complete is handed on at once, so that a crash costs no group.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec

from honed import codec
from honed.config import Settings
from honed.economics.meter import Meter, outcome_of
from honed.errors import EngineError, HonedError, UserError, VerifierError
from honed.log import log
from honed.protocols import Environment, Job, Outcome, Sandbox, Session
from honed.store import Store
from honed.types import Activity, Fault, Group, Origin, Precision, Sampling, Score, Spend, Task, Trace

CANCEL_GRACE_SECONDS = 5.0


class RolloutSettings(Settings):
    """[rollout]: how attempts are made."""

    concurrency: int = 32
    """Attempts in flight at once."""
    timeout_seconds: float = 120.0
    """An attempt ends as a timeout fault after this long, sandbox and environment included."""
    batch_timeout_seconds: float = 900.0
    """All attempts of one step together; stragglers end as timeout faults."""
    verify_timeout_seconds: float = 30.0
    """A verifier's deadline."""
    engine_retries: int = 2
    """How often an attempt starts again when the engine was lost under it."""
    temperature: float = 1.0
    """Sampling temperature of practice."""
    top_p: float = 1.0
    """Nucleus of practice; 1 keeps the whole distribution, which policy gradients want."""
    max_tokens: int = 256
    """Longest reply, in tokens."""
    precision: Precision | None = None
    """Products of practice's attempts; None: as [engine] serves. "int8" is up to three times faster on a CPU, and wants
    a loss that corrects for it (grpo.anchor = "trainer"). Gates are always judged at [engine]'s own."""

    def sampling(self, seed: int) -> Sampling:
        """The sampling of one attempt; the seed makes it reproducible."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=seed,
            precision=self.precision or "",
        )


class Sessions(Protocol):
    """Makes the Session of one attempt: a model bound to a version, which records under the given trace id."""

    def __call__(
        self, task: Task, *, version: str, trace: str, sampling: Sampling, origin: Origin, tags: dict[str, str]
    ) -> Session: ...


@runtime_checkable
class Counting(Protocol):
    """A Session that counts the tokens of replies which were cut off."""

    unfinished: int


class Scorer(Protocol):
    """Runs verifiers with a deadline (env/verify.py) and tells `on_spent` their CPU seconds, of failed ones too.
    Raises VerifierError."""

    async def score(
        self,
        verifier: str,
        task: Task,
        trace: Trace,
        outcome: Outcome,
        sandbox: Sandbox | None,
        *,
        timeout_seconds: float,
        on_spent: Callable[[float], None],
    ) -> Score: ...


Gather = Callable[[Sequence[Job], int], Awaitable[list[Any]]]
Keep = Callable[[int, Group], Awaitable[None]]
OnEvent = Callable[[str, dict[str, Any]], None]


def silent(event: str, fields: dict[str, Any]) -> None:
    """An OnEvent that tells nobody."""


async def no_sandbox(task: Task) -> Sandbox | None:
    """For environments that need none."""
    return None


def judged(group: Group) -> list[float]:
    """The scores of the attempts that were judged; faults are masked."""
    return [trace.score.value for trace in group.traces if trace.score is not None and trace.fault is None]


def is_flat(group: Group) -> bool:
    """Whether the judged attempts all scored the same (or fewer than two were judged): nothing to compare."""
    return len(set(judged(group))) < 2


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Everything an attempt needs, as objects; assemble.py joins them."""

    line: str
    sessions: Sessions
    environments: Callable[[str], Environment]
    scorer: Scorer
    gather: Gather
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    sandbox: Callable[[Task], Awaitable[Sandbox | None]] = no_sandbox
    meter: Meter | None = None
    flat: Callable[[Group], bool] = is_flat
    """Whether a complete group teaches nothing, for its attempts compare alike: they are then waste."""

    async def attempt(
        self,
        task: Task,
        version: str,
        key: str,
        *,
        seed: int = 0,
        origin: Origin = "rollout",
        tags: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        sampling: Sampling | None = None,
    ) -> Trace:
        """One attempt at a task. `key` names it for ever: the trace's id follows from it, the draws from `seed`.

        Never raises but for cancellation: what breaks is the trace's fault (boundary engine, environment, verifier or
        sandbox). A fault of the engine that a restart would mend has `retryable` True.
        """
        id = "trace_" + codec.digest(["rollout", key])[:32]
        marks = {"version": version, "key": key, **(tags or {})}
        sampling = sampling or self.settings.sampling(seed)
        limit = self.settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        started = time.time()
        for retry in range(self.settings.engine_retries + 1):
            session = self.sessions(task, version=version, trace=id, sampling=sampling, origin=origin, tags=marks)
            blank = Trace(id=id, origin=origin, line=self.line, task=task.id, tools=task.tools, tags=marks, at=started)
            late = functools.partial(_timed_out, blank, session, limit)
            trace = await within(limit, self._run(task, session, blank), late)
            self._charge_cut(session, trace)
            if trace.fault is None or trace.fault.boundary != "engine" or not trace.fault.retryable:
                break
            self._charge_lost(trace)
            await asyncio.sleep(0.05 * retry)
        log("rollout.scored" if trace.score else "rollout.fault", trace=id, task=task.id, **_told(trace))
        return trace

    async def practise(
        self,
        slots: Mapping[int, Task],
        version: str,
        num_attempts: int,
        *,
        name: str,
        seed: int,
        keep: Keep,
        origin: Origin = "rollout",
        tags: Mapping[str, str] | None = None,
    ) -> dict[int, Group]:
        """`num_attempts` at the task of each slot. `name` and the slot name each group for ever.

        `keep` is awaited for every group the moment its last attempt ends; it stores and charges it. Raises
        EngineError(retryable=True) when the engine was lost: groups that it touched are not kept, all others are. What
        was spent on attempts of groups that are not kept is charged here, as fault.
        """
        deadline = time.monotonic() + self.settings.batch_timeout_seconds
        traces: dict[int, list[Trace]] = {slot: [] for slot in slots}
        groups: dict[int, Group] = {}

        async def one(slot: int, number: int) -> None:
            task, key = slots[slot], f"{name}/{slot}/{number}"
            left = min(self.settings.timeout_seconds, max(0.0, deadline - time.monotonic()))
            trace = await self.attempt(
                task, version, key, seed=seed_of(seed, slot, number), origin=origin, tags=tags, timeout_seconds=left
            )
            traces[slot].append(trace)
            if len(traces[slot]) == num_attempts and not any(lost(trace) for trace in traces[slot]):
                group = make_group(name, slot, task, traces[slot])
                await keep(slot, group)
                groups[slot] = group

        jobs = [_job(one, slot, number) for slot in slots for number in range(num_attempts)]
        try:
            await self.gather(jobs, self.settings.concurrency)
        finally:
            for trace in [trace for slot in slots if slot not in groups for trace in traces[slot]]:
                if not lost(trace):  # those are charged where they were lost
                    self._charge_lost(trace)
        if missing := [slot for slot in slots if slot not in groups]:
            broken = next(trace.fault for slot in missing for trace in traces[slot] if lost(trace))
            raise EngineError(f"the engine was lost under {len(missing)} groups: {broken.message}", retryable=True)  # type: ignore[union-attr]
        return {slot: groups[slot] for slot in slots}

    def charge(self, group: Group) -> None:
        """Charges the attempts of a group that is stored. Charging it again adds nothing to the ledger."""
        if self.meter is None:
            return
        for trace in group.traces:
            outcome = outcome_of(trace)
            if outcome == "used" and trace.origin == "rollout" and self.flat(group):
                outcome = "zero_variance"
            for turn in trace.turns:
                self.meter.charge_turn(turn, activity=_activity(trace), line=self.line, outcome=outcome)

    async def flush(self, store: Store, subject: str) -> None:
        """Writes what was spent since the last call into the ledger, as spent on `subject` (a version). What can't be
        written now is written by the next call."""
        if self.meter is None:
            return
        owed = self.meter.drain()
        try:
            entries = [msgspec.structs.replace(entry, subject=subject) for entry in owed]
            await asyncio.to_thread(store.ledger.add, entries)
        except HonedError:
            self.meter.undrain(owed)
            raise

    async def _run(self, task: Task, session: Session, blank: Trace) -> Trace:
        """Environment, then verifier; every exception becomes a fault of the boundary where it came up."""
        sandbox: Sandbox | None = None
        outcome = Outcome()
        try:
            boundary = "sandbox"
            sandbox = await self.sandbox(task)
            boundary = "environment"
            outcome = await self.environments(task.environment).run(task, session, sandbox)
            trace = _with(blank, session, fault=outcome.fault)
            if outcome.fault is not None:
                return trace
            boundary = "verifier"
            score = await self._score(task, trace, outcome, sandbox)
            return msgspec.structs.replace(trace, score=score)
        except Exception as error:  # the boundary of an attempt: a bad rollout is data
            return _with(blank, session, fault=fault_of(error, boundary))
        finally:
            if sandbox is not None:
                await sandbox.close()

    async def _score(self, task: Task, trace: Trace, outcome: Outcome, sandbox: Sandbox | None) -> Score:
        seconds: list[float] = []
        spent: Spend = "fault"
        try:
            score = await self.scorer.score(
                task.verifier, task, trace, outcome, sandbox,
                timeout_seconds=self.settings.verify_timeout_seconds, on_spent=seconds.append,
            )  # fmt: skip
            spent = "used"
            return score
        finally:
            if self.meter is not None and seconds:
                self.meter.charge("verify", sum(seconds), subject=trace.id, line=self.line, outcome=spent)

    def _charge_lost(self, trace: Trace) -> None:
        """Charges an attempt that will be made again under the same name."""
        if self.meter is not None:
            for turn in trace.turns:
                self.meter.charge_turn(turn, activity=_activity(trace), line=self.line, outcome="fault", kept=False)

    def _charge_cut(self, session: Session, trace: Trace) -> None:
        """Charges the reply that an attempt's end cut off: its tokens are known, its seconds are the engine's secret,
        so it has no price."""
        if self.meter is None or not isinstance(session, Counting) or not session.unfinished:
            return
        self.meter.charge(
            _activity(trace), 0.0, device=f"unknown:{self.line}", tokens=session.unfinished, subject=trace.id,
            line=self.line, outcome="fault",
        )  # fmt: skip


def _activity(trace: Trace) -> Activity:
    return "eval" if trace.origin == "eval" else "generate"


async def within(seconds: float, work: Awaitable[Trace], late: Callable[[], Trace]) -> Trace:
    """The work's result, or `late()` after that many seconds. Work that ignores its cancellation is abandoned."""
    running = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({running}, timeout=seconds)
    except asyncio.CancelledError:
        running.cancel()
        raise
    if done:
        return running.result()
    trace = late()
    running.cancel()
    await asyncio.wait({running}, timeout=CANCEL_GRACE_SECONDS)
    return trace


def fault_of(error: Exception, boundary: str) -> Fault:
    """The Fault that an exception at a boundary stands for."""
    if isinstance(error, EngineError):
        return Fault(
            boundary="engine",
            kind="lost" if error.retryable else "refused",
            message=str(error),
            retryable=error.retryable,
        )
    if isinstance(error, VerifierError):
        return Fault(boundary="verifier", kind=error.kind, message=str(error))
    if isinstance(error, UserError) and boundary == "environment":
        return Fault(boundary="engine", kind="refused", message=str(error))
    message = str(error) if isinstance(error, HonedError) else repr(error)
    return Fault(boundary=boundary, kind="raised", message=message)


def lost(trace: Trace) -> bool:
    """Whether the attempt ended because the engine went away: it says nothing and is to be made again."""
    return trace.fault is not None and trace.fault.boundary == "engine" and trace.fault.retryable


def make_group(name: str, slot: int, task: Task, traces: Sequence[Trace]) -> Group:
    """The group of a slot, its traces ordered by attempt, whatever order they ended in."""
    ordered = sorted(traces, key=lambda trace: int(trace.tags["key"].rsplit("/", 1)[1]))
    return Group(id="group_" + codec.digest([name, slot])[:24], task=task.id, traces=tuple(ordered))


def seed_of(*parts: int) -> int:
    """A 31-bit seed from a path of numbers, well mixed and the same on every machine."""
    return int(codec.digest(list(parts))[:8], 16) & 0x7FFFFFFF


def _job(one: Callable[[int, int], Awaitable[None]], slot: int, number: int) -> Job:
    async def run() -> None:
        await one(slot, number)

    return run


def _with(blank: Trace, session: Session, *, fault: Fault | None) -> Trace:
    return msgspec.structs.replace(blank, turns=tuple(session.turns), fault=fault)


def _timed_out(blank: Trace, session: Session, limit: float) -> Trace:
    fault = Fault(boundary="environment", kind="timeout", message=f"no end after {limit:g} seconds")
    return _with(blank, session, fault=fault)


def _told(trace: Trace) -> dict[str, object]:
    if trace.fault is not None:
        return {"boundary": trace.fault.boundary, "kind": trace.fault.kind, "message": trace.fault.message}
    return {"score": trace.score.value if trace.score else None}
