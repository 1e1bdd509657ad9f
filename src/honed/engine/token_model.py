"""TokenModel: a Model made of a renderer and an Engine, exact to the token along a conversation.

When messages extend a Turn that it has seen (of the same tenant, line and version, under the same tools, and of the
same trace or session and user where the caller names them), the engine reads that turn's own ids followed by the new
ones; nothing is tokenised again. Of turns that read alike the one is taken whose reply came back as it was given, ids
of calls included, then the newest. Otherwise a full render starts a new branch. What it knows of earlier turns is a
bounded index in memory: losing it costs a branch, never correctness.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from honed import codec
from honed.clock import new_id
from honed.errors import BadRequest, EngineError
from honed.log import log
from honed.protocols import Call, Chunk, Delta, Engine, Form, Request
from honed.types import Finish, Message, Noun, Sampling, Span, Tool, Turn, Usage


class Reply(Protocol):
    """A reader of one reply (text/stream.py)."""

    stopped: bool
    malformed: int

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self, finish_reason: str | None = None) -> Message: ...


class Rendering(Protocol):
    """What TokenModel needs of a renderer (text/renderer.py)."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...
    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[int] | None: ...
    def reply_stream(self, tools: Sequence[Tool] = (), stop: Sequence[str] = ()) -> Any: ...
    def grammar(self, tools: Sequence[Tool], single: bool, schema: dict[str, Any] | None) -> str: ...


class Known(Noun, frozen=True, kw_only=True):
    """A turn that may be extended: every id up to and including its output, and whether it ended with its stop id."""

    turn: str
    trace: str
    ids: tuple[int, ...]
    closed: bool


class Opening(Noun, frozen=True, kw_only=True):
    """How a call begins: what the engine reads, what of it is new, and the turn that it extends."""

    ids: tuple[int, ...]
    context: tuple[int, ...]
    added: tuple[Message, ...]
    trace: str
    parent: str | None = None


class TokenModel:
    """Implements protocols.Model. `version_of` names the version that serves a line now ("" = base)."""

    def __init__(
        self,
        engine: Engine,
        renderer: Rendering,
        version_of: Callable[[str], str] = lambda line: "",
        *,
        index_size: int = 4096,
    ) -> None:
        self._engine, self._renderer, self._version_of = engine, renderer, version_of
        self._index: OrderedDict[str, Known] = OrderedDict()
        self._index_size = index_size
        self._context = 0

    async def reply(self, call: Call) -> Turn:
        """The whole reply."""
        async with contextlib.aclosing(self.stream(call)) as deltas:
            async for delta in deltas:
                if delta.turn is not None:
                    return delta.turn
        raise AssertionError("a stream ends with its turn")

    async def stream(self, call: Call, on_cut: Callable[[Turn], None] | None = None) -> AsyncGenerator[Delta, None]:
        """Deltas, the last with the Turn. Raises what the engine raises; an engine that died before anything was said
        is asked once more, and what one had said that died later goes to `on_cut`, with finish "error"."""
        version = call.version if call.version is not None else self._version_of(call.line)
        opening = self._open(call, version)
        if call.form is not None:
            call = self._formed(call, call.form)
        if call.fit:
            call = msgspec.structs.replace(call, sampling=await self._fitted(call.sampling, len(opening.ids)))
        answer = _Answer(opening.trace, self._renderer.reply_stream(_offered(call), call.sampling.stop))
        if call.scored:
            scores = await self._engine.logprobs(opening.ids, version)
            answer.seconds = scores.seconds
            yield Delta(prompt=tuple(zip(opening.ids, (None, *scores.values), strict=True)), trace=opening.trace)
        try:
            async with contextlib.aclosing(self._sample(call, version, opening, answer)) as deltas:
                async for delta in deltas:
                    yield delta
        except BaseException as error:
            finish: Finish = "cancelled" if isinstance(error, GeneratorExit | asyncio.CancelledError) else "error"
            if on_cut is not None and (answer.ids or finish == "cancelled"):
                on_cut(self._turn(call, opening, answer, finish))
            raise
        turn = self._turn(call, opening, answer, answer.finish)
        self._remember(call, version, opening, turn)
        rest, malformed = answer.rest(turn.reply), answer.stream.malformed
        yield Delta(text=rest, trace=opening.trace, turn=turn, malformed=malformed)

    async def _sample(self, call: Call, version: str, opening: Opening, answer: _Answer) -> AsyncGenerator[Delta, None]:
        sampling = msgspec.structs.replace(call.sampling, stop_ids=(*call.sampling.stop_ids, *self._renderer.stop_ids))
        for last_try in (False, True):
            request = Request(id=new_id("request_"), ids=opening.ids, sampling=sampling, version=version)
            try:
                async with contextlib.aclosing(self._engine.submit(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if delta := answer.take(chunk):
                            yield delta
                        if answer.stopped and not answer.is_cancelled and chunk.finish is None:
                            answer.is_cancelled = True  # its last chunk is waited for: it says what was spent
                            await self._engine.cancel(request.id)
                return
            except EngineError as error:
                if answer.stopped:
                    return
                if last_try or not error.retryable or answer.ids:
                    raise
                log("model.retried", error=str(error))

    def _open(self, call: Call, version: str) -> Opening:
        found = self._extended(call, version)
        if found is not None:
            known, new = found
            context = self._renderer.extend(new, closed=known.closed)
            if context is not None:
                return Opening(
                    ids=(*known.ids, *context), context=tuple(context), added=new, trace=call.trace or known.trace,
                    parent=known.turn,
                )  # fmt: skip
        ids = tuple(self._renderer.start(call.messages, _offered(call)))
        return Opening(ids=ids, context=ids, added=call.messages, trace=call.trace or new_id("trace_"))

    def _formed(self, call: Call, form: Form) -> Call:
        """The call with its form as a grammar. Raises BadRequest for a tool that is not offered."""
        offered = {tool.name: tool for tool in _offered(call)}
        if missing := [name for name in form.tools if name not in offered]:
            raise BadRequest(f"the tool {missing[0]!r} must be called, but is not offered.", param="tool_choice")
        grammar = self._renderer.grammar([offered[name] for name in form.tools], form.single, form.schema)
        return msgspec.structs.replace(call, sampling=msgspec.structs.replace(call.sampling, grammar=grammar))

    async def _fitted(self, sampling: Sampling, num_prompt: int) -> Sampling:
        """The sampling with max_tokens lowered to what the context has left. Raises BadRequest where that is none."""
        self._context = self._context or (await self._engine.status()).context  # asked once: it does not change
        room = self._context - num_prompt
        if not self._context or room >= sampling.max_tokens:
            return sampling
        if room < 1:
            raise BadRequest(
                f"{num_prompt} prompt tokens leave no room for an answer in the context of {self._context} tokens; "
                "shorten the messages.",
                param="messages",
                code="context_length_exceeded",
            )
        return msgspec.structs.replace(sampling, max_tokens=room)

    def _extended(self, call: Call, version: str) -> tuple[Known, tuple[Message, ...]] | None:
        """The longest known beginning of the messages, and what comes after it."""
        keys = _keys(call, version, call.messages[:-1], _scope(call))
        for end in range(len(keys), 0, -1):
            for key in keys[end - 1] if call.messages[end - 1].role == "assistant" else ():
                if (known := self._index.get(key)) is not None:
                    self._index.move_to_end(key)
                    return known, call.messages[end:]
        return None

    def _remember(self, call: Call, version: str, opening: Opening, turn: Turn) -> None:
        if {span.version for span in turn.versions} - {version}:
            return
        closed = bool(turn.output) and turn.output[-1] in self._renderer.stop_ids
        known = Known(turn=turn.id, trace=turn.trace, ids=(*opening.ids, *turn.output), closed=closed)
        said, scopes = (*call.messages, turn.reply), (_scope(call), turn.trace)
        for key in dict.fromkeys(key for scope in scopes for key in _keys(call, version, said, scope)[-1]):
            self._index[key] = known
            self._index.move_to_end(key)
        while len(self._index) > 2 * self._index_size:  # two keys a turn
            self._index.popitem(last=False)

    def _turn(self, call: Call, opening: Opening, answer: _Answer, finish: Finish) -> Turn:
        reply = answer.stream.finish(finish)
        return Turn(
            id=call.id,
            trace=opening.trace,
            parent=opening.parent,
            added=opening.added,
            tools=codec.tools_digest(_offered(call)),
            context=opening.context,
            reply=reply,
            output=tuple(answer.ids),
            logprobs=tuple(answer.logprobs),
            raw_logprobs=tuple(answer.raw_logprobs),
            sampling=call.sampling,
            model=call.line,
            versions=tuple(answer.spans),
            finish="tool_calls" if reply.tool_calls and finish == "stop" else finish,
            usage=answer.usage,
            at=time.time(),
        )


class _Answer:
    """One reply as it grows."""

    def __init__(self, trace: str, stream: Reply) -> None:
        self._trace, self.stream = trace, stream
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.spans: list[Span] = []
        self.usage: Usage | None = None
        self.finish: Finish = "stop"
        self.seconds = 0.0  # spent before the first token
        self.is_cancelled = False
        self._shown = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.stream.stopped

    def take(self, chunk: Chunk) -> Delta | None:
        """Adds a chunk up to the token that ends a stop string; a Delta when it brought tokens."""
        count, text = self._read(chunk.ids)
        if chunk.finish is not None:
            self.finish, self.usage = chunk.finish, chunk.usage
            if self.usage is not None and self.seconds:
                self.usage = msgspec.structs.replace(self.usage, seconds=self.usage.seconds + self.seconds)
        if self.stopped:
            self.finish = "stop"
        if not count:
            return None
        self.ids += chunk.ids[:count]
        self.logprobs += chunk.logprobs[:count]
        self.raw_logprobs += chunk.raw_logprobs[:count]
        if self.spans and self.spans[-1].version == chunk.version:
            self.spans[-1] = Span(version=chunk.version, count=self.spans[-1].count + count)
        else:
            self.spans.append(Span(version=chunk.version, count=count))
        self._shown += len(text)
        ids, raw, top = chunk.ids[:count], chunk.raw_logprobs[:count], chunk.top[:count]
        return Delta(text=text, ids=ids, raw_logprobs=raw, top=top, trace=self._trace)

    def _read(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many of the ids belong to the reply, and the text that became safe to show."""
        pieces: list[str] = []
        for count, id in enumerate(ids):
            if self.stopped:
                return count, "".join(pieces)
            pieces.append(self.stream.push((id,)))
        return len(ids), "".join(pieces)

    def rest(self, reply: Message) -> str:
        """What was held back and turned out to be text."""
        return "" if reply.tool_calls else (reply.content or "")[self._shown :]


def _offered(call: Call) -> tuple[Tool, ...]:
    return call.tools if call.tool_choice != "none" else ()


def _scope(call: Call) -> str:
    """What tells conversations apart that read the same: the trace, else the session and the user that were named."""
    return call.trace or codec.digest([call.tags.get(name, "") for name in ("session", "user")])


def _keys(call: Call, version: str, messages: Sequence[Message], scope: str) -> list[tuple[str, str]]:
    """Two digests a message, of the conversation up to and including it: as it was said to the letter, and as it reads,
    for clients trim what they were told and give calls other ids."""
    head = msgspec.json.encode([call.tenant, call.line, version, codec.tools_digest(_offered(call)), scope])
    exact, alike = hashlib.sha256(b"exact" + head), hashlib.sha256(b"alike" + head)
    keys = []
    for message in messages:
        content = message.content or ""
        calls = [(each.name, each.arguments) for each in message.tool_calls]
        exact.update(msgspec.json.encode([message.role, content, calls, [each.id for each in message.tool_calls]]))
        said = content.strip() if message.role == "assistant" else content
        alike.update(msgspec.json.encode([message.role, said, calls]))
        keys.append((exact.hexdigest(), alike.hexdigest()))
    return keys
