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
from honed.testing import check_engine
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


async def test_a_child_that_is_stopped_is_replaced_and_what_it_ran_fails_as_retryable(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    engine = process_of(tmp_path_factory.mktemp("e"), script={"stall_seconds": 1.6})
    await engine.start()
    await engine.load(version(1))
    ids = tuple(RENDERER.start((Message(role="user", content="x" * 2000),)))
    chunks = engine.submit(Request(id="r", ids=ids, sampling=Sampling(max_tokens=2000, stop_ids=(257,))))
    await anext(chunks)
    stopped = engine.pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(EngineError) as caught:
        async for _ in chunks:
            pass
    assert caught.value.retryable
    assert (await TokenModel(engine, RENDERER).reply(call("t1"))).reply.content == "one"
    assert (engine.num_restarts, engine.pid != stopped) == (1, True)
    await engine.close()


async def test_a_request_to_a_stopped_child_is_answered_by_the_next_one(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    engine = process_of(tmp_path_factory.mktemp("e"), script={"stall_seconds": 1.6})
    await engine.start()
    os.kill(engine.pid, signal.SIGSTOP)
    assert (await TokenModel(engine, RENDERER).reply(call("t1", ""))).reply.content == "base"
    await engine.close()


async def test_a_stopped_child_does_not_hold_up_the_end(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    engine = process_of(tmp_path_factory.mktemp("e"))
    await engine.start()
    os.kill(engine.pid, signal.SIGSTOP)
    asked = [
        asyncio.create_task(engine.logprobs([1] * 500_000, "")) for _ in range(4)
    ]  # more than the socket's buffer holds
    await asyncio.sleep(0.05)
    await engine.close()
    for task in asked:
        with pytest.raises(EngineError):
            await task


async def test_a_child_whose_thread_hangs_in_a_step_is_replaced(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("e")
    (folder / "hang").touch()
    engine = EngineProcess(
        str(folder / "hang"), {"stall_seconds": 1.6}, folder=folder / "run", log_path=folder / "e.log",
        module="engine.hanging_worker", backoff_seconds=0.01,
        environment={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    await engine.start()
    request = Request(id="r", ids=tuple(RENDERER.start(ASK)), sampling=Sampling(max_tokens=4))
    with pytest.raises(EngineError) as caught:
        await anext(engine.submit(request))
    assert caught.value.retryable
    assert [chunk async for chunk in engine.submit(request)][-1].finish == "length"
    assert engine.num_restarts == 1
    await engine.close()


async def test_sixteen_requests_that_run_when_the_child_is_killed_all_end(engine: EngineProcess) -> None:
    """Each with an answer or an error that says to ask again; none waits for ever, and the next one is served."""
    await engine.load(version(1))
    model = TokenModel(engine, RENDERER)
    asks = [
        Call(
            id=f"t{number}", messages=(Message(role="user", content="y" * 300),), version="support@0",
            sampling=Sampling(max_tokens=400), line="support",
        )
        for number in range(16)
    ]  # fmt: skip
    running = [asyncio.create_task(model.reply(ask)) for ask in asks]
    while (await engine.status()).running < 16:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    os.kill(engine.pid, signal.SIGKILL)
    ended = await asyncio.gather(*running, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            assert isinstance(each, EngineError)
            assert each.retryable
        else:
            assert each.reply.content == "y" * 300
    assert any(isinstance(each, EngineError) for each in ended)
    assert (await model.reply(call("last"))).reply.content == "one"


async def test_the_process_keeps_every_promise_of_an_engine(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    async def make() -> EngineProcess:
        made = process_of(tmp_path_factory.mktemp("e"))
        await made.start()
        return made

    await check_engine(make, RENDERER.start(ASK), versions=[version(1), version(2)])
