import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from honed.text import ReplyStream
from honed.types import Message, Tool

from .templates import smollm2

TOOLS = (Tool(name="f"),)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é😀"}}</tool_call>'
PIECES = [
    "Hello",
    " ",
    "\n",
    "é",
    "😀",
    "👩‍🚀",
    "漢字",
    "<",
    "<tool",
    "</tool_call>",
    "STOP",
    "STO",
    "12",
    CALL,
    "<tool_call>{oops",
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
cuts = st.lists(st.integers(min_value=0, max_value=200), max_size=12)
ANY = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def read(stream: ReplyStream, ids: Sequence[int], cuts: Sequence[int]) -> tuple[list[str], Message]:
    """What was shown, piece by piece, and the message, with the ids pushed in these portions."""
    bounds = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    shown = [stream.push(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    return shown, stream.finish("stop")


def one_by_one(ids: Sequence[int]) -> range:
    return range(len(ids))


@ANY
@given(text=texts, cuts=cuts)
def test_without_tools_the_text_is_the_text_however_the_ids_are_cut(text: str, cuts: list[int]) -> None:
    renderer = smollm2()
    shown, message = read(renderer.reply_stream(), renderer.encode(text), cuts)
    assert message == Message(role="assistant", content=text)
    assert "".join(shown) == text


@ANY
@given(text=texts, cuts=cuts)
def test_nothing_of_a_call_is_shown_and_the_message_does_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    renderer = smollm2()
    ids = renderer.encode(text)
    shown, message = read(renderer.reply_stream(TOOLS), ids, cuts)
    _, other = read(renderer.reply_stream(TOOLS), ids, one_by_one(ids))
    assert message.content == other.content
    assert [call.arguments for call in message.tool_calls] == [call.arguments for call in other.tool_calls]
    before = text.partition("<tool_call>")[0]
    assert before.startswith("".join(shown))
    if not message.tool_calls:
        assert message.content == text


@ANY
@given(text=texts, cuts=cuts)
def test_a_stop_string_is_never_shown_nor_its_start(text: str, cuts: list[int]) -> None:
    renderer = smollm2()
    stream = renderer.reply_stream(stop=("STOP", "漢字"))
    shown, message = read(stream, renderer.encode(text), cuts)
    found = [at for at in (text.find("STOP"), text.find("漢字")) if at >= 0]
    assert message.content == text[: min(found, default=len(text))]
    assert stream.stopped is bool(found)
    assert (message.content or "").startswith("".join(shown))
    if found:
        assert "".join(shown) == message.content


@ANY
@given(ids=st.lists(st.integers(min_value=0, max_value=49151), max_size=40), cuts=cuts)
def test_any_ids_at_all_give_one_text(ids: list[int], cuts: list[int]) -> None:
    renderer = smollm2()
    shown, message = read(renderer.reply_stream(), ids, cuts)
    _, other = read(renderer.reply_stream(), ids, one_by_one(ids))
    assert message == other
    assert (message.content or "").startswith("".join(shown))


@pytest.mark.parametrize("text", ["😀", "a 😀 b", "👩‍🚀🏳️‍🌈"])
def test_no_half_emoji_is_shown(text: str) -> None:
    renderer = smollm2()
    ids = renderer.encode(text)
    shown, _ = read(renderer.reply_stream(), ids, one_by_one(ids))
    assert "" in shown  # an emoji takes several tokens
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    renderer = smollm2()
    ids = renderer.encode("ab😀")[:-1]
    shown, message = read(renderer.reply_stream(), ids, one_by_one(ids))
    assert "".join(shown) == "ab"
    assert message.content == "ab\ufffd"


def test_the_start_of_a_stop_string_is_shown_once_it_can_be_none() -> None:
    renderer = smollm2()
    stream = renderer.reply_stream(stop=("\n\nUser",))
    assert stream.push(renderer.encode("one\n")) == "one"
    assert stream.push(renderer.encode("two")) == "\ntwo"


def test_the_earliest_of_two_stop_strings_counts_even_inside_one_token() -> None:
    renderer = smollm2()
    stream = renderer.reply_stream(stop=("lo", "el", ""))
    assert stream.push(renderer.encode("Hello there")) == "H"
    assert stream.finish().content == "H"


def test_what_follows_a_stop_string_is_not_part_of_the_reply() -> None:
    renderer = smollm2()
    stream = renderer.reply_stream(stop=(".",))
    stream.push(renderer.encode("Yes. No"))
    assert stream.push(renderer.encode(" never")) == ""
    assert stream.finish().content == "Yes"


def test_the_stop_id_is_not_text() -> None:
    renderer = smollm2()
    ids = renderer.encode_reply(Message(role="assistant", content="Hi"))
    assert ids[-1] == renderer.stop_ids[0]
    assert read(renderer.reply_stream(), ids, ()) == (["Hi"], Message(role="assistant", content="Hi"))


def test_a_call_comes_back_as_it_was_written() -> None:
    renderer = smollm2()
    text = 'Let me see. <tool_call>\n{"name": "f", "arguments": {"b":1,  "a" : [2.50]}}\n</tool_call>'
    shown, message = read(renderer.reply_stream(TOOLS), renderer.encode(text), range(99))
    assert "".join(shown) == "Let me see. "
    assert (message.content, message.tool_calls[0].name) == ("Let me see.", "f")
    assert message.tool_calls[0].arguments == '{"b":1,  "a" : [2.50]}'


def test_a_call_alone_has_no_content() -> None:
    renderer = smollm2()
    message = read(renderer.reply_stream(TOOLS), renderer.encode(CALL), ())[1]
    assert message.content is None
    assert len(message.tool_calls) == 1


def test_calls_round_trip_through_encode_reply() -> None:
    renderer = smollm2()
    first = read(renderer.reply_stream(TOOLS), renderer.encode(CALL + CALL), ())[1]
    again = read(renderer.reply_stream(TOOLS), renderer.encode_reply(first), ())[1]
    assert [(call.name, call.arguments) for call in again.tool_calls] == [("f", '{"a": "é😀"}')] * 2
    assert len({call.id for call in (*first.tool_calls, *again.tool_calls)}) == 4


def test_malformed_calls_are_kept_as_text_and_counted() -> None:
    renderer = smollm2()
    text = f'Look: {CALL}<tool_call>{{"name": "f", "arguments": {{</tool_call> <tool_call>nothing'
    stream = renderer.reply_stream(TOOLS)
    shown, message = read(stream, renderer.encode(text), range(99))
    assert "".join(shown) == "Look: "
    assert (message.content, message.tool_calls, stream.malformed) == (text, (), 2)


def test_without_tools_a_call_is_text() -> None:
    renderer = smollm2()
    stream = renderer.reply_stream()
    assert read(stream, renderer.encode(CALL), range(99))[1] == Message(role="assistant", content=CALL)
    assert stream.malformed == 0
