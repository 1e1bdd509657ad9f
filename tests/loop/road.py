"""A line with fakes on a real store: what the loop's tests share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from honed.algo.grpo import Grpo
from honed.algo.sft import Sft
from honed.loop.capture import CaptureSettings
from honed.loop.curate import CurateSettings
from honed.loop.gate import GateSettings
from honed.loop.lessons import LearnSettings, Phase
from honed.loop.rollout import Rollouts, RolloutSettings
from honed.loop.turn import Loop
from honed.protocols import Environment, Learner
from honed.store import Store, open_store
from honed.testing import (
    RENDERER,
    FakeEngine,
    FakeEnvironment,
    FakeRuntime,
    FakeScorer,
    VirtualClock,
    fake_session,
    fake_sessions,
    fake_task,
    make_fake_task,
)
from honed.types import Feedback, Message, Sampling, Task, Trace

LINE = "support"


def rollouts_of(learner: Learner, environment: Environment | None = None, **settings: object) -> Rollouts:
    environment = environment or FakeEnvironment()
    return Rollouts(
        line=LINE,
        sessions=fake_sessions(learner.engine, LINE),
        environments=lambda name: environment,
        scorer=FakeScorer(),
        gather=FakeRuntime(Path()).gather,
        settings=RolloutSettings(**settings),  # type: ignore[arg-type]
    )


def make_loop(folder: Path, base: dict[str, float] | None = None, **changes: object) -> Loop:
    """A loop whose base model is at 60 % in "order" and at 20 % in "refund"."""
    store = open_store(None, folder)
    runtime = FakeRuntime(folder / "blobs", base or {"order": 0.6, "refund": 0.2})
    loop = Loop(
        line=LINE,
        store=store,
        runtime=runtime,
        rollouts=rollouts_of,
        sft=Phase(algorithm=Sft(), learning_rate=1e-3, batch_size=4),
        practice=Phase(algorithm=Grpo(), learning_rate=1e-3),
        maker=make_fake_task,
        renderer=RENDERER,
        capture=CaptureSettings(min_failures=4),
        curate=CurateSettings(probe_attempts=4),
        learn=LearnSettings(steps=3, groups_per_step=4, group_size=4),
        gate=GateSettings(target_suites=("refunds",), guard_suites=("orders",), margin=0.3, hoped_gain=0.5),
        recipe="recipe-1",
        clock=VirtualClock(),
    )
    return dataclasses.replace(loop, **changes)


def holdout(num: int = 40) -> list[Task]:
    """Held-out tasks: `num` refunds and as many orders."""
    return [
        fake_task(f"{kind} sealed case {i}", suite=suite, split="holdout")
        for kind, suite in (("refund", "refunds"), ("order", "orders"))
        for i in range(num)
    ]


async def traffic(store: Store, engine: FakeEngine, texts: list[str], *, version: str, at: float) -> list[Trace]:
    """Production conversations with their success as feedback; one failure in two carries the correction."""
    traces = []
    for index, text in enumerate(texts):
        names = {"version": version, "trace": f"trace_{version}_{index}", "line": LINE}
        session = fake_session(engine, **names, sampling=Sampling(seed=index), origin="production")
        turn = await session.reply((Message(role="user", content=text),))
        trace = Trace(
            id=session.trace,
            origin="production",
            line=LINE,
            turns=tuple(msgspec.structs.replace(t, at=at + index) for t in session.turns),
            at=at + index,
        )
        store.traces.put(trace)
        good = turn.reply.content == "right"
        rows = [Feedback(id=f"fb_{trace.id}", target=turn.id, name="success", value=good, at=at + index)]
        if not good and index % 2 == 0:
            shown = [{"role": "assistant", "content": "right"}]
            rows.append(
                Feedback(
                    id=f"co_{trace.id}",
                    target=turn.id,
                    name="correction",
                    kind="correction",
                    value=shown,
                    at=at + index,
                )
            )
        store.feedback.add(rows)
        traces.append(trace)
    return traces


async def failing_line(folder: Path, num: int = 48, **changes: object) -> Loop:
    """A loop with held-out tasks and traffic in which refunds mostly fail."""
    loop = make_loop(folder, **changes)
    loop.store.tasks.put(holdout())
    assert isinstance(loop.runtime, FakeRuntime)
    engine = FakeEngine(loop.runtime.base)
    texts = [f"{'refund' if i % 2 else 'order'} please number {i} item {i * 7}" for i in range(num)]
    await traffic(loop.store, engine, texts, version=f"{LINE}@0", at=999_000.0)
    return loop
