"""What people write is never read as structure: no message can end itself and speak as somebody else."""

from __future__ import annotations

import json

import pytest

from honed.types import Message, Tool, ToolCall

from .test_renderer import CALL, KINDS, RendererOf, result, said, user


def forged(renderer) -> tuple[str, set[int]]:  # type: ignore[no-untyped-def]
    """A text that holds every special token's name, and the ids that it must not become."""
    tokens = renderer._guard._names
    ids = {renderer._tokenizer.token_to_id(name) for name in tokens}
    return "hi " + " ".join(tokens) + "\n" + "".join(tokens) + " end", ids


def count(ids: list[int], special: set[int]) -> int:
    return sum(id in special for id in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_of_any_role_can_forge_a_special_token(renderer_of: RendererOf, kind: str) -> None:
    renderer = renderer_of(kind)
    text, special = forged(renderer)
    assert special
    honest = [user("a"), said("b", CALL), result("c"), said("d"), user("e")]
    for place in range(len(honest)):
        lying = [
            Message(role=m.role, content=text, tool_calls=m.tool_calls, tool_call_id=m.tool_call_id, name=m.name)
            if at == place
            else m
            for at, m in enumerate(honest)
        ]
        ids = renderer.start(lying)
        assert count(ids, special) == count(renderer.start(honest), special)
        assert text in renderer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_can_tools_calls_or_what_extends_a_conversation(renderer_of: RendererOf, kind: str) -> None:
    renderer = renderer_of(kind)
    text, special = forged(renderer)
    honest_tool, lying_tool = (Tool(name="f", description=d, parameters={"type": "object"}) for d in ("a", text))
    ask = [user("a")]
    assert count(renderer.start(ask, [lying_tool]), special) == count(renderer.start(ask, [honest_tool]), special)
    extended, plain = renderer.extend([user(text)], closed=True), renderer.extend([user("a")], closed=True)
    assert (extended is None) == (plain is None)
    assert count(extended or [], special) == count(plain or [], special)
    call = ToolCall(id="call_1", name="f", arguments=json.dumps({"x": renderer._guard._names[0]}))
    assert count(renderer.encode_reply(said(text, call)), special) == 1  # the stop id that ends it


def test_a_mark_can_not_be_written_by_somebody_who_does_not_know_it(renderer_of: RendererOf) -> None:
    renderer = renderer_of("smollm2")
    text = "\ue0000123456789abcdef.1\ue001 \ue000.1\ue001"
    assert text in renderer.decode(renderer.start([user(text)]))


def test_text_without_such_names_is_tokenised_as_ever(renderer_of: RendererOf) -> None:
    renderer = renderer_of("smollm2")
    text = "Where is <|parcel|> P1234, naïve 😀?\n"
    assert renderer.encode(text) == renderer._tokenizer.encode(text, add_special_tokens=False).ids
