"""TokenModel over the scripted engine: exact tokens along a conversation, stop strings, retries, readers that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest

from honed import codec
from honed.engine.scripted import END, START, ByteRenderer, ScriptedEngine, ScriptedSettings
from honed.engine.token_model import TokenModel
from honed.errors import BadRequest, EngineError
from honed.protocols import Call, Chunk, Delta, Form, Request
from honed.types import Message, Sampling, Span, Tool, Turn, Usage

CALL = '<tool_call>{"name": "look", "arguments": {"id": "A1"}}</tool_call>'
LOOK = Tool(name="look", parameters={"type": "object", "properties": {"id": {"type": "string"}}})
RENDERER = ByteRenderer()


class Listening:
    """A scripted engine that remembers what it was asked and told, and dies when it is told to."""

    def __init__(self, settings: ScriptedSettings | None = None, *, deaths: Sequence[tuple[int, bool]] = ()) -> None:
        self.inner = ScriptedEngine(settings)
        self.asked: list[Request] = []
        self.cancelled: list[str] = []
        self.closed: list[str] = []
        self._deaths = list(deaths)
        self.piece = 1

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams `piece` tokens a chunk; a death is (tokens said before it, whether to ask again)."""
        self.asked.append(request)
        death, said = (self._deaths.pop(0) if self._deaths else None), 0
        held: list[Chunk] = []
        try:
            async with contextlib.aclosing(self.inner.submit(request)) as chunks:
                async for chunk in chunks:
                    if death is not None and said >= death[0]:
                        raise EngineError("killed", retryable=death[1])
                    held.append(chunk)
                    if len(held) == self.piece or chunk.finish is not None:
                        said += len(held)
                        yield joined(held)
                        held = []
        finally:
            self.closed.append(request.id)

    async def cancel(self, id: str) -> None:
        """Passes it on."""
        self.cancelled.append(id)
        await self.inner.cancel(id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk of several."""
    last = chunks[-1]
    return Chunk(
        id=last.id,
        ids=sum((chunk.ids for chunk in chunks), ()),
        logprobs=sum((chunk.logprobs for chunk in chunks), ()),
        raw_logprobs=sum((chunk.raw_logprobs for chunk in chunks), ()),
        top=sum((chunk.top for chunk in chunks), ()),
        version=last.version,
        finish=last.finish,
        usage=last.usage,
    )


def user(content: str) -> Message:
    return Message(role="user", content=content)


def call(*messages: Message | str, id: str = "turn_1", **fields: Any) -> Call:
    said = tuple(message if isinstance(message, Message) else user(message) for message in messages)
    sampling = Sampling(**{"max_tokens": 200, **fields.pop("sampling", {})})
    return Call(id=id, messages=said, sampling=sampling, **{"line": "m", **fields})


async def deltas_of(model: TokenModel, asked: Call) -> list[Delta]:
    return [delta async for delta in model.stream(asked)]


async def test_a_turn_holds_the_ids_that_were_read_and_sampled() -> None:
    model = TokenModel(Listening(), RENDERER)
    turn = await model.reply(call("hé", id="chatcmpl-7", tools=(LOOK,), sampling={"seed": 3}))
    output = (*"hé".encode(), END)
    assert turn.id == "chatcmpl-7"
    assert turn.trace.startswith("trace_")
    assert turn.parent is None
    assert turn.added == (user("hé"),)
    assert turn.context == tuple(RENDERER.start([user("hé")], [LOOK]))
    assert turn.output == output
    assert turn.logprobs == turn.raw_logprobs == tuple(-0.01 - (id % 7) / 10 for id in output)
    assert turn.reply == Message(role="assistant", content="hé")
    assert turn.tools == codec.tools_digest((LOOK,))
    assert (turn.finish, turn.model, turn.versions) == ("stop", "m", (Span(version="", count=4),))
    assert turn.usage is not None
    assert (turn.usage.prompt, turn.usage.output) == (len(turn.context), 4)
    assert turn.sampling == Sampling(max_tokens=200, seed=3)


async def test_a_conversation_is_read_again_as_it_was_sampled() -> None:
    engine = Listening(ScriptedSettings(rules={"first": "  one ", "second": "two"}))
    model = TokenModel(engine, RENDERER)
    one = await model.reply(call("first", id="a"))
    told = Message(role="assistant", content="one")  # the client trimmed what it was told
    two = await model.reply(call("first", told, "second", id="b"))
    assert (two.parent, two.trace) == ("a", one.trace)
    assert two.added == (user("second"),)
    assert two.context == (START, *b"user\nsecond", END, START, *b"assistant\n")
    assert engine.asked[1].ids == (*one.context, *one.output, *two.context)
    three = await model.reply(call("first", told, "second", two.reply, "third", id="c"))
    assert three.parent == "b"
    assert engine.asked[2].ids == (*one.context, *one.output, *two.context, *two.output, *three.context)


async def test_a_reply_that_was_cut_off_is_closed_before_it_is_extended() -> None:
    engine = Listening()
    model = TokenModel(engine, RENDERER)
    one = await model.reply(call("hello", id="a", sampling={"max_tokens": 3}))
    assert (one.finish, one.output) == ("length", tuple(b"hel"))
    two = await model.reply(call("hello", one.reply, "on", id="b"))
    assert two.context[0] == END
    assert engine.asked[1].ids == tuple(RENDERER.start([user("hello"), one.reply, user("on")]))


async def test_a_conversation_can_branch_at_any_turn() -> None:
    model = TokenModel(Listening(), RENDERER)
    one = await model.reply(call("hi", id="a"))
    left, right = [await model.reply(call("hi", one.reply, text, id=text)) for text in ("left", "right")]
    assert left.parent == right.parent == "a"
    assert left.trace == right.trace == one.trace
    edited = await model.reply(call("hi", Message(role="assistant", content="ho"), "left", id="e"))
    assert edited.parent is None
    assert edited.trace != one.trace
    assert len(edited.added) == 3


@pytest.mark.parametrize(
    "change",
    [{"tenant": "B"}, {"line": "other"}, {"version": "m@0"}, {"tools": (LOOK,)}, {"trace": "trace_x"}],
    ids=lambda change: next(iter(change)),
)
async def test_only_the_same_tenant_line_version_tools_and_trace_are_extended(change: dict[str, Any]) -> None:
    model = TokenModel(Listening(), RENDERER)
    one = await model.reply(call("hi", id="a", tenant="A"))
    other = await model.reply(call("hi", one.reply, "on", id="b", **{"tenant": "A", **change}))
    assert other.parent is None
    assert other.context == tuple(RENDERER.start(other.added, change.get("tools", ())))
    assert (await model.reply(call("hi", one.reply, "on", id="c", tenant="A"))).parent == "a"


async def test_attempts_that_read_the_same_stay_apart_by_trace_or_session() -> None:
    model = TokenModel(Listening(), RENDERER)
    for name in ("trace_1", "trace_2"):
        await model.reply(call("hi", id=f"{name}.0", trace=name))
    told = Message(role="assistant", content="hi")
    for name in ("trace_1", "trace_2"):
        turn = await model.reply(call("hi", told, "on", id=f"{name}.1", trace=name))
        assert (turn.parent, turn.trace) == (f"{name}.0", name)
    for name in ("ann", "bob"):
        await model.reply(call("yo", id=f"{name}.0", tags={"session": name}))
    for name in ("ann", "bob"):
        turn = await model.reply(call("yo", Message(role="assistant", content="yo"), "on", tags={"session": name}))
        assert turn.parent == f"{name}.0"


async def test_users_who_say_the_same_are_kept_apart() -> None:
    model = TokenModel(Listening(), RENDERER)
    for name in ("ann", "bob"):
        await model.reply(call("hi", id=f"{name}.0", tags={"user": name, "session": "s"}))
    for name in ("ann", "bob"):
        told = Message(role="assistant", content="hi")
        turn = await model.reply(call("hi", told, "on", tags={"user": name, "session": "s"}))
        assert turn.parent == f"{name}.0"


async def test_of_turns_that_read_alike_the_one_is_extended_whose_reply_was_given_back() -> None:
    engine = Listening(ScriptedSettings(rules={"hi": CALL}))
    model = TokenModel(engine, RENDERER)
    said = [await model.reply(call("hi", id=id, tools=(LOOK,))) for id in ("a", "b")]
    for turn in said:
        result = Message(role="tool", content="found", tool_call_id=turn.reply.tool_calls[0].id, name="look")
        on = await model.reply(call("hi", turn.reply, result, id=f"{turn.id}.1", tools=(LOOK,)))
        assert (on.parent, on.trace) == (turn.id, turn.trace)
    renamed = (msgspec.structs.replace(said[0].reply.tool_calls[0], id="mine"),)
    other = Message(role="assistant", tool_calls=renamed)
    assert (await model.reply(call("hi", other, "on", tools=(LOOK,)))).parent == "b"  # the newest that reads so


async def test_of_replies_that_differ_in_space_the_one_is_extended_that_was_given_back() -> None:
    engine = Listening()
    model = TokenModel(engine, RENDERER)
    for text in ("so", " so"):
        engine.inner.settings = ScriptedSettings(replies={"*": text})
        await model.reply(call("hi", id=text))
    for text in ("so", " so"):
        told = Message(role="assistant", content=text)
        assert (await model.reply(call("hi", told, "on"))).parent == text


async def test_a_trace_that_is_named_later_is_found_as_well() -> None:
    model = TokenModel(Listening(), RENDERER)
    one = await model.reply(call("hi", id="a"))
    assert (await model.reply(call("hi", one.reply, "on", trace=one.trace))).parent == "a"


async def test_the_index_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    model = TokenModel(Listening(), RENDERER, index_size=3)

    async def say(trace: str, *messages: Message | str) -> Turn:
        return await model.reply(call(*messages, id=f"{trace}.{len(messages)}", trace=trace))

    one, two = [await say(text, text) for text in ("one", "two")]
    assert (await say("one", "one", one.reply, "on")).parent == "one.1"  # used now, so "two" is the oldest
    await say("three", "three")
    assert (await say("one", "one", one.reply, "off")).parent == "one.1"
    assert (await say("two", "two", two.reply, "on")).parent is None


async def test_a_template_that_rewrites_history_starts_a_branch() -> None:
    class Rewriting(ByteRenderer):
        def extend(self, messages: Sequence[Message], *, closed: bool) -> None:  # type: ignore[override]
            return None

    model = TokenModel(Listening(), Rewriting())
    one = await model.reply(call("hi", id="a"))
    two = await model.reply(call("hi", one.reply, "on", id="b"))
    assert two.parent is None
    assert len(two.added) == 3


@pytest.mark.parametrize("piece", [1, 3, 100])
async def test_a_stop_string_ends_the_reply_and_the_request_says_what_it_cost(piece: int) -> None:
    engine = Listening(ScriptedSettings(replies={"*": "one STOP two three"}))
    engine.piece = piece
    model = TokenModel(engine, RENDERER)
    seen = await deltas_of(model, call("hi", sampling={"stop": ("STOP",)}))
    turn = seen[-1].turn
    assert turn is not None
    assert "".join(delta.text for delta in seen) == turn.reply.content == "one "
    assert turn.finish == "stop"
    assert bytes(turn.output) == b"one STOP"
    assert len(turn.logprobs) == len(turn.raw_logprobs) == 8 == turn.versions[0].count
    assert sum(len(delta.ids) for delta in seen) == 8
    assert turn.usage is not None
    assert turn.usage.output >= 8
    assert engine.cancelled == ([] if piece == 100 else [engine.asked[0].id])


async def test_a_stop_string_counts_where_the_limit_falls_on_it() -> None:
    model = TokenModel(Listening(ScriptedSettings(replies={"*": "oneS more"})), RENDERER)
    turn = await model.reply(call("hi", sampling={"stop": ("S",), "max_tokens": 4}))
    assert (turn.reply.content, turn.finish) == ("one", "stop")


async def test_half_a_stop_string_at_the_end_is_shown_after_all() -> None:
    model = TokenModel(Listening(ScriptedSettings(replies={"*": "one ST"})), RENDERER)
    seen = await deltas_of(model, call("hi", sampling={"stop": ("STOP",)}))
    assert "".join(delta.text for delta in seen) == "one ST"
    assert "ST" not in "".join(delta.text for delta in seen[:-1])


async def test_the_engine_is_told_the_renderers_stop_ids() -> None:
    engine = Listening()
    await TokenModel(engine, RENDERER).reply(call("hi", sampling={"stop_ids": (104,)}))
    assert engine.asked[0].sampling.stop_ids == (104, END)


async def test_tool_calls_are_parsed_and_never_shown_as_text() -> None:
    model = TokenModel(Listening(ScriptedSettings(replies={"*": "so: " + CALL})), RENDERER)
    seen = await deltas_of(model, call("hi", tools=(LOOK,)))
    turn = seen[-1].turn
    assert turn is not None
    assert turn.finish == "tool_calls"
    assert [(each.name, each.arguments) for each in turn.reply.tool_calls] == [("look", '{"id": "A1"}')]
    assert "tool_call" not in "".join(delta.text for delta in seen)


async def test_tools_that_may_not_be_called_are_not_offered() -> None:
    model = TokenModel(Listening(), RENDERER)
    turn = await model.reply(call("hi", tools=(LOOK,), tool_choice="none"))
    assert turn.tools == ""
    assert turn.context == tuple(RENDERER.start([user("hi")]))


class Formless(Listening):
    """Notes the grammar that it is asked for and replies as if there were none."""

    def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.grammar = request.sampling.grammar
        return super().submit(
            msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=""))
        )


async def test_a_form_reaches_the_engine_as_a_grammar_and_is_kept_with_the_turn() -> None:
    engine = Formless()
    model, other = TokenModel(engine, RENDERER), Tool(name="other")
    turn = await model.reply(call("hi", tools=(LOOK, other), form=Form(tools=("look",), single=True)))
    assert engine.grammar == turn.sampling.grammar == RENDERER.grammar([LOOK], True, None)
    assert not turn.sampling.whole
    turn = await model.reply(call("hi", form=Form(schema={"type": "object"})))
    assert engine.grammar == RENDERER.grammar([], False, {"type": "object"})


async def test_a_form_of_a_tool_that_is_not_offered_is_refused() -> None:
    model = TokenModel(Listening(), RENDERER)
    for choice in ("auto", "none"):
        with pytest.raises(BadRequest, match="'gone' must be called, but is not offered"):
            await model.reply(call("hi", tools=(LOOK,), tool_choice=choice, form=Form(tools=("gone",))))


async def test_an_engine_without_grammars_refuses_a_form() -> None:
    with pytest.raises(BadRequest, match="follows no grammar"):
        await TokenModel(Listening(), RENDERER).reply(call("hi", form=Form(schema={})))


async def test_top_alternatives_come_with_their_tokens() -> None:
    model = TokenModel(Listening(), RENDERER)
    seen = await deltas_of(model, call("hi", sampling={"top_logprobs": 2}))
    assert [len(delta.top[0]) for delta in seen if delta.ids] == [2, 2, 2]


async def test_an_engine_that_dies_before_it_said_anything_is_asked_once_more() -> None:
    engine = Listening(deaths=[(0, True)])
    assert (await TokenModel(engine, RENDERER).reply(call("hi"))).reply.content == "hi"
    assert len(engine.asked) == 2
    assert engine.asked[0].id != engine.asked[1].id


@pytest.mark.parametrize(
    ("deaths", "num_asked"), [([(0, True)] * 3, 2), ([(0, False)], 1), ([(1, True)], 1)], ids=["twice", "fatal", "late"]
)
async def test_it_is_not_asked_again_twice_or_in_vain_or_in_the_middle(
    deaths: list[tuple[int, bool]], num_asked: int
) -> None:
    engine = Listening(deaths=deaths)
    with pytest.raises(EngineError, match="killed"):
        await TokenModel(engine, RENDERER).reply(call("hi"))
    assert len(engine.asked) == num_asked


async def test_what_an_engine_said_before_it_died_is_kept_as_an_error() -> None:
    kept = list[Turn]()
    model = TokenModel(Listening(deaths=[(2, True)]), RENDERER)
    with pytest.raises(EngineError):
        [delta async for delta in model.stream(call("hello", id="a"), on_cut=kept.append)]
    (turn,) = kept
    assert (turn.id, turn.finish, turn.reply.content, turn.output) == ("a", "error", "he", tuple(b"he"))
    assert len(turn.logprobs) == len(turn.raw_logprobs) == turn.versions[0].count == 2
    told = Message(role="assistant", content="he")
    assert (await model.reply(call("hello", told, "on"))).parent is None  # its ids are not known to the end


async def test_an_engine_that_died_before_it_said_anything_leaves_no_turn() -> None:
    kept = list[Turn]()
    model = TokenModel(Listening(deaths=[(0, False)]), RENDERER)
    with pytest.raises(EngineError):
        [delta async for delta in model.stream(call("hello"), on_cut=kept.append)]
    assert kept == []


async def test_a_death_after_the_stop_string_costs_the_usage_alone() -> None:
    engine = Listening(ScriptedSettings(replies={"*": "one S two"}), deaths=[(5, True)])
    turn = await TokenModel(engine, RENDERER).reply(call("hi", sampling={"stop": ("S",)}))
    assert (turn.reply.content, turn.finish, turn.usage) == ("one ", "stop", None)


async def test_a_reader_that_leaves_ends_the_request_and_what_was_said_is_kept() -> None:
    engine, kept = Listening(), list[Turn]()
    stream = TokenModel(engine, RENDERER).stream(call("hello"), on_cut=kept.append)
    async with contextlib.aclosing(stream):
        await anext(stream)
        await anext(stream)
    (turn,) = kept
    assert (turn.finish, turn.reply.content, turn.output) == ("cancelled", "he", tuple(b"he"))
    assert engine.closed == [engine.asked[0].id]


async def test_a_reader_that_is_cancelled_while_it_waits_is_the_same() -> None:
    engine, kept = Listening(ScriptedSettings(delay_seconds=0.01)), list[Turn]()
    said = asyncio.Event()

    async def read() -> None:
        async for delta in TokenModel(engine, RENDERER).stream(call("x" * 150), on_cut=kept.append):
            if delta.ids:
                said.set()

    task = asyncio.create_task(read())
    await said.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (turn,) = kept
    assert turn.finish == "cancelled"
    assert 1 <= len(turn.output) < 150
    assert engine.closed == [engine.asked[0].id]


async def test_a_reply_across_a_swap_keeps_its_spans_and_is_not_extended() -> None:
    class Swapping(Listening):
        async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
            for version, id in (("m@1.0", 104), ("m@1.0", 105), ("m@1.1", END)):
                yield Chunk(id=request.id, ids=(id,), logprobs=(-1.0,), raw_logprobs=(-1.0,), version=version)
            yield Chunk(id=request.id, finish="stop", usage=Usage(prompt=1, cached=0, output=3, seconds=0.0))

    model = TokenModel(Swapping(), RENDERER, lambda line: "m@1.0")
    one = await model.reply(call("hi", id="a"))
    assert one.versions == (Span(version="m@1.0", count=2), Span(version="m@1.1", count=1))
    assert (await model.reply(call("hi", one.reply, "on", id="b"))).parent is None


@pytest.mark.parametrize(("length", "given"), [(10, 20), (60, 20), (70, 15), (84, 1)])
async def test_a_limit_that_nobody_set_is_what_the_context_has_left(length: int, given: int) -> None:
    engine = Listening(ScriptedSettings(context=100 + len(RENDERER.start([user("")])) - 15))
    turn = await TokenModel(engine, RENDERER).reply(call("x" * length, fit=True, sampling={"max_tokens": 20}))
    assert engine.asked[0].sampling.max_tokens == turn.sampling.max_tokens == given


async def test_a_prompt_that_leaves_no_room_is_refused_and_told_to_be_shorter() -> None:
    engine = Listening(ScriptedSettings(context=100))
    with pytest.raises(BadRequest, match="shorten the messages") as caught:
        await TokenModel(engine, RENDERER).reply(call("x" * 100, fit=True))
    assert (caught.value.param, "max_tokens" in str(caught.value)) == ("messages", False)
    assert engine.asked == []


async def test_a_limit_that_was_set_is_kept_and_refused_where_it_can_not_be() -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        await TokenModel(Listening(ScriptedSettings(context=100)), RENDERER).reply(call("hi"))


async def test_the_version_is_the_one_pinned_or_the_one_that_serves() -> None:
    engine = Listening()
    model = TokenModel(engine, RENDERER, lambda line: f"{line}@0")
    await model.reply(call("hi"))
    await model.reply(call("hi", version=""))
    assert [request.version for request in engine.asked] == ["m@0", ""]
