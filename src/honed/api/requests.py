"""Reads OpenAI's chat request into a Call; whatever is wrong with it is a BadRequest that names the parameter."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from honed.api.forms import check_schema, read_form
from honed.errors import BadRequest
from honed.protocols import Call
from honed.types import LEAST_TEMPERATURE, Message, Sampling, Tool, ToolCall

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KNOWN = frozenset(
    [
        "model",
        "messages",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "n",
        "metadata",
        "user",
        "store",
        "parallel_tool_calls",
        "response_format",
        "frequency_penalty",
        "presence_penalty",
        "top_k",
        "min_p",
        "repetition_penalty",
        "service_tier",
        "reasoning_effort",
    ]
)
LIMITS = ("max_completion_tokens", "max_tokens")
MAX_STOPS, MAX_TOP_LOGPROBS, MAX_TAG = 16, 20, 512


def read_call(body: dict[str, Any], id: str, *, default_max_tokens: int) -> Call:
    """The Call of a request body. `line` is the model's name; `line@3` pins a version. A request that names no limit
    gets `default_max_tokens`, or what the context has left where that is less."""
    if unknown := sorted(set(body) - KNOWN):
        raise BadRequest(f"unknown parameter {unknown[0]!r}.", param=unknown[0], code="unknown_parameter")
    _refuse_unsupported(body)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("'model' must be a non-empty string.", param="model")
    line, pinned, _ = model.partition("@")
    tools = read_tools(body.get("tools"))
    return Call(
        id=id,
        messages=read_messages(body.get("messages")),
        tools=tools,
        tool_choice="none" if body.get("tool_choice") == "none" else "auto",
        form=read_form(body, tools, several=flag(body, "parallel_tool_calls", default=True)),
        sampling=_sampling(body, default_max_tokens),
        fit=all(body.get(name) is None for name in LIMITS),
        scored=_scored(body),
        line=line,
        version=model if pinned else None,
        tags=_tags(body),
    )


def read_messages(value: Any) -> tuple[Message, ...]:
    """The conversation: at least one message, roles and contents as OpenAI has them, text only."""
    if not isinstance(value, list) or not value:
        raise BadRequest("'messages' must be a non-empty list.", param="messages")
    messages = _answered(tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value)))
    if messages[-1].role == "assistant":
        raise BadRequest("the last message is the assistant's: there is nothing to answer.", param="messages")
    return messages


def read_tools(value: Any) -> tuple[Tool, ...]:
    """The tools, each with a schema that is one."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadRequest("'tools' must be a list.", param="tools")
    return tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(value))


def _answered(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Checks that each tool's message answers a call that was made, and gives it the name of the function."""
    called: dict[str, str] = {}
    named = []
    for index, message in enumerate(messages):
        called |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool":
            if message.tool_call_id not in called:
                raise BadRequest(
                    f"messages[{index}] answers the call {message.tool_call_id!r}, which no message before it makes.",
                    param=f"messages[{index}].tool_call_id",
                )
            message = msgspec.structs.replace(message, name=message.name or called[message.tool_call_id])
        named.append(message)
    return tuple(named)


def _message(item: Any, at: str) -> Message:
    if not isinstance(item, dict):
        raise BadRequest(f"{at} must be an object.", param=at)
    role = ROLES.get(item.get("role", "")) if isinstance(item.get("role"), str) else None
    if role is None:
        raise BadRequest(f"{at}.role must be one of {', '.join(ROLES)}.", param=f"{at}.role")
    calls = tuple(
        _call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(_list(item.get("tool_calls"), f"{at}.tool_calls"))
    )
    content = _content(item.get("content"), f"{at}.content")
    if content is None and not calls:
        raise BadRequest(f"{at} has neither content nor tool calls.", param=f"{at}.content")
    if calls and role != "assistant":
        raise BadRequest(f"{at}: only the assistant calls tools.", param=f"{at}.tool_calls")
    if role == "tool" and not isinstance(item.get("tool_call_id"), str):
        raise BadRequest(f"{at} must say in tool_call_id which call it answers.", param=f"{at}.tool_call_id")
    return Message(
        role=role,  # type: ignore[arg-type]
        content=content,
        tool_calls=calls,
        tool_call_id=_text(item.get("tool_call_id"), f"{at}.tool_call_id"),
        name=_text(item.get("name"), f"{at}.name"),
    )


def _content(value: Any, at: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{at} must be a string or a list of parts.", param=at)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{at}[{index}]: this model reads text parts only.", param=f"{at}[{index}]")
        parts.append(part["text"])
    return "".join(parts)


def _call(value: Any, at: str) -> ToolCall:
    inner = value.get("function") if isinstance(value, dict) else None
    if (
        not isinstance(inner, dict)
        or not isinstance(inner.get("name"), str)
        or not isinstance(inner.get("arguments"), str)
    ):
        raise BadRequest(f"{at} needs function.name and function.arguments, both strings.", param=at)
    return ToolCall(id=_text(value.get("id"), f"{at}.id") or "", name=inner["name"], arguments=inner["arguments"])


def _tool(value: Any, at: str) -> Tool:
    inner = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise BadRequest(f'{at} must be {{"type": "function", "function": {{"name": ...}}}}.', param=at)
    schema = inner.get("parameters")
    schema = {"type": "object", "properties": {}} if schema is None else schema
    where = f"{at}.function.parameters"
    check_schema(schema, where)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"{where} must be a schema of type object.", param=where, code="invalid_schema")
    _check_properties(schema, where)
    described = _text(inner.get("description"), f"{at}.function.description")
    return Tool(name=inner["name"], description=described or "", parameters=schema)


def _check_properties(schema: dict[str, Any], where: str) -> None:
    """A renderer reads properties as schemas: `true`, which JSON schema allows as well, says nothing to a model."""
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(inner, dict):
            raise BadRequest(f"{where}.properties.{name} must be an object.", param=where, code="invalid_schema")


def _sampling(body: dict[str, Any], default_max_tokens: int) -> Sampling:
    logprobs = flag(body, "logprobs")
    top = _whole(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if top and not logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    limit = next((name for name in LIMITS if body.get(name) is not None), "max_tokens")
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 2**63):
        raise BadRequest("'seed' must be an integer of at most 63 bits.", param="seed")
    return Sampling(
        temperature=_temperature(_number(body, "temperature", 1.0, 0.0, 2.0)),
        top_p=_number(body, "top_p", 1.0, 1e-6, 1.0),
        top_k=_whole(body, "top_k", 0, 0, 1 << 20),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(body, "repetition_penalty", 1.0, 0.01, 100.0),
        max_tokens=_whole(body, limit, default_max_tokens, 1, 1 << 20),
        stop=_stops(body.get("stop")),
        seed=seed,
        top_logprobs=top,
    )


def _scored(body: dict[str, Any]) -> bool:
    """Whether the prompt's own log-probabilities are asked for (prompt_logprobs = 0, as vLLM has it)."""
    if body.get("prompt_logprobs") is None:
        return False
    if body["prompt_logprobs"] != 0 or isinstance(body["prompt_logprobs"], bool):
        raise BadRequest(
            "'prompt_logprobs' must be 0: the prompt's own tokens, without alternatives.", param="prompt_logprobs"
        )
    if flag(body, "stream"):
        raise BadRequest("'prompt_logprobs' come with a whole reply, not with a stream.", param="prompt_logprobs")
    return True


def _temperature(value: float) -> float:
    """What is all but 0 is greedy, as other servers have it."""
    return value if value >= LEAST_TEMPERATURE else 0.0


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"'stop' must be a string or at most {MAX_STOPS} non-empty strings.", param="stop")
    return tuple(stops)


def _tags(body: dict[str, Any]) -> dict[str, str]:
    """The metadata, and the end user's name as one more: conversations of two users are two, though they read alike."""
    value = {} if body.get("metadata") is None else body["metadata"]
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise BadRequest("'metadata' must map strings to strings.", param="metadata")
    if any(len(k) > MAX_TAG or len(v) > MAX_TAG for k, v in value.items()):
        raise BadRequest(f"'metadata' holds a key or value of over {MAX_TAG} characters.", param="metadata")
    user = _text(body.get("user"), "user")
    if user is not None and len(user) > MAX_TAG:
        raise BadRequest(f"'user' is over {MAX_TAG} characters.", param="user")
    return {**value, "user": user} if user else dict(value)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """What would change the answer and is not done yet is refused rather than ignored."""
    if body.get("n") not in (None, 1):
        raise BadRequest("'n' must be 1.", param="n", code="unsupported_value")
    for name in ("frequency_penalty", "presence_penalty"):
        if body.get(name) not in (None, 0, 0.0):
            raise BadRequest(f"'{name}' must be 0.", param=name, code="unsupported_value")


def flag(body: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """A boolean, or `default` where it is not given."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"'{name}' must be true or false.", param=name)
    return default if value is None else value


def wants_usage(body: dict[str, Any]) -> bool:
    """Whether a stream shall end with its usage (stream_options.include_usage)."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("'stream_options' must be an object.", param="stream_options")
    return flag(options or {}, "include_usage")


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise BadRequest(
            f"'{name}' = {value!r} must be a number from {low:g} to {high:g}.", param=name, code="invalid_value"
        )
    return float(value)


def _whole(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(
            f"'{name}' = {value!r} must be a whole number from {low} to {high}.", param=name, code="invalid_value"
        )
    return value


def _list(value: Any, at: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise BadRequest(f"{at} must be a list.", param=at)
    return value or []


def _text(value: Any, at: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{at} must be a string.", param=at)
    return value
