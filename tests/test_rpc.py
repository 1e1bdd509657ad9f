import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed import rpc
from honed.errors import (
    BadRequest,
    ConfigError,
    CorruptData,
    EngineError,
    HonedError,
    NotFound,
    Refused,
    StoreError,
    VerifierError,
)
from honed.types import Message


class Service:
    """Handlers that note what becomes of them."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.ended = 0

    async def add(self, left: int, right: int) -> int:
        return left + right

    async def nothing(self) -> None:
        return None

    async def shout(self, message: Message) -> Message:
        return Message(role=message.role, content=(message.content or "").upper())

    async def double(self, values: np.ndarray) -> dict[str, np.ndarray]:
        return {"values": values * 2}

    async def count(self, num: int) -> AsyncIterator[int]:
        for i in range(num):
            yield i

    async def endless(self) -> AsyncIterator[int]:
        try:
            for i in range(10**9):
                yield i
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()

    async def hang(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def fail(self, kind: str) -> None:
        raise FAILURES[kind]

    async def fail_midway(self) -> AsyncIterator[int]:
        yield 1
        raise NotFound("the second item")

    def handlers(self) -> dict[str, Any]:
        names = ["add", "nothing", "shout", "double", "count", "endless", "hang", "fail", "fail_midway"]
        return {name: getattr(self, name) for name in names}


FAILURES: dict[str, Exception] = {
    "bad": BadRequest("too hot", param="temperature", code="range", status=422),
    "missing": NotFound("no such thing"),
    "refused": Refused("it would lose data"),
    "config": ConfigError("a key"),
    "corrupt": CorruptData("a file"),
    "store": StoreError("a lock"),
    "engine": EngineError("a child died", retryable=True),
    "engine_final": EngineError("refused"),
    "verifier": VerifierError("not a number", kind="not_finite"),
    "surprise": ZeroDivisionError("division by zero"),
}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[tuple[Service, rpc.Client]]:
    """A Service behind a real Unix socket, and a Client of it."""
    service = Service()
    server = rpc.Server(service.handlers())
    await server.listen_unix(str(tmp_path / "s"))
    client = await rpc.Client.connect_unix(str(tmp_path / "s"))
    yield service, client
    await client.close()
    await server.close()


Pair = tuple[Service, rpc.Client]


async def test_calls(service: Pair) -> None:
    _, client = service
    assert await client.call("add", 2, 3, result=int) == 5
    assert await client.call("nothing") is None
    assert (await client.call("shout", Message(role="user", content="hi"), result=Message)).content == "HI"
    found = await client.call("double", np.array([1.5], np.float32), result=dict[str, np.ndarray])
    assert found["values"].tolist() == [3.0]


async def test_calls_at_once_do_not_mix(service: Pair) -> None:
    _, client = service
    found = await asyncio.gather(*(client.call("add", i, 1, result=int) for i in range(50)))
    assert found == list(range(1, 51))


async def test_streams(service: Pair) -> None:
    _, client = service
    assert [i async for i in client.stream("count", 3, item=int)] == [0, 1, 2]
    assert [i async for i in client.stream("count", 0, item=int)] == []
    assert [i async for i in client.stream("count", 2000, item=int)] == list(range(2000))


async def test_leaving_a_stream_early_cancels_its_handler(service: Pair) -> None:
    served, client = service
    async with contextlib.aclosing(client.stream("endless", item=int)) as items:
        async for item in items:
            if item == 3:
                break
    await served.cancelled.wait()
    assert await client.call("add", 1, 1, result=int) == 2


async def test_a_plain_break_cancels_the_handler_too(service: Pair) -> None:
    served, client = service
    async for item in client.stream("endless", item=int):
        if item == 3:
            break
    await served.cancelled.wait()


async def test_cancelling_a_call_cancels_its_handler(service: Pair) -> None:
    served, client = service
    waiting = asyncio.create_task(client.call("hang"))
    await served.started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await served.cancelled.wait()
    assert await client.call("add", 1, 1, result=int) == 2


async def test_hanging_up_cancels_what_runs(service: Pair) -> None:
    served, client = service
    waiting = asyncio.create_task(client.call("hang"))
    await served.started.wait()
    await client.close()
    with pytest.raises(EngineError):
        await waiting
    await served.cancelled.wait()
    assert client.closed
    with pytest.raises(EngineError) as caught:
        await client.call("nothing")
    assert caught.value.retryable


@pytest.mark.parametrize("kind", ["bad", "missing", "refused", "config", "corrupt", "store"])
async def test_errors_keep_their_type_and_words(service: Pair, kind: str) -> None:
    with pytest.raises(HonedError) as caught:
        await service[1].call("fail", kind)
    assert type(caught.value) is type(FAILURES[kind])
    assert str(caught.value) == str(FAILURES[kind])


async def test_a_bad_request_keeps_its_particulars(service: Pair) -> None:
    with pytest.raises(BadRequest) as caught:
        await service[1].call("fail", "bad")
    assert (caught.value.param, caught.value.code, caught.value.status) == ("temperature", "range", 422)


async def test_an_engine_error_keeps_whether_to_ask_again(service: Pair) -> None:
    for kind, retryable in (("engine", True), ("engine_final", False)):
        with pytest.raises(EngineError) as caught:
            await service[1].call("fail", kind)
        assert caught.value.retryable is retryable


async def test_a_verifier_error_keeps_its_kind(service: Pair) -> None:
    with pytest.raises(VerifierError, match="not a number") as caught:
        await service[1].call("fail", "verifier")
    assert caught.value.kind == "not_finite"


async def test_any_other_error_arrives_with_its_name(service: Pair) -> None:
    with pytest.raises(EngineError, match="ZeroDivisionError: division by zero") as caught:
        await service[1].call("fail", "surprise")
    assert not caught.value.retryable


async def test_a_stream_that_fails_midway_gives_what_it_had(service: Pair) -> None:
    items = service[1].stream("fail_midway", item=int)
    assert await anext(items) == 1
    with pytest.raises(NotFound, match="the second item"):
        await anext(items)


async def test_unknown_calls_and_wrong_arguments_are_errors_of_that_call_only(service: Pair) -> None:
    _, client = service
    with pytest.raises(NotFound, match="no such call: nosuch"):
        await client.call("nosuch")
    with pytest.raises(CorruptData):
        await client.call("add", "one", 2, result=int)
    with pytest.raises(CorruptData):
        await client.call("add", 1, result=int)
    with pytest.raises(TypeError, match="cannot encode"):
        await client.call("count", object())
    assert await client.call("add", 1, 1, result=int) == 2


async def test_a_frame_over_the_limit_ends_the_connection(tmp_path: Path, service: Pair) -> None:
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    writer.write((rpc.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    assert await reader.read() == b""
    writer.close()


async def test_junk_ends_its_own_connection_only(tmp_path: Path, service: Pair) -> None:
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    writer.write((4).to_bytes(4, "big") + b"junk")
    assert await reader.read() == b""
    writer.close()
    assert await service[1].call("add", 1, 1, result=int) == 2


SERVE = """
import asyncio, sys
from collections.abc import AsyncIterator
from honed import rpc
async def hang() -> None:
    print("called", flush=True)
    await asyncio.Event().wait()
async def drip() -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()
async def main():
    server = rpc.Server({"hang": hang, "drip": drip})
    await server.listen_unix(sys.argv[1])
    print("listening", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_server_that_is_killed_ends_every_wait_with_a_retryable_error(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(tmp_path / "s"), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert await child.stdout.readline() == b"listening\n"
        client = await rpc.Client.connect_unix(str(tmp_path / "s"))
        waiting = asyncio.create_task(client.call("hang"))
        items = client.stream("drip", item=int)
        assert await anext(items) == 1
        assert await child.stdout.readline() == b"called\n"
        child.kill()
        for gone in (waiting, anext(items), client.call("hang")):
            with pytest.raises(EngineError, match="went away") as caught:
                await gone
            assert caught.value.retryable
        assert client.closed
        await client.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


class BrokenWriter:
    """A StreamWriter whose other end is gone, before the reader has noticed."""

    def write(self, data: bytes) -> None:
        """Takes anything."""

    async def drain(self) -> None:
        """Fails as a broken pipe does."""
        raise BrokenPipeError

    def close(self) -> None:
        """Nothing to close."""

    async def wait_closed(self) -> None:
        """Closed at once."""


async def test_a_write_that_fails_closes_the_client_before_its_reader_notices() -> None:
    client = rpc.Client(asyncio.StreamReader(), BrokenWriter())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="went away") as caught:
        await client.call("anything")
    assert caught.value.retryable
    assert client.closed
    await client.close()
