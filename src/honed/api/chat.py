"""POST /v1/chat/completions, OpenAI's shape, streamed or whole. The response's id is the Turn's id: the receipt."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from honed.api.errors import response_of
from honed.api.gateway import Gateway
from honed.api.requests import read_call
from honed.clock import new_id
from honed.errors import BadRequest, HonedError
from honed.protocols import Call, Delta
from honed.types import Turn

SSE_END = b"data: [DONE]\n\n"


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """One completion. The version is decided, and id and headers are fixed, before the first token is sampled."""
    body = await read_json(request)
    call = read_call(body, new_id("chatcmpl-"), default_max_tokens=gateway.settings.max_tokens)
    fleet = gateway.fleet
    serving = fleet.version_of(call.line)  # an unknown line is refused before a pin is looked at
    version = serving if call.version is None else fleet.pinned(call.version)
    tags = dict(call.tags)
    if session := request.headers.get("x-honed-session"):
        tags["session"] = session[:512]
    call = msgspec.structs.replace(call, version=version, tags=tags)
    started = time.monotonic()
    deltas = gateway.model.stream(call)
    first = await anext(deltas)  # errors that come before anything was said have a status of their own
    gateway.meters.first_token.observe(time.monotonic() - started)
    reply = _Reply(call, first, bool(body.get("logprobs")))
    if body.get("stream"):
        options = body.get("stream_options") or {}
        events = _stream(gateway, reply, deltas, bool(options.get("include_usage")))
        return StreamingResponse(events, media_type="text/event-stream", headers=reply.headers)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            reply.add(delta)
    _count(gateway, reply.turn)
    return JSONResponse(reply.whole(), headers=reply.whole_headers)


async def read_json(request: Request) -> dict[str, Any]:
    """The request's body as an object. Raises BadRequest for anything else."""
    try:
        body = json.loads(await request.body())
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object.", code="invalid_json")
    return body


async def _stream(
    gateway: Gateway, reply: _Reply, deltas: AsyncGenerator[Delta, None], usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. The turn is in the capture log before the event that ends the reply leaves."""
    gateway.meters.running.inc()
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
        _count(gateway, turn)
        if turn.reply.tool_calls:
            yield reply.event({"tool_calls": [{"index": i, **call} for i, call in enumerate(_calls(turn))]})
        yield reply.event({}, finish=_finish(turn))
        if usage:
            yield _sse({**reply.head("chat.completion.chunk"), "choices": [], "usage": _usage(turn)})
        yield SSE_END
    except HonedError as error:  # the status is sent already: the error is the stream's last event
        yield b"data: " + bytes(response_of(error).body) + b"\n\n"
    finally:
        gateway.meters.running.dec()


class _Reply:
    """A reply as it grows, and its shapes on the wire."""

    def __init__(self, call: Call, first: Delta, logprobs: bool) -> None:
        self.call, self.first, self._logprobs = call, first, logprobs
        self._created = int(time.time())
        self._turn = first.turn
        self._tokens: list[dict[str, Any]] = _tokens(first)
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
        self._turn = delta.turn or self._turn
        self._tokens += _tokens(delta)

    def head(self, kind: str) -> dict[str, Any]:
        """What every object of this reply begins with."""
        return {"id": self.call.id, "object": kind, "created": self._created, "model": self.call.line}

    def whole(self) -> dict[str, Any]:
        """A chat.completion object."""
        turn = self.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.reply.content}
        if turn.reply.tool_calls:
            message["tool_calls"] = _calls(turn)
        choice = {"index": 0, "message": message, "finish_reason": _finish(turn), "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = {"content": self._tokens, "refusal": None}
        return {**self.head("chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def event(self, piece: dict[str, Any], delta: Delta | None = None, finish: str | None = None) -> bytes:
        """A chat.completion.chunk as an event."""
        choice: dict[str, Any] = {"index": 0, "delta": piece, "finish_reason": finish}
        if self._logprobs and delta is not None:
            choice["logprobs"] = {"content": _tokens(delta), "refusal": None}
        return _sse({**self.head("chat.completion.chunk"), "choices": [choice]})


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _tokens(delta: Delta) -> list[dict[str, Any]]:
    """OpenAI's per-token entries. A token is named by its id where its text is not known alone."""
    rows = []
    for index, (id, logprob) in enumerate(zip(delta.ids, delta.logprobs, strict=True)):
        top = delta.top[index] if index < len(delta.top) else ()
        rows.append({**_token(id, logprob), "top_logprobs": [_token(other, value) for other, value in top]})
    return rows


def _token(id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{id}", "logprob": max(logprob, -9999.0), "bytes": None}


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


def _count(gateway: Gateway, turn: Turn) -> None:
    if turn.usage is not None:
        tokens = gateway.meters.tokens
        tokens.labels("prompt").inc(turn.usage.prompt - turn.usage.cached)
        tokens.labels("cached").inc(turn.usage.cached)
        tokens.labels("output").inc(turn.usage.output)
