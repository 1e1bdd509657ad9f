"""An engine without weights: it answers from a script, deterministically, so that real processes can be tested.

`ScriptedEngine` keeps every promise of `protocols.Engine` (versions, cancel, log-probabilities, limits) and needs
neither torch nor a model file; the worker serves it for the source "scripted". `ByteRenderer` is the tokenizer that
goes with it: one id per UTF-8 byte, and three special ids. It is not a model to train or to measure.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from honed import codec
from honed.clock import new_id
from honed.config import Settings
from honed.errors import BadRequest, CorruptData, NotFound
from honed.protocols import Chunk, EngineStatus, Request, Scores
from honed.types import Message, Tool, ToolCall, Usage, Version

START, END = 256, 257
_SPECIAL = {START: "<|im_start|>", END: "<|im_end|>"}
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


class ScriptedSettings(Settings):
    """What the script says."""

    replies: dict[str, str] = {}
    """Reply by version id; "*" is for every other version. "{prompt}" becomes the last user message. Without an entry
    the engine echoes the last user message."""
    rules: dict[str, str] = {}
    """Reply by a piece of text found in the last message; goes before `replies`."""
    delay_seconds: float = 0.0
    """Time to wait before each token."""
    load_seconds: float = 0.0
    """Time that loading a version takes."""
    corrupt: tuple[str, ...] = ()
    """Versions whose files pretend to fail their digest."""
    context: int = 4096
    """Longest sequence (prompt and output) in tokens."""
    stall_seconds: float = 60.0
    """As the local engine's: silence after which its process is killed."""


class Decoder(Protocol):
    """The two things that the scripted engine needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...


class ScriptedEngine:
    """Emits the scripted reply one token a time, then the stop id. The log-probability of id i is -0.01 - (i % 7) / 10,
    sampled and raw alike. Raises what protocols.Engine says."""

    def __init__(self, settings: ScriptedSettings | None = None, renderer: Decoder | None = None) -> None:
        self.settings = settings or ScriptedSettings()
        self._renderer: Decoder = renderer or ByteRenderer()
        self._versions: dict[str, Version] = {}
        self._retired: set[str] = set()
        self._running: Counter[str] = Counter()
        self._cancelled: set[str] = set()
        self._active: set[str] = set()
        self._prompt_tokens = self._output_tokens = 0
        self._started = time.process_time()

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams the reply, one id a chunk; the last chunk carries finish and usage."""
        self._check(request)
        started = time.perf_counter()
        wanted = self._script(request)
        ids = wanted[: request.sampling.max_tokens]
        finish = "stop" if len(wanted) <= request.sampling.max_tokens else "length"
        self._running[request.version] += 1
        self._active.add(request.id)
        sent = 0
        try:
            for id in ids:
                await asyncio.sleep(self.settings.delay_seconds)
                if request.id in self._cancelled:
                    finish = "cancelled"
                    break
                sent += 1
                yield self._chunk(request, id)
            usage = Usage(prompt=len(request.ids), cached=0, output=sent, seconds=time.perf_counter() - started)
            yield Chunk(id=request.id, version=request.version, finish=finish, usage=usage)  # type: ignore[arg-type]
        finally:
            self._prompt_tokens += len(request.ids)
            self._output_tokens += sent
            self._ended(request)

    async def cancel(self, id: str) -> None:
        """Ends a running request with finish "cancelled"; an unknown id does nothing."""
        if id in self._active:
            self._cancelled.add(id)

    async def logprobs(self, ids: Sequence[int], version: str, temperature: float = 1.0) -> Scores:
        """The scripted log-probability of each id after the first, the same at every temperature."""
        self._require(version)
        return Scores(values=[_logprob(id) for id in ids[1:]])

    async def load(self, version: Version) -> None:
        """Makes a version available after `load_seconds`; raises CorruptData for those in `corrupt`."""
        await asyncio.sleep(self.settings.load_seconds)
        if version.id in self.settings.corrupt:
            raise CorruptData(f"{version.uri or version.id} does not match the digest of {version.id}")
        self._versions[version.id] = version
        self._retired.discard(version.id)

    async def unload(self, version: str) -> None:
        """Forgets a version once its running requests have ended."""
        if self._running[version]:
            self._retired.add(version)
        else:
            self._versions.pop(version, None)

    async def status(self) -> EngineStatus:
        """Counters and what is loaded."""
        return EngineStatus(
            base="scripted",
            versions=tuple(sorted(self._versions)),
            running=sum(self._running.values()),
            context=self.settings.context,
            capacity=self.settings.context,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            busy_seconds=time.process_time() - self._started,
            pid=os.getpid(),
        )

    async def close(self) -> None:
        """Nothing to free."""

    def _check(self, request: Request) -> None:
        self._require(request.version)
        if request.sampling.grammar:
            raise BadRequest("the scripted engine follows no grammar.", param="response_format")
        if len(request.ids) + request.sampling.max_tokens > self.settings.context:
            raise BadRequest(
                f"{len(request.ids)} prompt tokens and max_tokens {request.sampling.max_tokens} exceed the context of "
                f"{self.settings.context}",
                param="messages",
                code="context_length_exceeded",
            )

    def _require(self, version: str) -> None:
        if version and not version.endswith("@0") and (version not in self._versions or version in self._retired):
            raise NotFound(f"the version {version} is not loaded (loaded: {', '.join(self._versions) or 'none'})")

    def _script(self, request: Request) -> list[int]:
        asked = _last_message(self._renderer.decode(request.ids))
        replies = self.settings.replies
        text = next((reply for piece, reply in self.settings.rules.items() if piece in asked), None)
        if text is None:
            text = replies.get(request.version, replies.get("*", "{prompt}"))
        ids = [*self._renderer.encode(text.replace("{prompt}", asked)), self._renderer.stop_ids[0]]
        stopped = next((at for at, id in enumerate(ids) if id in request.sampling.stop_ids), len(ids) - 1)
        return ids[: stopped + 1]

    def _chunk(self, request: Request, id: int) -> Chunk:
        value = _logprob(id)
        num_top = request.sampling.top_logprobs
        top = (tuple(((id + step) % 256, value - step) for step in range(num_top)),) if num_top else ()
        version = request.version
        return Chunk(id=request.id, ids=(id,), logprobs=(value,), raw_logprobs=(value,), top=top, version=version)

    def _ended(self, request: Request) -> None:
        self._active.discard(request.id)
        self._cancelled.discard(request.id)
        self._running[request.version] -= 1
        if request.version in self._retired and not self._running[request.version]:
            self._retired.discard(request.version)
            self._versions.pop(request.version, None)


class ByteRenderer:
    """text.Renderer's interface over bytes: ids 0 to 255 are UTF-8 bytes, 256 starts a message, 257 ends it.

    A message is `256 role newline content 257`; tool calls are JSON in <tool_call> tags, as SmolLM2's are."""

    stop_ids: tuple[int, ...] = (END,)
    digest = "bytes-1"

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The whole conversation and the start of the reply."""
        ids = [id for message in messages for id in _render(message)]
        if tools:
            names = codec.to_json([tool.name for tool in tools]).decode()
            ids = _render(Message(role="system", content=f"tools: {names}")) + ids
        return [*ids, START, *b"assistant\n"]

    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """The ids between a sampled reply and the next one."""
        ids = [id for message in messages for id in _render(message)]
        return [*([] if closed else [END]), *ids, START, *b"assistant\n"]

    def reply_stream(self, tools: Sequence[Tool] = (), stop: Sequence[str] = ()) -> ByteReplyStream:
        """A fresh parser of one reply."""
        return ByteReplyStream(stop)

    def grammar(self, tools: Sequence[Tool], single: bool, schema: dict[str, Any] | None) -> str:
        """A name of the form: the scripted engine follows none."""
        return codec.to_json([[tool.name for tool in tools], single, schema]).decode()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ids by name, broken UTF-8 as replacement characters."""
        pieces, run = [], bytearray()
        for id in ids:
            if id < 256:
                run.append(id)
                continue
            pieces += [run.decode(errors="replace"), _SPECIAL[id]]
            run = bytearray()
        return "".join([*pieces, run.decode(errors="replace")])

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes."""
        return list(text.encode())

    def encode_reply(self, message: Message) -> list[int]:
        """A reply as it would be sampled: its content, its tool calls, the stop id."""
        return _render(message)[1 + len(b"assistant\n") :]


class ByteReplyStream:
    """text.ReplyStream's interface: shows no half character, no half stop string and no tool call."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._holds = (*self._stop, _CALL)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._shown = 0
        self.stopped = False
        self.malformed = 0

    def push(self, ids: Sequence[int]) -> str:
        """Takes ids, returns the text that became safe to show."""
        if self.stopped:
            return ""
        self._text += self._decoder.decode(bytes(id for id in ids if id < 256))
        found = [at for at in (self._text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
        return self._show(self._safe())

    def finish(self, finish_reason: str | None = None) -> Message:
        """The whole reply with its tool calls parsed."""
        self._text += self._decoder.decode(b"", final=True)
        content, *calls = self._text.split(_CALL)
        parsed = tuple(call for call in map(_parse_call, calls) if call is not None)
        self.malformed = len(calls) - len(parsed)
        if self.malformed:
            return Message(role="assistant", content=self._text)
        return Message(role="assistant", content=content.strip() or None if parsed else content, tool_calls=parsed)

    def _show(self, end: int) -> str:
        piece, self._shown = self._text[self._shown : end], max(self._shown, end)
        return piece

    def _safe(self) -> int:
        if (at := self._text.find(_CALL)) >= 0:
            return at
        if self.stopped:
            return len(self._text)
        return len(self._text) - max((_overlap(self._text, hold) for hold in self._holds), default=0)


def _overlap(text: str, hold: str) -> int:
    """The longest end of `text` that is a proper start of `hold`."""
    return next((size for size in range(min(len(text), len(hold) - 1), 0, -1) if hold.startswith(text[-size:])), 0)


def _parse_call(text: str) -> ToolCall | None:
    try:
        call = json.loads(text.replace(_CALL_END, ""))
        return ToolCall(id=new_id("call_"), name=call["name"], arguments=json.dumps(call["arguments"]))
    except (ValueError, KeyError, TypeError):
        return None


def _render(message: Message) -> list[int]:
    calls = "".join(
        f'{_CALL}{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}{_CALL_END}'
        for call in message.tool_calls
    )
    return [START, *f"{message.role}\n{message.content or ''}{calls}".encode(), END]


def _last_message(text: str) -> str:
    """The content of the last message before the reply's start."""
    before = text.rpartition(_SPECIAL[START])[0]
    return before.rpartition(_SPECIAL[START])[2].partition("\n")[2].partition(_SPECIAL[END])[0]


def _logprob(id: int) -> float:
    return -0.01 - (id % 7) / 10
