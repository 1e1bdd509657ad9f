"""The common shape of a tool-using agent, for environments without a loop of their own: call, result, answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jsonschema

from honed import codec
from honed.protocols import Session
from honed.types import Message, Sampling, Tool, ToolCall

Execute = Callable[[str, dict[str, Any]], Awaitable[Any]]


class ToolError(Exception):
    """A tool that failed in a way that the agent is to read: its text becomes the tool's message."""


async def converse(
    session: Session,
    prompt: Sequence[Message],
    tools: Sequence[Tool],
    execute: Execute,
    *,
    max_turns: int = 4,
    sampling: Sampling | None = None,
) -> list[Message]:
    """Lets the model answer and call tools until it answers without a call, repeats itself, or `max_turns` is over.

    Returns everything said after the prompt. A call that names no tool or fails its schema is told to the model as an
    error, like a ToolError; anything else that `execute` raises is the environment's fault and propagates.
    """
    said: list[Message] = []
    for _ in range(max_turns):
        reply = (await session.reply([*prompt, *said], tools, sampling)).reply
        repeated = bool(reply.tool_calls) and any(_same(reply, message) for message in said)
        said.append(reply)
        if not reply.tool_calls or repeated:
            break
        said += [await answer_call(call, tools, execute) for call in reply.tool_calls]
    return said


async def answer_call(call: ToolCall, tools: Sequence[Tool], execute: Execute) -> Message:
    """The tool's message: the result as JSON, or {"error": ...} with what was wrong."""
    try:
        content = json.dumps(await execute(call.name, check_arguments(call, tools)), ensure_ascii=False)
    except ToolError as error:
        content = json.dumps({"error": str(error)}, ensure_ascii=False)
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def check_arguments(call: ToolCall, tools: Sequence[Tool]) -> dict[str, Any]:
    """The call's arguments, checked against the tool's schema. Raises ToolError with one plain sentence."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        raise ToolError(f"there is no tool {call.name}; tools: {', '.join(tool.name for tool in tools)}")
    try:
        arguments = json.loads(call.arguments, parse_constant=_no_number)
        codec.encode(arguments)  # an integer beyond 64 bits or half a surrogate pair could be kept nowhere
        jsonschema.validate(arguments, {"type": "object", "additionalProperties": False, **tool.parameters})
    except (ValueError, OverflowError, RecursionError):
        raise ToolError(f"the arguments of {call.name} are not JSON") from None
    except jsonschema.ValidationError as error:
        raise ToolError(f"{call.name}: {error.message}") from None
    return dict(arguments)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _same(one: Message, other: Message) -> bool:
    calls = [(call.name, call.arguments) for call in one.tool_calls]
    return calls == [(call.name, call.arguments) for call in other.tool_calls] and one.content == other.content
