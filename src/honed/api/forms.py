"""What a reply must be, as OpenAI says it: tool_choice, parallel_tool_calls, response_format, and their schemas."""

from __future__ import annotations

from typing import Any

import jsonschema

from honed.errors import BadRequest
from honed.protocols import Form
from honed.types import Tool


def read_form(body: dict[str, Any], tools: tuple[Tool, ...], *, several: bool) -> Form | None:
    """What the reply must be. Where tools are merely offered beside a format, the reply may be either; `several` says
    whether it may hold more than one call."""
    choice, schema = body.get("tool_choice"), _response_schema(body.get("response_format"))
    names = tuple(tool.name for tool in tools)
    if choice in (None, "auto", "none"):
        if not several and names and choice != "none" and schema is None:
            message = "'parallel_tool_calls' may only be false where a call must come: nothing keeps free text to one."
            raise BadRequest(message, param="parallel_tool_calls", code="unsupported_value")
        offered = () if choice == "none" else names
        return None if schema is None else Form(tools=offered, single=not several, schema=schema)
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            message = (
                '\'tool_choice\' must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}.'
            )
            raise BadRequest(message, param="tool_choice")
        if name not in names:
            raise BadRequest(f"'tool_choice' names {name!r}, which 'tools' does not offer.", param="tool_choice")
        return Form(tools=(name,), single=True)
    if not names:
        raise BadRequest("'tool_choice' is \"required\", but there are no 'tools'.", param="tool_choice")
    return Form(tools=names, single=not several)


def _response_schema(value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = value.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        message = "'response_format' must be of type text, json_object, or json_schema with json_schema.schema."
        raise BadRequest(message, param="response_format")
    check_schema(schema, "response_format.json_schema.schema")
    return schema


def check_schema(schema: Any, where: str) -> None:
    """Raises BadRequest, its param `where`, for what is no JSON schema."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except (jsonschema.SchemaError, RecursionError, OverflowError, ValueError) as error:  # a pattern may be absurd
        reason = getattr(error, "message", None) or str(error) or "it is nested too deep"
        raise BadRequest(f"{where} is no JSON schema: {reason}", param=where, code="invalid_schema") from None
