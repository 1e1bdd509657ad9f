"""POST /v1/chat/completions, OpenAI's shape, streamed or whole. The response's id is the Turn's id: the receipt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from honed.api.body import CLIENT_GONE, read_object
from honed.api.errors import response_of
from honed.api.gateway import Decode, Gateway
from honed.api.requests import flag, read_call, wants_usage
from honed.clock import new_id
from honed.errors import BadRequest, EngineError, NotFound
from honed.protocols import Call, Delta
from honed.types import Turn

T = TypeVar("T")
SSE_END = b"data: [DONE]\n\n"


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """One completion. A streamed one goes on running while its events are sent."""
    with gateway.meters.running.track_inprogress():
        return await _answer(gateway, request)


async def _answer(gateway: Gateway, request: Request) -> Response:
    """The version is decided, and id and headers are fixed, before the first token is sampled."""
    body = await read_object(request)
    call = read_call(body, new_id("chatcmpl-"), default_max_tokens=gateway.settings.max_tokens)
    fleet = gateway.fleet
    serving = fleet.version_of(call.line)  # an unknown line is refused before a pin is looked at
    version = serving if call.version is None else fleet.pinned(call.version)
    tags = dict(call.tags)
    if session := request.headers.get("x-honed-session"):
        tags["session"] = session[:512]
    is_streamed, usage, logprobs = flag(body, "stream"), wants_usage(body), flag(body, "logprobs")
    is_pinned = call.version is not None
    call = msgspec.structs.replace(call, version=version, tags=tags)
    started = time.monotonic()
    deltas = gateway.model.stream(call)
    try:
        first = await _unless_gone(request, anext(deltas))  # an error before anything was said has its own status
    except NotFound as error:
        if is_pinned:
            raise
        raise EngineError(f"the engine does not hold what serves: {error}", retryable=True) from error
    gateway.meters.first_token.observe(time.monotonic() - started)
    reply = _Reply(call, first, logprobs, gateway.decode)
    if is_streamed:
        return _Events(gateway, reply, deltas, usage)
    await _unless_gone(request, _collect(reply, deltas))
    _count(gateway, reply)
    return JSONResponse(reply.whole(), headers=reply.whole_headers)


async def _collect(reply: _Reply, deltas: AsyncGenerator[Delta, None]) -> None:
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            reply.add(delta)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it when the client hangs up first: nobody reads what would still be sampled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise BadRequest("the client hung up.", code="client_gone", status=CLIENT_GONE)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Events(StreamingResponse):
    """A reply as server-sent events. Its source is closed whatever happens, even if the client left before the first
    event, when nothing would have begun to read it."""

    def __init__(self, gateway: Gateway, reply: _Reply, deltas: AsyncGenerator[Delta, None], usage: bool) -> None:
        self._running, self._deltas = gateway.meters.running, deltas
        self._events = _stream(gateway, reply, deltas, usage)
        super().__init__(self._events, media_type="text/event-stream", headers=reply.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._running.track_inprogress():
            async with contextlib.aclosing(self._deltas), contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)


async def _stream(
    gateway: Gateway, reply: _Reply, deltas: AsyncGenerator[Delta, None], usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. The turn is in the capture log before the event that ends the reply leaves."""
    try:
        async with contextlib.aclosing(deltas):
            yield reply.event({"role": "assistant", "content": ""})
            if reply.first.turn is None:
                yield reply.event({"content": reply.first.text}, reply.first)
            async for delta in deltas:
                reply.add(delta)
                if delta.text or delta.ids:
                    yield reply.event({"content": delta.text}, delta)
        turn = reply.turn
        _count(gateway, reply)
        if turn.reply.tool_calls:
            yield reply.event({"tool_calls": [{"index": i, **call} for i, call in enumerate(_calls(turn))]})
        yield reply.event({}, finish=_finish(turn))
        if usage:
            yield _sse({**reply.head("chat.completion.chunk"), "choices": [], "usage": _usage(turn)})
        yield SSE_END
    except Exception as error:  # the status is sent already: the error is the stream's last event
        yield b"data: " + bytes(response_of(error).body) + b"\n\n"


class _Reply:
    """A reply as it grows, and its shapes on the wire."""

    def __init__(self, call: Call, first: Delta, logprobs: bool, decode: Decode | None) -> None:
        self.call, self.first, self._logprobs, self._decode = call, first, logprobs, decode
        self._created = int(time.time())
        self._turn, self.malformed = first.turn, first.malformed
        self._tokens: list[dict[str, Any]] = self._entries(first)
        self._prompt = first.prompt
        self.headers = {"x-honed-version": call.version or "", "x-honed-turn": call.id, "x-honed-trace": first.trace}

    @property
    def turn(self) -> Turn:
        """The finished turn."""
        assert self._turn is not None
        return self._turn

    @property
    def whole_headers(self) -> dict[str, str]:
        """Headers of a whole reply."""
        return {**self.headers, "x-honed-trace": self.turn.trace}

    def add(self, delta: Delta) -> None:
        """Takes a further delta."""
        self._turn, self.malformed = delta.turn or self._turn, self.malformed + delta.malformed
        self._tokens += self._entries(delta)

    def head(self, kind: str) -> dict[str, Any]:
        """What every object of this reply begins with."""
        served = self.call.version or self.call.line  # as OpenAI names the snapshot behind the name that was asked
        return {"id": self.call.id, "object": kind, "created": self._created, "model": served}

    def whole(self) -> dict[str, Any]:
        """A chat.completion object."""
        turn = self.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.reply.content}
        if turn.reply.tool_calls:
            message["tool_calls"] = _calls(turn)
        choice = {"index": 0, "message": message, "finish_reason": _finish(turn), "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = {"content": self._tokens, "refusal": None}
        whole = {**self.head("chat.completion"), "choices": [choice], "usage": _usage(turn)}
        return {**whole, "prompt_logprobs": self._scores()} if self._prompt else whole

    def event(self, piece: dict[str, Any], delta: Delta | None = None, finish: str | None = None) -> bytes:
        """A chat.completion.chunk as an event."""
        choice: dict[str, Any] = {"index": 0, "delta": piece, "finish_reason": finish}
        if self._logprobs and delta is not None:
            choice["logprobs"] = {"content": self._entries(delta), "refusal": None}
        return _sse({**self.head("chat.completion.chunk"), "choices": [choice]})

    def _entries(self, delta: Delta) -> list[dict[str, Any]]:
        """OpenAI's per-token entries."""
        if not self._logprobs:
            return []
        rows = []
        for index, (id, logprob) in enumerate(zip(delta.ids, delta.raw_logprobs, strict=True)):
            top = delta.top[index] if index < len(delta.top) else ()
            rows.append({**self._token(id, logprob), "top_logprobs": [self._token(*other) for other in top]})
        return rows

    def _scores(self) -> list[dict[str, Any] | None]:
        """The prompt's tokens in vLLM's shape: one entry a token, by its id; nothing precedes the first."""
        return [
            None
            if logprob is None
            else {
                str(id): {
                    "logprob": max(logprob, -9999.0),
                    "rank": None,
                    "decoded_token": self._decode((id,)) if self._decode is not None else None,
                }
            }
            for id, logprob in self._prompt
        ]

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        """A token that is no whole text by itself (a piece of a character) is named by its id."""
        text = self._decode((id,)) if self._decode is not None else "\ufffd"
        is_text = "\ufffd" not in text
        return {
            "token": text if is_text else f"token_id:{id}",
            "logprob": max(logprob, -9999.0),
            "bytes": list(text.encode()) if is_text else None,
        }


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.reply.tool_calls
    ]


def _finish(turn: Turn) -> str:
    return turn.finish if turn.finish in ("stop", "length", "tool_calls") else "stop"


def _usage(turn: Turn) -> dict[str, Any] | None:
    """None where the engine reported none: unknown usage never becomes 0."""
    usage = turn.usage
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _count(gateway: Gateway, reply: _Reply) -> None:
    gateway.meters.malformed.inc(reply.malformed)
    if (usage := reply.turn.usage) is not None:
        tokens = gateway.meters.tokens
        tokens.labels("prompt").inc(usage.prompt - usage.cached)
        tokens.labels("cached").inc(usage.cached)
        tokens.labels("output").inc(usage.output)
