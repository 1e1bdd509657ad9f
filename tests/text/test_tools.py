import pytest

from honed.text.tools import FORMATS, Hermes, signature
from honed.types import Tool, ToolCall


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


def test_hermes_is_known_by_name() -> None:
    assert isinstance(FORMATS["hermes"], Hermes)
