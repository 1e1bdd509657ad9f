"""Demonstrations become token-exact traces that SFT can learn from and policy gradients refuse."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from honed.engine.scripted import ByteRenderer
from honed.errors import BadRequest
from honed.loop.demonstrations import corrected, demonstrate, messages_of
from honed.testing import RENDERER
from honed.types import Feedback, Message, Sampling, Trace, Turn

ASK = (Message(role="user", content="refund 7"),)
SHOWN = (
    Message(role="assistant", content="calling"),
    Message(role="tool", content="ok"),
    Message(role="assistant", content="done"),
)


def test_context_and_output_ids_are_those_that_serving_would_have_seen() -> None:
    shown = demonstrate(RENDERER, ASK, (), SHOWN, line="m", at=1.0)
    first, second = shown.turns
    assert first.context == tuple(RENDERER.start(ASK))
    assert first.output == (*b"calling", 257)
    assert second.context == tuple(RENDERER.extend([SHOWN[1]], closed=True))
    assert second.output == (*b"done", 257)
    assert (first.parent, second.parent) == (None, first.id)
    assert second.added == (SHOWN[1],)
    assert shown.origin == "demonstration"
    assert not first.logprobs


def test_the_same_demonstration_is_one_trace() -> None:
    one = demonstrate(RENDERER, ASK, (), SHOWN, line="m", at=1.0)
    assert demonstrate(RENDERER, ASK, (), SHOWN, line="m", at=2.0).id == one.id
    assert demonstrate(RENDERER, ASK, (), SHOWN[:1], line="m", at=1.0).id != one.id


class Closed(ByteRenderer):
    """A template that can't append."""

    def extend(self, messages: Sequence[Message], *, closed: bool) -> None:  # type: ignore[override]
        return None


def test_a_template_that_cannot_append_starts_a_new_branch() -> None:
    second = demonstrate(Closed(), ASK, (), SHOWN, line="m", at=1.0).turns[1]
    assert second.parent is None
    assert second.added == (*ASK, *SHOWN[:2])
    assert second.context == tuple(RENDERER.start((*ASK, *SHOWN[:2])))


@pytest.mark.parametrize("messages", [(), SHOWN[:2]])
def test_a_demonstration_must_end_with_a_reply(messages: tuple[Message, ...]) -> None:
    with pytest.raises(BadRequest, match="must end with the assistant's message"):
        demonstrate(RENDERER, ASK, (), messages, line="m", at=1.0)


def production() -> Trace:
    def turn(number: int, added: Message, said: str) -> Turn:
        return Turn(
            id=f"t.{number}",
            trace="t",
            parent=f"t.{number - 1}" if number else None,
            added=(added,),
            reply=Message(role="assistant", content=said),
            sampling=Sampling(),
            model="m",
            finish="stop",
            at=1.0,
        )

    turns = (turn(0, ASK[0], "wrong"), turn(1, Message(role="user", content="no!"), "wrong again"))
    return Trace(id="t", origin="production", line="m", turns=turns, tenant="acme", at=1.0)


def correction(target: str, value: object) -> Feedback:
    return Feedback(id="f", target=target, name="correction", kind="correction", value=value, at=5.0)


def test_a_correction_of_a_turn_follows_that_turns_prompt_and_of_a_trace_its_opening() -> None:
    value = [{"role": "assistant", "content": "right"}]
    of_turn = corrected(RENDERER, production(), correction("t.1", value), None)
    assert [m.content for m in of_turn.turns[0].added] == ["refund 7", "wrong", "no!"]
    of_trace = corrected(RENDERER, production(), correction("t", value), None)
    assert [m.content for m in of_trace.turns[0].added] == ["refund 7"]
    assert of_trace.tags == {"source": "t", "feedback": "f"}
    assert of_trace.tenant == "acme"


def test_openais_shape_of_a_tool_call_is_understood() -> None:
    value = [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}]
    (call,) = messages_of(correction("t", value))[0].tool_calls
    assert (call.name, call.arguments, call.id) == ("f", "{}", "call_0")


@pytest.mark.parametrize("value", [3, "text", [1], [{"content": "no role"}], [{"role": "robot"}], None])
def test_a_correction_that_is_no_list_of_messages_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="feedback 'f' is not a list of messages"):
        messages_of(correction("t", value))
