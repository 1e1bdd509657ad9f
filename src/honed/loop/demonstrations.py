"""What a person showed, as a Trace that SFT can learn from: tokenised with the serving renderer, origin demonstration.

The ids of a demonstration were never sampled, so its turns have no log-probabilities and policy-gradient losses refuse
them. Its output ids are those the model would have had to sample, its stop id included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from honed import codec
from honed.errors import BadRequest, CorruptData
from honed.loop import paths
from honed.types import Feedback, Message, Sampling, Task, Tool, Trace, Turn

UNKNOWN = Sampling()
"""Nobody sampled a demonstration."""


class Encoder(Protocol):
    """What this file needs of a renderer (text/)."""

    def start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]: ...
    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[int] | None: ...
    def encode_reply(self, message: Message) -> list[int]:
        """The ids of an assistant's message as the model would sample them, the stop id last."""
        ...


def demonstrate(
    renderer: Encoder,
    prompt: Sequence[Message],
    tools: Sequence[Tool],
    messages: Sequence[Message],
    *,
    line: str,
    task: str | None = None,
    tenant: str = "",
    tags: dict[str, str] | None = None,
    at: float,
) -> Trace:
    """A demonstration: `messages` (assistant's and tools', the last one an assistant's) should follow `prompt`.

    The trace's id is a digest of what was shown, so that the same demonstration is one trace. Raises BadRequest when
    the messages show no reply, or end in something that nobody answered.
    """
    if not messages or messages[-1].role != "assistant":
        raise BadRequest("a demonstration must end with the assistant's message.", param="value")
    if odd := [message.emphasis for message in messages if not 0 <= message.emphasis < math.inf]:
        raise BadRequest(f"a message's weight = {odd[0]} must be a number from 0 on.", param="value")
    id = "trace_" + codec.digest(["demonstration", line, tenant, list(prompt), list(tools), list(messages)])[:32]
    turns: list[Turn] = []
    said: list[Message] = []
    added: list[Message] = list(prompt)
    for message in messages:
        if message.role != "assistant":
            added.append(message)
            continue
        context = renderer.extend(added, closed=True) if turns else None
        parent = turns[-1].id if turns else None
        if context is None:  # the template can't append to what was said: the next reply starts a branch of its own
            added, parent = [*said, *added], None
            context = renderer.start(added, tools)
        turns.append(_shown(f"{id}.{len(turns)}", parent, added, context, message, renderer, tools, line, at))
        said = [*said, *added, message] if parent is not None else [*added, message]
        added = []
    return Trace(
        id=id,
        origin="demonstration",
        line=line,
        task=task,
        turns=tuple(turns),
        tools=tuple(tools),
        tags=tags or {},
        tenant=tenant,
        at=at,
    )


def _shown(
    id: str,
    parent: str | None,
    added: Sequence[Message],
    context: Sequence[int],
    reply: Message,
    renderer: Encoder,
    tools: Sequence[Tool],
    line: str,
    at: float,
) -> Turn:
    return Turn(
        id=id,
        trace=id.rpartition(".")[0],
        parent=parent,
        added=tuple(added),
        tools=codec.tools_digest(tuple(tools)),
        context=tuple(context),
        reply=reply,
        output=tuple(renderer.encode_reply(reply)),
        sampling=UNKNOWN,
        model=line,
        finish="tool_calls" if reply.tool_calls else "stop",
        at=at,
    )


def corrected(renderer: Encoder, trace: Trace, row: Feedback, task: Task | None) -> Trace:
    """The demonstration that a correction (or a demonstration posted as feedback) stands for.

    A row about a turn replaces that turn's reply and what followed; a row about the trace replaces everything after the
    opening messages. Raises BadRequest when the row's value is no list of messages.
    """
    prompt = paths.opening(trace) if row.target == trace.id else paths.prompt(trace, row.target)
    return demonstrate(
        renderer,
        prompt,
        trace.tools,
        messages_of(row),
        line=trace.line,
        task=task.id if task is not None else None,
        tenant=trace.tenant,
        tags={"source": trace.id, "feedback": row.id},
        at=row.at,
    )


def messages_of(row: Feedback) -> tuple[Message, ...]:
    """The messages in a feedback row. OpenAI's shape of a tool call ({"function": {...}}) is understood as well."""
    try:
        return tuple(msgspec.convert([_plain(item) for item in row.value], type=list[Message]))
    except (msgspec.ValidationError, TypeError, KeyError, AttributeError, CorruptData) as error:
        raise BadRequest(f"feedback {row.id!r} is not a list of messages: {error}", param="value") from error


def _plain(item: Any) -> Any:
    if isinstance(item, Message):
        return msgspec.to_builtins(item)
    if not isinstance(item, dict):
        raise TypeError(f"{item!r} is no message")
    item = dict(item)
    item["tool_calls"] = [_call(call, index) for index, call in enumerate(item.get("tool_calls") or ())]
    return item


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    inner = call.get("function", call)
    return {"id": call.get("id") or f"call_{index}", "name": inner["name"], "arguments": inner["arguments"]}
