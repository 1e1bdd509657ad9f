"""The one wire between honed's own processes: length-prefixed msgpack frames over a Unix socket (or TCP).

A frame is 4 bytes of length (big-endian) and msgpack [id, kind, name, payload]. Kinds: call, cancel (client to server);
item, result, error (server to client). A handler is a coroutine function (one result) or an async generator function
(items, then an empty result). Cancelling the client's wait cancels the handler. Not for strangers: the socket's folder
is private to the user, and nothing is authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from honed import codec, errors

T = TypeVar("T")
MAX_FRAME_BYTES = 1 << 30
FLUSH_SECONDS = 1.0
_ERRORS = {
    cls.__name__: cls
    for cls in (
        errors.BadRequest,
        errors.NotFound,
        errors.Refused,
        errors.ConfigError,
        errors.CorruptData,
        errors.StoreError,
    )
}


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """One message: `payload` is msgpack of its own, decoded by whoever knows its type."""

    id: int
    kind: str
    name: str
    payload: bytes


class Handler(msgspec.Struct, frozen=True):
    """A function and the type of its argument tuple."""

    function: Callable[..., Any]
    args: Any


def handler(function: Callable[..., Any]) -> Handler:
    """A Handler whose argument types are read from the function's annotations (methods: without self)."""
    signature = inspect.signature(function, eval_str=True)
    types = tuple(parameter.annotation for parameter in signature.parameters.values())
    return Handler(function, tuple[types] if types else tuple[()])  # type: ignore[valid-type]


class Server:
    """Serves handlers to any number of connections; ends its calls when a connection closes."""

    def __init__(self, handlers: dict[str, Callable[..., Any]]) -> None:
        self._handlers = {name: handler(function) for name, function in handlers.items()}
        self._server: asyncio.Server | None = None

    async def listen_unix(self, path: str) -> None:
        """Listens on a Unix socket at `path` (its folder must be private)."""
        self._server = await asyncio.start_unix_server(self._connected, path)

    async def close(self) -> None:
        """Stops listening; open connections end with the process."""
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                frame = await _read(reader)
                if frame.kind == "cancel":
                    if (running := calls.get(frame.id)) is not None:
                        running.cancel()
                    continue
                running = asyncio.create_task(self._answer(frame, writer))
                calls[frame.id] = running
                running.add_done_callback(functools.partial(_forget, calls, frame.id))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for running in list(calls.values()):
                running.cancel()
            writer.close()

    async def _answer(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        try:
            found = self._handlers.get(frame.name)
            if found is None:
                raise errors.NotFound(f"no such call: {frame.name}")
            args = codec.decode(frame.payload, found.args)
            if inspect.isasyncgenfunction(found.function):
                async with contextlib.aclosing(found.function(*args)) as items:
                    async for item in items:
                        await _write(writer, Frame(frame.id, "item", "", codec.encode(item)))
                result = None
            else:
                result = await found.function(*args)
            await _write(writer, Frame(frame.id, "result", "", codec.encode(result)))
        except ConnectionError:
            pass
        except Exception as error:  # the boundary: whatever a handler raises crosses the wire as an error frame
            with contextlib.suppress(ConnectionError):
                await _write(writer, Frame(frame.id, "error", "", codec.encode(_error_to_wire(error))))


class Client:
    """Calls a Server. When the other side goes away, every waiting call raises EngineError(retryable=True)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Frame | None]] = {}
        self._closed = False
        self._pump = asyncio.create_task(self._read_all(reader))

    @classmethod
    async def connect_unix(cls, path: str) -> Client:
        """Connects to a Server's Unix socket."""
        return cls(*await asyncio.open_unix_connection(path))

    @property
    def closed(self) -> bool:
        """Whether the other side has gone away."""
        return self._closed

    async def call(self, name: str, *args: Any, result: type[T] | Any = None) -> T | Any:
        """One call, one result, decoded as `result` (None: nothing comes back)."""
        async with contextlib.aclosing(self._exchange(name, args)) as frames:
            async for frame in frames:
                return None if result is None else codec.decode(frame.payload, result)
        raise _gone(name)

    async def stream(self, name: str, *args: Any, item: type[T]) -> AsyncGenerator[T, None]:
        """One call, many items. Leaving the loop early cancels the call on the other side."""
        async with contextlib.aclosing(self._exchange(name, args)) as frames:
            async for frame in frames:
                if frame.kind == "item":
                    yield codec.decode(frame.payload, item)

    async def close(self) -> None:
        """Hangs up."""
        self._pump.cancel()
        self._hang_up()
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), FLUSH_SECONDS)
        except (TimeoutError, ConnectionError):  # a stopped process reads nothing: what it was sent is dropped
            self._writer.transport.abort()

    async def _exchange(self, name: str, args: tuple[Any, ...]) -> AsyncGenerator[Frame, None]:
        if self._closed:
            raise _gone(name)
        id, done = next(self._ids), False
        queue: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._waiting[id] = queue
        try:
            try:
                await _write(self._writer, Frame(id, "call", name, codec.encode(args)))
            except ConnectionError as error:
                self._hang_up()  # the reader may learn of it later; whoever asks `closed` next must know now
                raise _gone(name) from error
            while not done:
                frame = await queue.get()
                if frame is None:
                    done = True
                    raise _gone(name)
                done = frame.kind in ("result", "error")
                if frame.kind == "error":
                    raise _error_from_wire(codec.decode(frame.payload, dict))
                yield frame
        finally:
            del self._waiting[id]
            if not done and not self._closed:
                with contextlib.suppress(ConnectionError):
                    self._writer.write(_pack(Frame(id, "cancel", name, b"")))

    async def _read_all(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await _read(reader)
                if (queue := self._waiting.get(frame.id)) is not None:
                    queue.put_nowait(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        self._closed = True
        for queue in self._waiting.values():
            queue.put_nowait(None)


def _forget(calls: dict[int, asyncio.Task[None]], id: int, _: asyncio.Task[None]) -> None:
    calls.pop(id, None)


def _gone(name: str) -> errors.EngineError:
    return errors.EngineError(f"the other process went away during {name!r}", retryable=True)


def _pack(frame: Frame) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(4, "big") + data


async def _write(writer: asyncio.StreamWriter, frame: Frame) -> None:
    writer.write(_pack(frame))
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Frame:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    data = await reader.readexactly(size)
    try:
        return msgspec.msgpack.decode(data, type=Frame)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"the other side does not speak this protocol: {error}") from error


def _error_to_wire(error: Exception) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
        "kind": getattr(error, "kind", ""),
        "status": getattr(error, "status", 400),
        "retryable": getattr(error, "retryable", False),
    }


def _error_from_wire(data: dict[str, Any]) -> Exception:
    if data["type"] == "BadRequest":
        return errors.BadRequest(data["message"], param=data["param"], code=data["code"], status=data["status"])
    if data["type"] == "VerifierError":
        return errors.VerifierError(data["message"], kind=data["kind"])
    if data["type"] in _ERRORS:
        return _ERRORS[data["type"]](data["message"])
    name = "" if data["type"] == "EngineError" else f"{data['type']}: "
    return errors.EngineError(name + data["message"], retryable=data["retryable"])
