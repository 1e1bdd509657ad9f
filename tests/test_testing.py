"""The conformance checks accept what keeps its promises and say in a sentence what does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.engine.scripted import ScriptedEngine, ScriptedSettings
from honed.errors import NotFound
from honed.protocols import Chunk, Outcome, Request, Sandbox, Session
from honed.sync.memory import MemoryChannel
from honed.testing import (
    RENDERER,
    FakeEngine,
    FakeEnvironment,
    FakeRuntime,
    VirtualClock,
    check_channel,
    check_engine,
    check_environment,
    fake_session,
    fake_task,
)
from honed.types import Message, Sampling, Task, Version

IDS = RENDERER.start([Message(role="user", content="refund 7 please")])


async def fake() -> FakeEngine:
    return FakeEngine({"refund": 0.5})


async def scripted() -> ScriptedEngine:
    return ScriptedEngine(ScriptedSettings(context=2048))


async def test_the_engines_of_the_house_pass() -> None:
    await check_engine(fake, IDS)
    await check_engine(scripted, IDS, versions=[Version(line="m", number=1), Version(line="m", number=2)])


class Deaf(FakeEngine):
    """Answers every version with the base model's weights."""

    def _require(self, version: str) -> dict[str, float]:
        return self.skills[""]


class Endless(FakeEngine):
    """Ignores stop ids and limits."""

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Too much."""
        async for chunk in super().submit(request):
            if chunk.finish is not None:
                yield Chunk(id=request.id, ids=(1,) * 9, logprobs=(0.0,) * 9, raw_logprobs=(0.0,) * 9)
            yield chunk


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [(Deaf, "a version that is not loaded must raise NotFound"), (Endless, "max_tokens = 4 gave")],
)
async def test_a_broken_engine_is_told_what_it_broke(engine: type[FakeEngine], sentence: str) -> None:
    async def make() -> FakeEngine:
        return engine({"refund": 0.5})

    with pytest.raises(AssertionError, match=sentence):
        await check_engine(make, IDS)


class Mailbox:
    """A channel that rounds to half precision, or not."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._kept = dtype, dict[str, dict[str, Any]]()

    async def publish(self, version: str, tensors: dict[str, Any]) -> None:
        self._kept[version] = {name: value.astype(self._dtype) for name, value in tensors.items()}

    async def fetch(self, version: str) -> dict[str, Any]:
        if version not in self._kept:
            raise NotFound(version)
        return self._kept[version]


async def test_channels_must_be_exact() -> None:
    tensors = [{"a": np.float32([0.1, -0.0, np.inf])}, {"a": np.float32([0.3])}]

    async def exact() -> Mailbox:
        return Mailbox("float32")

    async def rounding() -> Mailbox:
        return Mailbox("float16")

    await check_channel(exact, tensors)
    with pytest.raises(AssertionError, match="a changed on its way"):
        await check_channel(rounding, tensors)


def test_the_channel_of_the_house_is_a_channel() -> None:
    assert {"publish", "fetch"} <= set(dir(MemoryChannel))


def session() -> Session:
    return fake_session(
        FakeEngine({"refund": 0.5}), version="", trace="trace_1", line="m", sampling=Sampling(seed=1), origin="rollout"
    )


class Silent(FakeEnvironment):
    """Never asks."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome:
        """Nothing."""
        return Outcome()


class Swallows(FakeEnvironment):
    """Hides the model's errors."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome:
        """Catches everything."""
        try:
            return await super().run(task, session, sandbox)
        except Exception:
            return Outcome()


async def test_environments() -> None:
    await check_environment(FakeEnvironment, fake_task("refund 7"), session)
    with pytest.raises(AssertionError, match="never asked the model"):
        await check_environment(Silent, fake_task("refund 7"), session)
    with pytest.raises(AssertionError, match="the model's error must come out"):
        await check_environment(Swallows, fake_task("refund 7"), session)


async def test_the_virtual_clock_moves_only_by_sleeping() -> None:
    clock = VirtualClock(10.0)
    assert clock.now() == clock.now() == 10.0
    await clock.sleep(5.0)
    assert clock.now() == 15.0


async def test_a_fake_learner_trains_what_its_engine_serves() -> None:
    learner = await FakeRuntime(Path(), {"refund": 0.5}).learner()
    await learner.trainer.publish("m@0.1")
    assert (await learner.engine.status()).versions == ("m@0.1",)
