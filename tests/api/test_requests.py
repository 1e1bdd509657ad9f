"""What a chat request may say, parameter by parameter, and how it becomes a Call."""

from __future__ import annotations

from typing import Any

import pytest

from honed.api.requests import flag, read_call, read_messages, read_tools, wants_usage
from honed.errors import BadRequest
from honed.protocols import Call, Form
from honed.types import Message, Sampling, Tool, ToolCall

USER = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"id": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}


def body(**change: Any) -> dict[str, Any]:
    return {"model": "support", "messages": [USER], **change}


TOOL = {"type": "function", "function": {"name": "f"}}


def read(**change: Any) -> Call:
    return read_call(body(**change), "chatcmpl-1", default_max_tokens=64)


def refused(**change: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(**change)
    return caught.value


def tool(parameters: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


def test_the_defaults_are_openais() -> None:
    call = read_call(body(), "chatcmpl-1", default_max_tokens=64)
    assert (call.id, call.line, call.version, call.trace) == ("chatcmpl-1", "support", None, None)
    assert call.messages == (Message(role="user", content="hi"),)
    assert call.sampling == Sampling(temperature=1.0, top_p=1.0, max_tokens=64)
    assert (call.tools, call.tool_choice, call.tags) == ((), "auto", {})
    assert call.fit


def test_everything_that_is_said_arrives() -> None:
    call = read_call(
        body(
            model="support@3", temperature=0, top_p=0.5, max_completion_tokens=9, max_tokens=5, stop="END", seed=-3,
            logprobs=True, top_logprobs=2, metadata={"case": "7"}, tool_choice="none", tools=tool(None), n=1,
            frequency_penalty=0, response_format={"type": "text"}, user="u", parallel_tool_calls=True,
        ),
        "chatcmpl-1",
        default_max_tokens=64,
    )  # fmt: skip
    assert (call.line, call.version) == ("support", "support@3")
    assert call.sampling == Sampling(temperature=0.0, top_p=0.5, max_tokens=9, stop=("END",), seed=-3, top_logprobs=2)
    assert (call.tags, call.tool_choice) == ({"case": "7", "user": "u"}, "none")
    assert not call.fit
    assert call.tools == (Tool(name="f", parameters={"type": "object", "properties": {}}),)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 1.0}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": False}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": ""}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a{4294967296}"}}}},
            "response_format.json_schema.schema",
        ),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"logit_bias": {}}, "logit_bias"),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"user": 3}, "user"),
        ({"user": "u" * 513}, "user"),
    ],
)
def test_a_wrong_parameter_is_named(change: dict[str, Any], param: str) -> None:
    assert refused(**change).param == param


def test_a_temperature_all_but_zero_is_greedy() -> None:
    assert [read(temperature=value).sampling.temperature for value in (1e-40, 9e-6, 1e-5, 0)] == [0, 0, 1e-5, 0]


def test_a_forced_call_is_a_form() -> None:
    two = [TOOL, {"type": "function", "function": {"name": "g"}}]
    named = {"type": "function", "function": {"name": "g"}}
    assert read(tools=two).form is None
    assert read(tools=two, tool_choice="required").form == Form(tools=("f", "g"))
    single = read(tools=two, tool_choice="required", parallel_tool_calls=False).form
    assert single == Form(tools=("f", "g"), single=True)
    assert read(tools=two, tool_choice=named).form == Form(tools=("g",), single=True)


def test_a_response_format_is_a_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert read(response_format={"type": "text"}).form is None
    assert read(response_format={"type": "json_object"}).form == Form(schema={"type": "object"})
    assert read(response_format=described).form == Form(schema=schema)
    assert read(response_format=described, tools=[TOOL]).form == Form(tools=("f",), schema=schema)
    assert read(response_format=described, tools=[TOOL], tool_choice="none").form == Form(schema=schema)


def test_only_switches_are_switches() -> None:
    assert [flag({"stream": value}, "stream") for value in (True, False, None)] == [True, False, False]
    assert wants_usage({"stream_options": {"include_usage": True}})
    assert not wants_usage({"stream_options": None})
    for wrong in ({"stream_options": "x"}, {"stream_options": {"include_usage": "yes"}}):
        with pytest.raises(BadRequest):
            wants_usage(wrong)
    with pytest.raises(BadRequest, match="stream"):
        flag({"stream": "yes"}, "stream")


def test_a_whole_conversation_with_tools_is_read() -> None:
    system = {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]}
    assert read_messages([system, USER, CALLED, RESULT]) == (
        Message(role="system", content="be kind"),
        Message(role="user", content="hi"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="look", arguments='{"id": 1}'),)),
        Message(role="tool", content="found", tool_call_id="c1", name="look"),  # the name comes from the call
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ({}, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{**USER, "tool_calls": CALLED["tool_calls"]}], "messages[0].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": "x"}], "messages[1].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}], "messages[1].tool_calls[0]"),
        ([USER, {"role": "tool", "content": "found"}], "messages[1].tool_call_id"),
        ([USER, RESULT], "messages[1].tool_call_id"),
        ([USER, RESULT, CALLED], "messages[1].tool_call_id"),
        ([USER, {"role": "assistant", "content": "hello"}], "messages"),
        ([{**USER, "name": 3}], "messages[0].name"),
    ],
)
def test_a_wrong_message_is_named(messages: Any, param: str) -> None:
    assert refused(messages=messages).param == param


@pytest.mark.parametrize(
    "parameters",
    [
        [], "", 0, False, "object", {"type": "objekt"}, {"type": "array"}, {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": True}}, {"type": "object", "required": "a"},
    ],
)  # fmt: skip
def test_a_tool_schema_that_is_none_is_named(parameters: Any) -> None:
    assert refused(tools=tool(parameters)).param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ([3], "tools[0]"),
        ([{"type": "custom", "function": {"name": "f"}}], "tools[0]"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0]"),
        (tool(None, description=3), "tools[0].function.description"),
    ],
)
def test_a_wrong_tool_is_named(tools: Any, param: str) -> None:
    assert refused(tools=tools).param == param


def test_no_tools_are_none() -> None:
    assert read_tools(None) == read_tools([]) == ()
