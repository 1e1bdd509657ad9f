"""Attempts: every way to break one is a fault on that one trace, masked and counted, and never a zero or a crash."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from honed.algo.grpo import Grpo
from honed.economics.meter import Meter
from honed.economics.prices import DevicePrice, PriceBook
from honed.env.verify import VerifierHost
from honed.errors import BadRequest, EngineError, StoreError, VerifierError
from honed.loop.rollout import Rollouts, is_flat, judged, seed_of
from honed.protocols import Chunk, Environment, Outcome, Request, Sandbox, Session
from honed.store import open_store
from honed.testing import FakeEngine, FakeEnvironment, FakeRuntime, FakeScorer, fake_sessions, fake_task, says_right
from honed.types import Group, Score, Task, Trace

from .road import LINE, rollouts_of

TASK = fake_task("refund order 7", split="train")


async def engine_of(skill: float = 0.5) -> tuple[Any, FakeEngine]:
    learner = await FakeRuntime(Path(), {"refund": skill}).learner()
    assert isinstance(learner.engine, FakeEngine)
    return learner, learner.engine


def with_scorer(rollouts: Rollouts, verifier: Callable[..., Any]) -> Rollouts:
    return Rollouts(**{**vars(rollouts), "scorer": FakeScorer(verifier)})


async def practise(rollouts: Rollouts, tasks: list[Task], num: int = 4) -> tuple[dict[int, Group], list[int]]:
    """The groups, and the slots in the order in which they were kept."""
    kept: list[int] = []

    async def keep(slot: int, group: Group) -> None:
        kept.append(slot)

    slots = dict(enumerate(tasks))
    return await rollouts.practise(slots, "", num, name="run/1", seed=3, keep=keep), kept


async def test_an_attempt_is_a_token_exact_trace_with_a_score() -> None:
    learner, _ = await engine_of(1.0)
    trace = await rollouts_of(learner).attempt(TASK, "", "key", seed=1, tags={"run": "r"})
    assert trace.score == Score(value=1.0, verifier="says_right", evidence="said 'right'")
    assert (trace.origin, trace.line, trace.task, trace.tags["run"]) == ("rollout", LINE, TASK.id, "r")
    (turn,) = trace.turns
    assert turn.trace == trace.id
    assert len(turn.output) == len(turn.logprobs) == len(b"right") + 1


async def test_the_same_key_and_seed_are_the_same_attempt() -> None:
    learner, _ = await engine_of()
    rollouts = rollouts_of(learner)
    one, again, other = [await rollouts.attempt(TASK, "", key, seed=5) for key in ("a", "a", "b")]
    assert one.id == again.id != other.id
    assert one.turns[0].output == again.turns[0].output


async def test_groups_are_complete_ordered_and_named_for_ever() -> None:
    learner, _ = await engine_of()
    tasks = [fake_task(f"refund order {i}", split="train") for i in range(3)]
    groups, kept = await practise(rollouts_of(learner, concurrency=5), tasks)
    again, _ = await practise(rollouts_of(learner, concurrency=1), tasks)
    assert list(groups) == [0, 1, 2]
    assert sorted(kept) == [0, 1, 2]
    assert [len(group.traces) for group in groups.values()] == [4, 4, 4]
    assert [g.id for g in groups.values()] == [g.id for g in again.values()]
    scores = [judged(group) for group in groups.values()]
    assert scores == [judged(group) for group in again.values()]
    assert any(not is_flat(group) for group in groups.values())


async def stuck(task: Task) -> None:
    if "3" in (task.prompt[0].content or ""):
        await asyncio.Event().wait()


async def test_a_stuck_attempt_ends_at_the_deadline_and_its_group_completes() -> None:
    learner, _ = await engine_of()
    tasks = [fake_task(f"refund order {i}", split="train") for i in range(4)]
    groups, _ = await practise(rollouts_of(learner, FakeEnvironment(stuck), timeout_seconds=0.2), tasks)
    faults = [trace.fault for trace in groups[3].traces]
    assert [(f.boundary, f.kind) for f in faults if f is not None] == [("environment", "timeout")] * 4
    assert all(trace.fault is None for slot in range(3) for trace in groups[slot].traces)
    assert not judged(groups[3])


async def test_the_batch_deadline_ends_stragglers_that_have_not_even_begun() -> None:
    learner, _ = await engine_of()
    tasks = [fake_task(f"refund order 3{i}", split="train") for i in range(2)]
    rollouts = rollouts_of(learner, FakeEnvironment(stuck), concurrency=1, batch_timeout_seconds=0.1)
    groups, _ = await practise(rollouts, tasks)
    assert {t.fault.kind for g in groups.values() for t in g.traces if t.fault} == {"timeout"}


async def test_an_attempt_that_ignores_its_cancellation_is_abandoned() -> None:
    learner, _ = await engine_of()
    release = asyncio.Event()

    async def deaf(task: Task) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                release.set()
                await asyncio.sleep(0)

    trace = await rollouts_of(learner, FakeEnvironment(deaf)).attempt(TASK, "", "k", timeout_seconds=0.05)
    assert trace.fault is not None
    assert trace.fault.kind == "timeout"


class Broken:
    """An environment that raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome:
        await session.reply(task.prompt)
        raise self._error


@pytest.mark.parametrize(
    ("error", "boundary", "kind"),
    [
        (RuntimeError("bang"), "environment", "raised"),
        (BadRequest("too long", param="messages"), "engine", "refused"),
        (EngineError("no"), "engine", "refused"),
    ],
)
async def test_what_an_environment_raises_is_a_fault_with_the_turns_so_far(
    error: Exception, boundary: str, kind: str
) -> None:
    learner, _ = await engine_of()
    trace = await rollouts_of(learner, Broken(error)).attempt(TASK, "", "k")
    assert trace.fault is not None
    assert (trace.fault.boundary, trace.fault.kind, trace.score) == (boundary, kind, None)
    assert len(trace.turns) == 1


async def _raises(*_: object) -> Score:
    raise RuntimeError("no")


async def _late(*_: object) -> Score:
    raise VerifierError("killed after 1 s", kind="timeout")


async def _nan(*_: object) -> Score:
    raise VerifierError("returned nan", kind="not_finite")


@pytest.mark.parametrize(("verifier", "kind"), [(_raises, "raised"), (_late, "timeout"), (_nan, "not_finite")])
async def test_a_verifier_that_raises_hangs_or_returns_nan_is_masked_and_never_a_zero(
    verifier: Callable[..., Awaitable[Score]], kind: str
) -> None:
    learner, _ = await engine_of()
    seen: list[str] = []

    async def sometimes(task: Task, trace: Trace, outcome: Outcome, sandbox: Sandbox | None) -> Score:
        seen.append(trace.id)
        return await verifier() if trace.tags["key"].endswith("/2") else says_right(task, trace, outcome, sandbox)

    whole, _ = await practise(rollouts_of(learner), [TASK], 8)
    masked, _ = await practise(with_scorer(rollouts_of(learner), sometimes), [TASK], 8)
    fault = masked[0].traces[2].fault
    assert fault is not None
    assert (fault.boundary, fault.kind) == ("verifier", kind)
    assert masked[0].traces[2].score is None
    without = Group(id="g", task=TASK.id, traces=tuple(t for i, t in enumerate(whole[0].traces) if i != 2))
    samples, expected = Grpo()([masked[0]]), Grpo()([without])
    assert len(samples) == len(expected) == 7
    for one, other in zip(samples, expected, strict=True):
        assert (one.weights == other.weights).all()
        assert one.advantages is not None
        assert (one.advantages == other.advantages).all()


async def test_a_lost_engine_is_asked_again() -> None:
    learner, engine = await engine_of()
    engine.broken = 2
    trace = await rollouts_of(learner).attempt(TASK, "", "k")
    assert trace.fault is None


async def test_groups_under_a_dead_engine_are_not_kept_and_the_others_are() -> None:
    learner, engine = await engine_of()
    tasks = [fake_task(f"refund order {i}", split="train") for i in range(3)]
    done = asyncio.Event()

    async def breaks(task: Task) -> None:
        if task == tasks[2]:
            engine.broken = 10**6

    kept: list[int] = []

    async def keep(slot: int, group: Group) -> None:
        kept.append(slot)
        done.set()

    rollouts = rollouts_of(learner, FakeEnvironment(breaks), concurrency=1, engine_retries=0)
    with pytest.raises(EngineError, match="the engine was lost under 1 groups") as caught:
        await rollouts.practise(dict(enumerate(tasks)), "", 2, name="r/1", seed=1, keep=keep)
    assert caught.value.retryable
    assert kept == [0, 1]


class Room:
    """A sandbox that knows whether it was closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True


async def test_the_sandbox_is_closed_whatever_happens() -> None:
    learner, _ = await engine_of()
    rooms: list[Room] = []

    async def room(task: Task) -> Any:
        rooms.append(Room())
        return rooms[-1]

    for environment in (FakeEnvironment(), Broken(RuntimeError()), FakeEnvironment(stuck)):
        rollouts = Rollouts(**{**vars(rollouts_of(learner, environment)), "sandbox": room})
        await rollouts.attempt(fake_task("refund 3"), "", "k", timeout_seconds=0.1)
    assert [one.closed for one in rooms] == [True] * 3


async def test_a_sandbox_that_does_not_come_up_is_a_fault_of_the_sandbox() -> None:
    learner, _ = await engine_of()

    async def none(task: Task) -> Any:
        raise OSError("no space left")

    trace = await Rollouts(**{**vars(rollouts_of(learner)), "sandbox": none}).attempt(TASK, "", "k")
    assert trace.fault is not None
    assert (trace.fault.boundary, trace.fault.kind) == ("sandbox", "raised")


async def test_spend_is_charged_by_what_became_of_it() -> None:
    learner, _ = await engine_of(1.0)  # always right: zero variance
    book = PriceBook(devices={"cpu-core": DevicePrice(dollars_per_hour=3600, basis="test")})
    meter = Meter(book, line=LINE)
    rollouts = dataclasses.replace(rollouts_of(learner), meter=meter)
    groups, _ = await practise(rollouts, [TASK], 4)
    rollouts.charge(groups[0])
    entries = [entry for entry in meter.drain() if entry.activity == "generate"]
    assert [entry.outcome for entry in entries] == ["zero_variance"] * 4
    assert all(entry.dollars == pytest.approx(0.001 * 6) for entry in entries)  # 6 tokens at 1 ms, a dollar a second


async def test_attempts_beside_a_lost_one_are_charged_though_their_group_is_not_kept() -> None:
    learner, engine = await engine_of()
    meter = Meter(PriceBook(), line=LINE)

    async def breaks(task: Task) -> None:
        engine.broken = 10**6 if len(engine.served) == 3 else 0

    rollouts = dataclasses.replace(
        rollouts_of(learner, FakeEnvironment(breaks), concurrency=1, engine_retries=0), meter=meter
    )
    for _ in range(2):  # the next try makes the same turns again, and they cost again
        engine.served.clear()
        with pytest.raises(EngineError):
            await practise(rollouts, [TASK], 4)
    entries = [entry for entry in meter.drain() if entry.activity == "generate"]
    assert [entry.outcome for entry in entries] == ["fault"] * 6
    assert len({entry.id for entry in entries}) == 6
    assert all(entry.tokens > 0 for entry in entries)


async def test_a_reply_that_a_deadline_cut_off_is_charged_its_tokens_and_has_no_price() -> None:
    learner, engine = await engine_of(1.0)
    meter, submit = Meter(PriceBook(), line=LINE), engine.submit

    async def hangs(request: Request) -> AsyncGenerator[Chunk, None]:
        count = 0
        async for chunk in submit(request):
            if (count := count + 1) == 4:
                await asyncio.Event().wait()
            yield chunk

    engine.submit = hangs  # type: ignore[method-assign]
    rollouts = dataclasses.replace(rollouts_of(learner), meter=meter)
    trace = await rollouts.attempt(TASK, "", "k", timeout_seconds=0.2)
    assert trace.fault is not None
    assert trace.fault.kind == "timeout"
    (entry,) = meter.drain()
    assert (entry.tokens, entry.outcome, entry.dollars, entry.subject) == (3, "fault", None, trace.id)


async def test_what_the_ledger_did_not_take_is_written_the_next_time(tmp_path: Path) -> None:
    learner, _ = await engine_of()
    meter = Meter(PriceBook(), line=LINE)
    rollouts = dataclasses.replace(rollouts_of(learner), meter=meter)
    meter.charge("train", 1.0)
    with open_store(None, tmp_path, busy_seconds=0.01) as store:
        with contextlib.closing(sqlite3.connect(tmp_path / "honed.db", isolation_level=None)) as blocker:
            blocker.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError):
                await rollouts.flush(store, "m@1")
        await rollouts.flush(store, "m@1")
        assert [(entry.seconds, entry.subject) for entry in store.ledger.list()] == [(1.0, "m@1")]


async def test_verifying_is_charged_by_what_each_verifier_took() -> None:
    learner, _ = await engine_of(1.0)
    meter, host = Meter(PriceBook(), line=LINE), VerifierHost(processes=2)
    rollouts = dataclasses.replace(rollouts_of(learner, Spinning()), meter=meter, scorer=host)
    task = msgspec.structs.replace(TASK, verifier="env.judges:spins")
    try:
        await practise(rollouts, [task], 8)
    finally:
        await host.close()
    seconds = [entry.seconds for entry in meter.drain() if entry.activity == "verify"]
    assert len(seconds) == 8
    assert min(seconds) >= 0.05
    assert statistics.median(seconds) < 0.1  # a child's first one imports the verifier as well


class Spinning(FakeEnvironment):
    """Its outcome asks the verifier to spin."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome:
        """One question, one answer."""
        outcome = await super().run(task, session, sandbox)
        return msgspec.structs.replace(outcome, state={"seconds": 0.05})


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3) != seed_of(1, 3, 2)
    assert 0 <= seed_of(0) < 2**31


def test_fakes_fill_the_slots() -> None:
    environment: Environment = FakeEnvironment()
    assert environment
    assert fake_sessions(FakeEngine(), LINE)
