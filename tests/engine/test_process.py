"""EngineProcess over a real child: its death is a typed error, and the next child holds the same versions first."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from honed.engine.process import EngineProcess
from honed.engine.scripted import ByteRenderer
from honed.engine.token_model import TokenModel
from honed.errors import CorruptData, EngineError, NotFound
from honed.protocols import Call, Request
from honed.types import Message, Sampling, Version

RENDERER = ByteRenderer()
ASK = (Message(role="user", content="hello"),)
SCRIPT = {"replies": {"": "base", "support@1": "one"}, "corrupt": ["support@9"], "delay_seconds": 0.001}


def process_of(folder: Path, **more: object) -> EngineProcess:
    settings = {**SCRIPT, **more.pop("script", {})}  # type: ignore[dict-item]
    return EngineProcess(
        "scripted", settings, folder=folder / "run", log_path=folder / "log" / "e.log", backoff_seconds=0.01, **more
    )  # type: ignore[arg-type]


@pytest.fixture
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    process = process_of(tmp_path_factory.mktemp("e"))
    await process.start()
    yield process
    await process.close()


def version(number: int) -> Version:
    return Version(line="support", number=number, uri="scripted", digest="d")


def call(id: str, version: str = "support@1") -> Call:
    return Call(id=id, messages=ASK, sampling=Sampling(max_tokens=64), line="support", version=version)


async def test_the_child_answers_and_refuses_as_the_engine_itself_does(engine: EngineProcess) -> None:
    model = TokenModel(engine, RENDERER)
    assert (await model.reply(call("t1", ""))).reply.content == "base"
    await engine.load(version(1))
    assert (await model.reply(call("t2"))).reply.content == "one"
    with pytest.raises(NotFound):
        await model.reply(call("t3", "support@2"))
    with pytest.raises(CorruptData, match="support@9"):
        await engine.load(version(9))
    assert (await engine.status()).versions == ("support@1",)
    assert (await engine.status()).pid == engine.pid


async def test_a_killed_child_fails_what_runs_with_a_retryable_error(engine: EngineProcess) -> None:
    ids = tuple(RENDERER.start((Message(role="user", content="x" * 2000),)))
    chunks = engine.submit(Request(id="r", ids=ids, sampling=Sampling(max_tokens=2000, stop_ids=(257,))))
    await anext(chunks)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        async for _ in chunks:
            pass
    assert caught.value.retryable


async def test_after_every_kill_the_next_answer_is_the_released_version_s_and_never_the_base_s(
    engine: EngineProcess,
) -> None:
    await engine.load(version(1))
    model = TokenModel(engine, RENDERER)
    for number in range(3):
        old = engine.pid
        os.kill(old, signal.SIGKILL)
        turns = await asyncio.gather(*(model.reply(call(f"t{number}.{each}")) for each in range(4)))
        assert {turn.reply.content for turn in turns} == {"one"}
        assert {span.version for turn in turns for span in turn.versions} == {"support@1"}
        assert engine.pid != old
    assert engine.num_restarts == 3


async def test_an_unloaded_version_does_not_come_back_with_the_next_child(engine: EngineProcess) -> None:
    await engine.load(version(1))
    await engine.load(version(2))
    await engine.unload("support@1")
    os.kill(engine.pid, signal.SIGKILL)
    await TokenModel(engine, RENDERER).reply(call("t1", "support@2"))
    assert (await engine.status()).versions == ("support@2",)


async def test_a_child_that_never_stays_up_is_given_up_with_the_end_of_its_log(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    engine = process_of(tmp_path_factory.mktemp("e"), max_crashes=1)
    await engine.start()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="stays down") as caught:
        await TokenModel(engine, RENDERER).reply(call("t1", ""))
    assert not caught.value.retryable
    await engine.close()


async def test_a_child_that_does_not_start_says_why(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    engine = process_of(tmp_path_factory.mktemp("e"), script={"colour": "red"})
    with pytest.raises(EngineError, match="colour"):
        await engine.start()
    await engine.close()
