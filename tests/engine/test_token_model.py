"""TokenModel over the scripted engine: exact to the token along a conversation, and honest when it is cut."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import pytest

from honed.engine.scripted import END, ByteRenderer, ScriptedEngine, ScriptedSettings
from honed.engine.token_model import TokenModel
from honed.errors import EngineError
from honed.protocols import Call, Chunk, Delta, Request
from honed.types import Message, Sampling, Tool, Turn, Version

RENDERER = ByteRenderer()


class Spy(ScriptedEngine):
    """Keeps what it was asked; its first `deaths` requests die, each after `said` tokens."""

    def __init__(self, *, deaths: int = 0, said: int = 0, retryable: bool = True, settings: ScriptedSettings) -> None:
        super().__init__(settings)
        self.asked: list[Request] = []
        self.cancelled: list[str] = []
        self._deaths, self._said, self._retryable = deaths, said, retryable

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        dies, number = len(self.asked) <= self._deaths, 0
        if dies and not self._said:
            raise EngineError("died", retryable=self._retryable)
        async with contextlib.aclosing(super().submit(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                number += 1
                if dies and number == self._said:
                    raise EngineError("died", retryable=self._retryable)

    async def cancel(self, id: str) -> None:
        self.cancelled.append(id)
        await super().cancel(id)


def said(role: str, content: str) -> Message:
    return Message(role=role, content=content)  # type: ignore[arg-type]


def model_of(*, deaths: int = 0, tokens: int = 0, retryable: bool = True, **script: object) -> tuple[TokenModel, Spy]:
    engine = Spy(deaths=deaths, said=tokens, retryable=retryable, settings=ScriptedSettings.model_validate(script))
    return TokenModel(engine, RENDERER), engine


def call(id: str, *messages: Message, **more: object) -> Call:
    return Call(id=id, messages=messages, line="support", sampling=Sampling(max_tokens=64), **more)  # type: ignore[arg-type]


async def test_a_conversation_is_extended_by_its_new_ids_only() -> None:
    model, engine = model_of()
    first = await model.reply(call("t1", said("user", "one")))
    second = await model.reply(call("t2", said("user", "one"), first.reply, said("user", "two")))
    third = await model.reply(
        call("t3", said("user", "one"), first.reply, said("user", "two"), second.reply, said("user", "x"))
    )
    assert (first.parent, second.parent, third.parent) == (None, "t1", "t2")
    assert first.trace == second.trace == third.trace
    assert first.output == (*b"one", END)
    assert second.added == (said("user", "two"),)
    assert second.context == tuple(RENDERER.extend((said("user", "two"),), closed=True))
    assert engine.asked[1].ids == (*first.context, *first.output, *second.context)
    assert engine.asked[2].ids == (*engine.asked[1].ids, *second.output, *third.context)
    assert (
        len(second.output)
        == len(second.logprobs)
        == len(second.raw_logprobs)
        == sum(span.count for span in second.versions)
    )


async def test_a_reply_cut_by_its_length_is_closed_by_the_context_of_the_next() -> None:
    model, engine = model_of()
    cut = Call(id="t1", messages=(said("user", "abcdef"),), line="support", sampling=Sampling(max_tokens=3))
    first = await model.reply(cut)
    assert (first.finish, first.reply.content) == ("length", "abc")
    second = await model.reply(call("t2", *cut.messages, first.reply, said("user", "y")))
    assert second.context[0] == END
    assert engine.asked[1].ids == (*first.context, *b"abc", *second.context)


async def test_an_edited_history_begins_a_branch_of_its_own() -> None:
    model, _ = model_of()
    first = await model.reply(call("t1", said("user", "one")))
    second = await model.reply(call("t2", said("user", "ONE"), first.reply, said("user", "two")))
    third = await model.reply(call("t3", said("user", "one"), said("assistant", "other"), said("user", "two")))
    assert (second.parent, third.parent) == (None, None)
    assert len({first.trace, second.trace, third.trace}) == 3
    assert len(second.added) == 3
    assert second.context == tuple(RENDERER.start(second.added))


@pytest.mark.parametrize(
    "change",
    [{"tenant": "b"}, {"version": "support@1"}, {"tools": (Tool(name="look"),)}],
    ids=["tenant", "version", "tools"],
)
async def test_what_differs_in_tenant_version_or_tools_is_never_extended(change: dict) -> None:
    model, engine = model_of()
    await engine.load(Version(line="support", number=1, uri="scripted", digest="d"))
    first = await model.reply(call("t1", said("user", "one"), tenant="a", version=""))
    asked = {"tenant": "a", "version": "", **change}
    second = await model.reply(call("t2", said("user", "one"), first.reply, said("user", "two"), **asked))
    assert second.parent is None
    assert second.trace != first.trace


async def test_a_bounded_index_costs_a_branch_and_no_correctness() -> None:
    model = TokenModel(ScriptedEngine(), RENDERER, index_size=1)
    first = await model.reply(call("t1", said("user", "one")))
    await model.reply(call("t2", said("user", "another")))
    third = await model.reply(call("t3", said("user", "one"), first.reply, said("user", "two")))
    assert third.parent is None
    assert third.reply.content == "two"


async def test_a_stop_string_ends_the_reply_at_its_token_and_nothing_of_it_is_shown() -> None:
    model, engine = model_of(replies={"*": "one STOP two"})
    asked = Call(id="t1", messages=(said("user", "x"),), line="l", sampling=Sampling(max_tokens=64, stop=("STOP",)))
    deltas = [delta async for delta in model.stream(asked)]
    turn = deltas[-1].turn
    assert turn is not None
    assert "".join(delta.text for delta in deltas) == "one " == turn.reply.content
    assert turn.output == tuple(b"one STOP")
    assert turn.finish == "stop"
    assert engine.cancelled == [engine.asked[0].id]


async def test_an_engine_that_dies_before_a_token_is_asked_once_more() -> None:
    model, engine = model_of(deaths=1)
    turn = await model.reply(call("t1", said("user", "one")))
    assert turn.reply.content == "one"
    assert [request.ids for request in engine.asked] == [turn.context] * 2


@pytest.mark.parametrize(
    ("deaths", "tokens", "retryable", "asked"), [(2, 0, True, 2), (1, 2, True, 1), (1, 0, False, 1)],
    ids=["twice", "after tokens", "for good"],
)  # fmt: skip
async def test_no_more_than_one_retry_none_after_a_token_none_of_the_hopeless(
    deaths: int, tokens: int, retryable: bool, asked: int
) -> None:
    model, engine = model_of(deaths=deaths, tokens=tokens, retryable=retryable)
    with pytest.raises(EngineError):
        await model.reply(call("t1", said("user", "one")))
    assert len(engine.asked) == asked


async def test_a_reader_who_leaves_is_a_cancelled_turn_with_what_was_said() -> None:
    model, engine = model_of()
    cut: list[Turn] = []
    deltas: AsyncGenerator[Delta, None] = model.stream(call("t1", said("user", "abcdef")), on_cut=cut.append)
    assert [(await anext(deltas)).text for _ in range(3)] == ["a", "b", "c"]
    await deltas.aclose()
    assert [(turn.id, turn.finish, turn.reply.content, turn.output) for turn in cut] == [
        ("t1", "cancelled", "abc", tuple(b"abc"))
    ]
    assert (await engine.status()).running == 0
