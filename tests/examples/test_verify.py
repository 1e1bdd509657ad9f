"""The support agent's verifier: one right call, every fact stated, and nothing else counts as served."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from support import world
from support.verify import judge

from honed.types import Message, ToolCall

SEEDS = range(2000, 2200)


def refund() -> world.Case:
    """A refund that the back end accepts."""
    cases = (world.case(seed, "after") for seed in SEEDS)
    return next(found for found in cases if found.kind == "refund" and "error" not in found.result)


def calling(name: str, arguments: Any) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Message(role="assistant", tool_calls=(ToolCall(id="call_1", name=name, arguments=text),))


def saying(text: str | None) -> Message:
    return Message(role="assistant", content=text)


RESULT = Message(role="tool", content="{}", tool_call_id="call_1")


@pytest.mark.parametrize("era", get_args(world.Era))
def test_the_right_conversation_is_served(era: world.Era) -> None:
    for seed in SEEDS:
        found = world.case(seed, era)
        score = judge(found, world.gold(found))
        assert score.value == 1.0, found
        assert score.parts == {"format": 1.0, "call": 1.0, "answer": 1.0}


def test_the_old_conversation_is_not_served_after_the_change_and_only_then() -> None:
    for seed in SEEDS:
        before, after = world.case(seed, "before"), world.case(seed, "after")
        assert judge(after, world.gold(before)).value == float(before.kind not in world.CHANGED), before


@pytest.mark.parametrize("era", get_args(world.Era))
def test_another_customers_conversation_is_not_served(era: world.Era) -> None:
    for seed in SEEDS:
        assert judge(world.case(seed, era), world.gold(world.case(seed + 1, era))).value == 0.0


@pytest.mark.parametrize("era", get_args(world.Era))
def test_an_answer_may_be_in_other_words_and_case(era: world.Era) -> None:
    for seed in SEEDS:
        found = world.case(seed, era)
        facts = ", ".join(reversed([fact.upper() for fact in found.facts]))
        assert judge(found, [*world.gold(found)[:2], saying(f"Here is what I know: {facts}!")]).value == 1.0


@pytest.mark.parametrize("era", get_args(world.Era))
def test_every_fact_is_needed(era: world.Era) -> None:
    for seed in SEEDS:
        found = world.case(seed, era)
        for fact in found.facts:
            rest = [other for other in found.facts if other != fact]
            score = judge(found, [*world.gold(found)[:2], saying(f"I know {' and '.join(rest)}.")])
            assert (score.value, score.parts["call"]) == (0.0, 1.0), (found, fact)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("get_order", {}),
        ("refund", {"amount": 1}),
        ("refund", {"order_id": "A0000"}),
        ("refund", {"note": "more than was asked for"}),
    ],
)
def test_another_call_earns_the_format_and_the_answer_only(name: str, change: dict[str, Any]) -> None:
    found = refund()
    score = judge(found, [calling(name, {**found.arguments, **change}), RESULT, saying(found.answer)])
    assert (score.value, score.parts) == (0.0, {"format": 1.0, "call": 0.0, "answer": 1.0})


@pytest.mark.parametrize("arguments", ['{"order_id": ', "[1]", "null", ""])
def test_arguments_that_are_no_object_are_a_wrong_call(arguments: str) -> None:
    found = refund()
    assert judge(found, [calling("refund", arguments), RESULT, saying(found.answer)]).parts["call"] == 0.0


def test_a_fact_that_is_missing_is_named() -> None:
    found = refund()
    wrong = found.answer.replace("two weeks", "one week")
    score = judge(found, [*world.gold(found)[:2], saying(wrong)])
    assert (score.value, score.parts["call"], score.parts["answer"]) == (0.0, 1.0, 0.0)
    assert "two weeks" in score.evidence


def test_an_answer_without_a_call_is_not_served() -> None:
    found = refund()
    score = judge(found, [saying(found.answer)])
    assert (score.value, score.parts) == (0.0, {"format": 0.0, "call": 0.0, "answer": 1.0})


def test_two_calls_are_not_served() -> None:
    found = refund()
    call = world.gold(found)[0]
    score = judge(found, [call, RESULT, call, RESULT, saying(found.answer)])
    assert (score.value, score.parts["format"]) == (0.0, 0.0)


@pytest.mark.parametrize("messages", [[], [saying("")], [saying(None)]])
def test_silence_earns_nothing(messages: list[Message]) -> None:
    assert judge(refund(), messages).parts == {"format": 0.0, "call": 0.0, "answer": 0.0}


def test_a_call_without_an_answer_is_not_served() -> None:
    found = refund()
    for said in ([world.gold(found)[0]], list(world.gold(found)[:2])):
        assert judge(found, said).parts == {"format": 1.0, "call": 1.0, "answer": 0.0}


@pytest.mark.parametrize("written", ["340", "134", "3.34", "34.5", "34th", "A34"])
def test_a_number_inside_another_is_not_that_number(written: str) -> None:
    found = world.Case(
        seed=0, era="after", kind="baggage", request="", tool="baggage_fee", arguments={}, result={"fee": 34},
        answer="", facts=("34",),
    )  # fmt: skip
    call = calling("baggage_fee", {})
    assert judge(found, [call, RESULT, saying(f"It costs {written} dollars.")]).value == 0.0
    for sentence in ("It costs 34 dollars.", "It costs 34.", "The fee: $34, please."):
        assert judge(found, [call, RESULT, saying(sentence)]).value == 1.0
