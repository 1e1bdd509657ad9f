import json
from collections.abc import Sequence
from typing import Any

import pytest

from honed.env.chat import ToolError, answer_call, check_arguments, converse
from honed.types import Message, Sampling, Tool, ToolCall, Turn

ADD = Tool(
    name="add",
    description="adds",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
PROMPT = (Message(role="user", content="What is 1 + 2?"),)


class ScriptedSession:
    """Says the given replies in order, and keeps what it was shown."""

    trace = "trace_1"

    def __init__(self, *replies: Message) -> None:
        self.replies = list(replies)
        self.seen: list[tuple[Message, ...]] = []
        self.samplings: list[Sampling | None] = []

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), sampling: Sampling | None = None
    ) -> Turn:
        self.seen.append(tuple(messages))
        self.samplings.append(sampling)
        return Turn(
            id=f"turn_{len(self.seen)}", trace=self.trace, reply=self.replies.pop(0), sampling=Sampling(), model="m",
            finish="stop", at=0.0,
        )  # fmt: skip

    @property
    def turns(self) -> tuple[Turn, ...]:
        return ()


def calling(*calls: tuple[str, str], content: str | None = None) -> Message:
    made = tuple(ToolCall(id=f"call_{i}", name=name, arguments=text) for i, (name, text) in enumerate(calls))
    return Message(role="assistant", content=content, tool_calls=made)


def saying(text: str) -> Message:
    return Message(role="assistant", content=text)


async def add(name: str, arguments: dict[str, Any]) -> dict[str, int]:
    return {"sum": arguments["a"] + arguments["b"]}


async def test_call_then_result_then_answer() -> None:
    session = ScriptedSession(calling(("add", '{"a": 1, "b": 2}')), saying("3"))
    said = await converse(session, PROMPT, [ADD], add)
    assert said == [
        calling(("add", '{"a": 1, "b": 2}')),
        Message(role="tool", content='{"sum": 3}', tool_call_id="call_0", name="add"),
        saying("3"),
    ]
    assert session.seen == [PROMPT, (*PROMPT, *said[:2])]


async def test_an_answer_without_a_call_ends_it() -> None:
    session = ScriptedSession(saying("I know: 3"))
    assert await converse(session, PROMPT, [ADD], add) == [saying("I know: 3")]


async def test_several_calls_are_answered_in_order() -> None:
    session = ScriptedSession(calling(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')), saying("3 and 7"))
    said = await converse(session, PROMPT, [ADD], add)
    assert [(message.tool_call_id, message.content) for message in said[1:3]] == [
        ("call_0", '{"sum": 3}'),
        ("call_1", '{"sum": 7}'),
    ]


async def test_an_unknown_tool_is_told_to_the_model() -> None:
    session = ScriptedSession(calling(("divide", "{}")), saying("sorry"))
    said = await converse(session, PROMPT, [ADD], add)
    assert json.loads(said[1].content or "") == {"error": "there is no tool divide; tools: add"}
    assert said[-1] == saying("sorry")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"a": 1}', "add: 'b' is a required property"),
        ('{"a": 1, "b": "two"}', "add: 'two' is not of type 'integer'"),
        ('{"a": 1, "b": 2, "c": 3}', "add: Additional properties are not allowed ('c' was unexpected)"),
        ("[1, 2]", "add: [1, 2] is not of type 'object'"),
        ('{"a": 1, ', "the arguments of add are not JSON"),
        ('{"a": NaN, "b": 1}', "the arguments of add are not JSON"),
        ('{"a": 1, "b": ' + "9" * 30 + "}", "the arguments of add are not JSON"),
        ("[" * 100_000, "the arguments of add are not JSON"),
    ],
)
async def test_arguments_that_fail_the_schema_are_told_to_the_model(arguments: str, why: str) -> None:
    session = ScriptedSession(calling(("add", arguments)), saying("sorry"))
    said = await converse(session, PROMPT, [ADD], add)
    assert json.loads(said[1].content or "") == {"error": why}


async def test_a_tool_error_is_told_to_the_model() -> None:
    async def broken(name: str, arguments: dict[str, Any]) -> None:
        raise ToolError("the calculator is é")

    message = await answer_call(calling(("add", '{"a": 1, "b": 2}')).tool_calls[0], [ADD], broken)
    assert message.content == '{"error": "the calculator is é"}'


async def test_anything_else_that_the_environment_raises_propagates() -> None:
    async def broken(name: str, arguments: dict[str, Any]) -> None:
        raise ConnectionError("the back end is away")

    with pytest.raises(ConnectionError):
        await converse(ScriptedSession(calling(("add", '{"a": 1, "b": 2}'))), PROMPT, [ADD], broken)


async def test_the_same_call_again_ends_it_unanswered() -> None:
    again = calling(("add", '{"a": 1, "b": 2}'))
    session = ScriptedSession(again, again, saying("never asked"))
    said = await converse(session, PROMPT, [ADD], add, max_turns=9)
    assert [message.role for message in said] == ["assistant", "tool", "assistant"]
    assert session.replies == [saying("never asked")]


async def test_a_call_with_other_arguments_is_no_repetition() -> None:
    session = ScriptedSession(calling(("add", '{"a": 1, "b": 2}')), calling(("add", '{"a": 1, "b": 3}')), saying("4"))
    assert (await converse(session, PROMPT, [ADD], add))[-1] == saying("4")


async def test_turns_are_limited() -> None:
    replies = [calling(("add", json.dumps({"a": 1, "b": b}))) for b in range(9)]
    session = ScriptedSession(*replies)
    said = await converse(session, PROMPT, [ADD], add, max_turns=3)
    assert len(session.seen) == 3
    assert [message.role for message in said] == ["assistant", "tool"] * 3


async def test_sampling_is_passed_on() -> None:
    session = ScriptedSession(saying("3"))
    await converse(session, PROMPT, [ADD], add, sampling=Sampling(temperature=0.0))
    assert session.samplings == [Sampling(temperature=0.0)]


def test_right_arguments_come_back_parsed() -> None:
    call = ToolCall(id="c", name="add", arguments=' {"b": 2,\n "a": 1} ')
    assert check_arguments(call, [ADD]) == {"a": 1, "b": 2}
