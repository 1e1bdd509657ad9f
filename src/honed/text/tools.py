"""How tools are offered and called in text: the signatures in the system message, and calls as JSON in tags.

One format, Hermes (Qwen's and most open models'; SmolLM2 learns it):
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
A format for other models is one class with these five methods; `FORMATS` maps template digests and names to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from honed.clock import new_id
from honed.types import Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Parsed(msgspec.Struct, frozen=True):
    """A reply taken apart: the text beside the calls, the calls, and how many calls could not be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


class ToolFormat(Protocol):
    """Offers tools, writes calls and reads them. `opening` is the text that starts a call: what a stream holds back."""

    opening: str

    def offer(self, tools: Sequence[Tool]) -> str: ...
    def write(self, calls: Sequence[ToolCall]) -> str: ...
    def result(self, name: str, content: str) -> str: ...
    def parse(self, text: str) -> Parsed: ...
    def grammar(self, tools: Sequence[Tool], single: bool) -> str:
        """One or more calls of `tools`, only one with `single`: an expression of llguidance's variation of Lark."""
        ...


class Hermes:
    """JSON calls in <tool_call> tags; tools as one signature a line, which is far shorter than their schemas."""

    opening = OPEN

    def offer(self, tools: Sequence[Tool]) -> str:
        """The text that goes into the system message of a model whose template knows no tools."""
        lines = "\n".join(signature(tool) for tool in tools)
        return f'Tools:\n{lines}\nTo call one, reply {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model would write them, arguments kept as they are."""
        return "".join(f'{OPEN}{{"name": {_quote(call.name)}, "arguments": {call.arguments}}}{CLOSE}' for call in calls)

    def result(self, name: str, content: str) -> str:
        """A tool's result as a user's message, for templates that refuse the role tool."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def parse(self, text: str) -> Parsed:
        """Takes calls out of a reply. When one can't be read, all of the text stays content: nothing is dropped."""
        content, *pieces = text.split(OPEN)
        calls: list[ToolCall] = []
        malformed = 0
        for piece in pieces:
            body, _, after = piece.partition(CLOSE)
            call = _read(body)
            if call is None:
                malformed += 1
            else:
                calls.append(call)
            content += after
        if malformed:
            return Parsed(text, (), malformed)
        return Parsed(content.strip() if calls else content, tuple(calls))

    def grammar(self, tools: Sequence[Tool], single: bool) -> str:
        """Calls whose arguments match the tool's schema, with nothing beside the properties that it names."""
        calls = " | ".join(_formed_call(tool) for tool in tools)
        return f"({calls})" if single else f"({calls})+"


FORMATS: dict[str, ToolFormat] = {"hermes": Hermes()}
"""By name, or by the digest of the template that wants it."""


def signature(tool: Tool) -> str:
    """`name(arg: type, optional?: a|b) - description` of a tool."""
    properties: dict[str, Any] = tool.parameters.get("properties", {})
    required = set(tool.parameters.get("required", ()))
    arguments = ", ".join(_argument(name, schema, name in required) for name, schema in properties.items())
    return f"{tool.name}({arguments})" + (f" - {' '.join(tool.description.split())}" if tool.description else "")


def _argument(name: str, schema: Any, required: bool) -> str:
    description = schema.get("description") if isinstance(schema, dict) else None
    described = f" {description}" if description else ""
    return f"{name}{'' if required else '?'}: {_kind(schema)}{described}"


def _kind(schema: Any) -> str:
    """A schema in a word: its choices, its type, or `any` where it is of a shape that no word stands for. A schema
    may be `true` or `false` wherever one stands inside another."""
    if not isinstance(schema, dict):
        return "any"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return "|".join(choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
    kinds = schema.get("type", "any")
    if isinstance(kinds, list):
        return "|".join(_kind({**schema, "type": kind}) for kind in kinds) or "any"
    return f"{_item(schema.get('items'))}[]" if kinds == "array" else str(kinds)


def _item(schema: Any) -> str:
    """Only the type of an array's items is said: a signature is one line."""
    kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return kind if isinstance(kind, str) else "any"


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _read(body: str) -> ToolCall | None:
    try:
        call = msgspec.json.decode(body.strip().encode(), type=_Call)
        arguments = bytes(call.arguments).decode()
        if arguments.startswith('"'):  # some models write the arguments as a string of JSON
            arguments = msgspec.json.decode(arguments, type=str)
        if not call.name or not isinstance(msgspec.json.decode(arguments), dict):
            return None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return ToolCall(id=new_id("call_"), name=call.name, arguments=arguments)


def json_value(schema: dict[str, Any]) -> str:
    """A value of the schema, spaced as Python's json writes it: a small model that may choose spaces never ends."""
    spacing = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"


def _formed_call(tool: Tool) -> str:
    """The arguments are a document of their own, for references in a schema begin at its root."""
    head = f'{OPEN}{{"name": {_quote(tool.name)}, "arguments": '
    arguments = {"type": "object", "additionalProperties": False, **tool.parameters}
    return f"({_quote(head)} {json_value(arguments)} {_quote('}' + CLOSE)})"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
