"""What changes in the demo's world between its eras, what stays, and how much a prompt may hold."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from support import env, lessons, world

from honed.env.chat import ToolError, check_arguments
from honed.loop.demonstrations import demonstrate
from honed.model.load import prepare
from honed.text import load_renderer
from honed.types import ToolCall

SEEDS = range(1000, 1400)
ERAS = get_args(world.Era)


def first(kind: str, *, failed: bool = False) -> int:
    """The first seed of a kind, whose tool works (or fails)."""
    return next(
        seed
        for seed in SEEDS
        if (found := world.case(seed, "before")).kind == kind and ("error" in found.result) is failed
    )


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="call_1", name=name, arguments=arguments)


@pytest.mark.parametrize("era", ERAS)
def test_a_seed_decides_everything(era: world.Era) -> None:
    assert [world.case(seed, era) for seed in SEEDS] == [world.case(seed, era) for seed in SEEDS]


def test_both_eras_share_the_request_and_its_luck() -> None:
    for seed in SEEDS:
        before, after = world.case(seed, "before"), world.case(seed, "after")
        assert (before.kind, before.request) == (after.kind, after.request)
        assert ("error" in before.result) == ("error" in after.result)


def test_every_kind_comes_and_one_in_five_tools_fails() -> None:
    cases = [world.case(seed, "after") for seed in SEEDS]
    kinds = Counter(found.kind for found in cases)
    assert set(kinds) == set(world.KINDS)
    assert min(kinds.values()) > len(SEEDS) / 12
    assert 0.1 < sum("error" in found.result for found in cases) / len(cases) < 0.3


@pytest.mark.parametrize("era", ERAS)
def test_the_right_call_passes_its_own_schema_and_gets_the_result(era: world.Era) -> None:
    for seed in SEEDS:
        found = world.case(seed, era)
        made = world.gold(found)[0].tool_calls[0]
        arguments = check_arguments(made, world.tools(era))
        assert world.execute(found, made.name, arguments) == found.result


def test_what_the_answer_must_state_stands_in_the_request_the_result_or_the_policy() -> None:
    for seed in SEEDS:
        found = world.case(seed, "after")
        seen = f"{found.request} {world.system('after')} {found.result}".lower()
        assert all(fact.lower() in seen for fact in found.facts), found


def test_there_are_six_tools_with_typed_parameters() -> None:
    for era in ERAS:
        tools = world.tools(era)
        assert len(tools) == 6
        for tool in tools:
            properties = tool.parameters["properties"]
            assert properties
            assert all("type" in value or "enum" in value for value in properties.values())
            assert tool.parameters["required"] == list(properties)


def test_the_other_kinds_are_untouched_by_the_change() -> None:
    for seed in SEEDS:
        before, after = world.case(seed, "before"), world.case(seed, "after")
        same = (before.tool, before.arguments, before.result, before.answer, before.facts) == (
            after.tool,
            after.arguments,
            after.result,
            after.answer,
            after.facts,
        )
        assert same is (before.kind not in world.CHANGED), before


def test_the_parcel_tool_is_renamed() -> None:
    old = world.gold(world.case(first("parcel"), "before"))[0].tool_calls[0]
    with pytest.raises(ToolError, match="there is no tool track_parcel"):
        check_arguments(old, world.tools("after"))


def test_cancelling_needs_a_reason_that_the_customer_gave() -> None:
    found = world.case(first("cancel"), "after")
    with pytest.raises(ToolError, match="'reason' is a required property"):
        check_arguments(call("cancel_order", '{"order_id": "A1000"}'), world.tools("after"))
    said = world.REASONS[found.arguments["reason"]]
    assert any(phrase in found.request for phrase in said)


def test_refunds_are_counted_in_cents() -> None:
    seed = first("refund")
    before, after = world.case(seed, "before"), world.case(seed, "after")
    assert after.arguments["amount"] == 100 * before.arguments["amount"]
    assert world.execute(after, "refund", before.arguments) == {"error": "nothing found"}


def test_the_policy_doubles_the_days() -> None:
    seed = first("refund")
    assert "one week" in world.system("before")
    assert "one week" in world.case(seed, "before").facts
    assert "two weeks" in world.system("after")
    assert "two weeks" in world.case(seed, "after").facts


def test_the_right_call_is_compared_by_value() -> None:
    found = world.case(first("hotel"), "after")
    assert world.is_right_call(found, found.tool, {**found.arguments, "nights": float(found.arguments["nights"])})
    assert not world.is_right_call(found, found.tool, {**found.arguments, "nights": found.arguments["nights"] + 1})
    assert not world.is_right_call(found, "get_order", found.arguments)


def test_seeds_of_lessons_holdout_and_traffic_never_meet() -> None:
    held = {task.spec["seed"] for task in [*lessons.holdout_before(), *lessons.holdout_after()]}
    taught = {task.spec["seed"] for task, _ in [*lessons.demonstrations(), *lessons.demonstrations_after()]}
    assert env.HOLDOUT_SEEDS <= min(held) <= max(held) < env.DEMONSTRATION_SEEDS <= min(taught)


def test_the_lessons_are_as_many_as_they_say() -> None:
    assert len(lessons.demonstrations()) == 64
    assert {task.split for task, _ in lessons.demonstrations()} == {"train"}
    assert {task.spec["era"] for task, _ in lessons.demonstrations_after()} == {"after"}
    suites = Counter(task.suite for task in lessons.holdout_after())
    assert suites == {env.TARGET: 64, env.GUARD: 64}
    assert {task.split for task in lessons.holdout_after()} == {"holdout"}


def test_prompts_and_attempts_are_short() -> None:
    renderer = load_renderer(prepare("smollm2", None).directory)
    for era in ERAS:
        tools = world.tools(era)
        assert len(renderer.start(world.prompt(world.case(1, era))[:1], tools)) <= 200
        for seed in SEEDS:
            found = world.case(seed, era)
            shown = demonstrate(renderer, world.prompt(found), tools, world.gold(found), line="x", at=0.0)
            assert sum(len(turn.context) + len(turn.output) for turn in shown.turns) <= 400
