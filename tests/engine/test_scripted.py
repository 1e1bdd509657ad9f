"""The scripted engine keeps the promises of an Engine, and its renderer those of a renderer."""

from __future__ import annotations

import pytest

from honed.engine.scripted import END, START, ByteRenderer, ScriptedEngine, ScriptedSettings
from honed.errors import CorruptData, NotFound
from honed.protocols import Request
from honed.testing import check_engine
from honed.types import Message, Sampling, Tool, ToolCall, Version

RENDERER = ByteRenderer()
VERSION = Version(line="support", number=1, uri="scripted", digest="d")


def prompt(text: str) -> tuple[int, ...]:
    return tuple(RENDERER.start((Message(role="user", content=text),)))


async def said(engine: ScriptedEngine, text: str, version: str = "") -> str:
    sampling = Sampling(max_tokens=100, stop_ids=RENDERER.stop_ids)
    request = Request(id="r", ids=prompt(text), sampling=sampling, version=version)
    ids = [id async for chunk in engine.submit(request) for id in chunk.ids]
    assert ids[-1] == END
    return RENDERER.decode(ids[:-1])


async def test_it_is_an_engine() -> None:
    async def make() -> ScriptedEngine:
        return ScriptedEngine()

    await check_engine(make, prompt("hello world"), versions=[VERSION])


async def test_rules_go_before_replies_and_replies_are_by_version() -> None:
    engine = ScriptedEngine(
        ScriptedSettings(rules={"bill": "pay"}, replies={"": "base", "*": "other: {prompt}", "support@1": "one"})
    )
    await engine.load(VERSION)
    await engine.load(Version(line="support", number=2, uri="scripted", digest="d"))
    assert await said(engine, "hello") == "base"
    assert await said(engine, "hello", "support@1") == "one"
    assert await said(engine, "hello", "support@2") == "other: hello"
    assert await said(engine, "my bill", "support@1") == "pay"
    assert await said(ScriptedEngine(), "é🎉") == "é🎉"


async def test_versions_must_be_loaded_and_corrupt_ones_never_are() -> None:
    engine = ScriptedEngine(ScriptedSettings(corrupt=("support@1",)))
    with pytest.raises(CorruptData):
        await engine.load(VERSION)
    with pytest.raises(NotFound):
        await said(engine, "x", "support@1")


async def test_an_unloaded_version_ends_its_requests_first() -> None:
    engine = ScriptedEngine()
    await engine.load(VERSION)
    request = Request(
        id="r", ids=prompt("abc"), sampling=Sampling(max_tokens=9, stop_ids=(END,)), version="support@1"
    )  # fmt: skip
    chunks = engine.submit(request)
    ids = list((await anext(chunks)).ids)
    await engine.unload("support@1")
    with pytest.raises(NotFound):
        await said(engine, "x", "support@1")
    ids += [id async for chunk in chunks for id in chunk.ids]
    assert ids == [*b"abc", END]
    assert (await engine.status()).versions == ()


def test_the_renderer_writes_messages_by_hand_computed_ids() -> None:
    user = Message(role="user", content="hi")
    assert RENDERER.start((user,)) == [START, *b"user\nhi", END, START, *b"assistant\n"]
    assert RENDERER.extend((user,), closed=True) == RENDERER.start((user,))
    assert RENDERER.extend((user,), closed=False) == [END, *RENDERER.start((user,))]
    assert RENDERER.start((user,), (Tool(name="f"),))[: len(b"system\ntools") + 1] == [START, *b"system\ntools"]


def test_what_was_rendered_as_a_call_is_read_as_the_call() -> None:
    reply = Message(role="assistant", content=None, tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 1}'),))
    stream = RENDERER.reply_stream()
    shown = "".join(stream.push([id]) for id in RENDERER.encode_reply(reply))
    read = stream.finish("stop")
    assert shown == ""
    assert [(call.name, call.arguments) for call in read.tool_calls] == [("f", '{"a": 1}')]
    assert read.content is None


def test_no_half_character_and_no_half_stop_string_is_shown() -> None:
    stream = RENDERER.reply_stream(stop=("STOP",))
    shown = [stream.push([id]) for id in "é STAR STO".encode()]
    assert "".join(shown) == "é STAR "
    assert all("\ufffd" not in piece for piece in shown)
    assert stream.push(list(b"P")) == ""
    assert stream.stopped
    assert stream.finish("stop").content == "é STAR "


def test_a_call_that_is_no_json_is_text() -> None:
    stream = RENDERER.reply_stream()
    text = "so <tool_call>{oops</tool_call>"
    stream.push(list(text.encode()))
    read = stream.finish("stop")
    assert (read.content, read.tool_calls) == (text, ())
