from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.api.requests import read_tools
from honed.errors import BadRequest
from honed.text import Renderer
from honed.text.tools import FORMATS, Hermes, signature
from honed.types import Message, Tool, ToolCall


def parse(body: str) -> tuple[str, list[tuple[str, str]], int]:
    parsed = Hermes().parse(body)
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls], parsed.malformed


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {"a":  1.50}}', '{"a":  1.50}'),
        ('\n{"arguments": {"a": "</b>"}, "name": "f"}\n', '{"a": "</b>"}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {}, "id": 7}', "{}"),
        ('{"name": "f", "arguments": {"a": "\\u00e9", "b": "é"}}', '{"a": "\\u00e9", "b": "é"}'),
    ],
)
def test_arguments_are_kept_as_written(body: str, arguments: str) -> None:
    assert parse(call(body)) == ("", [("f", arguments)], 0)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "f(1)",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "", "arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "now"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "f", "arguments": {}} and more',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": ' + '{"a":' * 50_000 + "1" + "}" * 50_001,
        '{"name": "f", "arguments": "' + "[" * 50_000 + '"}',
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    assert parse(call(body)) == (call(body), [], 1)


def test_text_around_calls_is_kept_and_their_order_too() -> None:
    text = (
        "one " + call('{"name": "a"}') + " two " + call('{"name": "b"}') + " three"
    )  # fmt: skip
    assert parse(text) == ("one  two  three", [("a", "{}"), ("b", "{}")], 0)


def test_a_call_that_was_never_closed_is_read_when_it_is_whole() -> None:
    assert parse('<tool_call>{"name": "a", "arguments": {}}') == ("", [("a", "{}")], 0)


def test_one_bad_call_keeps_all_as_text() -> None:
    text = call('{"name": "a"}') + call("oops")
    assert parse(text) == (text, [], 1)


def test_writing_and_reading_are_inverse() -> None:
    calls = (
        ToolCall(id="1", name='na"me', arguments='{"a": [1,  2]}'),
        ToolCall(id="2", name="é", arguments="{}"),
    )
    assert parse(Hermes().write(calls)) == ("", [(c.name, c.arguments) for c in calls], 0)


def test_a_signature_says_type_need_choice_and_description() -> None:
    properties = {
        "a": {"type": "string", "description": "who"},
        "b": {"enum": ["x", 2]},
        "c": {"type": "array", "items": {"type": "number"}},
        "d": {},
    }
    tool = Tool(name="f", description="does\n  it", parameters={"properties": properties, "required": ["a"]})
    assert signature(tool) == "f(a: string who, b?: x|2, c?: number[], d?: any) - does it"
    assert signature(Tool(name="g")) == "g()"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (True, "any"),
        ({"type": "array", "items": True}, "any[]"),
        ({"type": "array", "items": False}, "any[]"),
        ({"type": "array", "items": {"type": ["string", "null"]}}, "any[]"),
        ({"type": ["string", "null"]}, "string|null"),
        ({"type": ["array", "null"], "items": {"type": "integer"}}, "integer[]|null"),
        ({"enum": ["a", 1, True, None, {"b": 2}]}, 'a|1|true|null|{"b": 2}'),
        ({"enum": []}, "any"),
        ({"$ref": "#/$defs/x"}, "any"),
        ({"anyOf": [{"type": "string"}, True]}, "any"),
        ({"const": 3, "description": "three"}, "any three"),
        ({"type": "object", "properties": {"b": False}}, "object"),
    ],
)
def test_every_shape_of_schema_has_a_word(schema: Any, said: str) -> None:
    assert signature(Tool(name="f", parameters={"properties": {"a": schema}})) == f"f(a?: {said})"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(["string", "array", "object", "integer", "number", "boolean", "null"])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text(max_size=4), inner, max_size=2)
    some = st.lists(inner, min_size=1, max_size=2)
    parts: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, unique=True, min_size=1, max_size=3), "enum": st.lists(VALUES, max_size=3),
        "const": VALUES, "default": VALUES, "description": st.text(max_size=4), "$ref": st.text(max_size=4),
        "items": inner, "prefixItems": some, "properties": named, "$defs": named, "additionalProperties": inner,
        "required": st.lists(st.text(max_size=3), unique=True, max_size=2), "anyOf": some, "allOf": some, "oneOf": some,
        "not": inner, "x": VALUES,
    }  # fmt: skip
    sound = st.fixed_dictionaries({}, optional=parts)
    return sound | st.dictionaries(st.sampled_from(sorted(parts)), VALUES, max_size=3)


SCHEMAS = st.recursive(st.booleans() | st.just({}), _schemas, max_leaves=5)


@pytest.mark.parametrize("kind", ["smollm2", "chatml"])
@given(properties=st.dictionaries(st.text(max_size=4), SCHEMAS, max_size=3), more=SCHEMAS)
@settings(max_examples=60, deadline=None)
def test_whatever_tool_a_request_may_bring_can_be_rendered(
    renderer_of: Callable[[str], Renderer], kind: str, properties: dict[str, Any], more: Any
) -> None:
    parameters = {**(more if isinstance(more, dict) else {}), "type": "object", "properties": properties}
    with contextlib.suppress(BadRequest):
        tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        with_tools = renderer_of(kind).start([Message(role="user", content="hi")], tools)
        assert len(with_tools) > len(renderer_of(kind).start([Message(role="user", content="hi")]))


def test_hermes_is_known_by_name() -> None:
    assert isinstance(FORMATS["hermes"], Hermes)
