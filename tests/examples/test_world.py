import json
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from support import env, lessons, world
from support.verify import VERIFIER, check, judge

from honed.env.chat import check_arguments
from honed.model.load import prepare
from honed.protocols import Outcome
from honed.text import Renderer, load_renderer
from honed.types import Message, Score, ToolCall, Trace

SEEDS = range(300)
ERAS: tuple[world.Era, world.Era] = ("before", "after")


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> world.Era:
    return request.param


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(prepare("smollm2").directory)


def cases(era: world.Era) -> Iterator[world.Case]:
    return (world.case(seed, era) for seed in SEEDS)


def passes(found: world.Case, messages: tuple[Message, ...]) -> bool:
    return judge(found, messages).value == 1.0


def calling(found: world.Case, *calls: tuple[str, object], answer: str | None = None) -> tuple[Message, ...]:
    """The gold conversation with other calls, and with another answer."""
    made = tuple(
        ToolCall(id=f"call_{i}", name=name, arguments=json.dumps(args)) for i, (name, args) in enumerate(calls)
    )
    call, result, last = world.gold(found)
    replaced = msgspec.structs.replace(last, content=found.answer if answer is None else answer)
    return msgspec.structs.replace(call, tool_calls=made), result, replaced


def test_the_gold_conversation_passes_and_is_well_formed(era: world.Era) -> None:
    for found in cases(era):
        score = judge(found, world.gold(found))
        assert score == Score(
            value=1.0, parts={"format": 1.0, "call": 1.0, "answer": 1.0}, verifier=VERIFIER, evidence="served"
        ), found
        call = world.gold(found)[0].tool_calls[0]
        assert world.execute(found, call.name, check_arguments(call, world.tools(era))) == found.result


def test_an_empty_conversation_fails(era: world.Era) -> None:
    for found in cases(era):
        call, result, answer = world.gold(found)
        nothing = Message(role="assistant", content="")
        for messages in ((), (nothing,), (answer,), (call,), (call, result), (call, result, nothing), (result, answer)):
            assert not passes(found, messages), (found, messages)


def test_the_other_eras_conversation_fails_for_the_kinds_that_change(era: world.Era) -> None:
    other = ERAS[1 - ERAS.index(era)]
    for found in cases(era):
        same = passes(found, world.gold(world.case(found.seed, other)))
        assert same is (found.kind not in world.CHANGED), found


def test_another_seeds_conversation_fails(era: world.Era) -> None:
    for found in cases(era):
        assert not passes(found, world.gold(world.case(found.seed + 1, era)))


def test_a_changed_call_fails(era: world.Era) -> None:
    names = [tool.name for tool in world.tools(era)]
    for found in cases(era):
        assert passes(found, calling(found, (found.tool, found.arguments)))
        for key, value in found.arguments.items():
            wrong = value + 1 if isinstance(value, int) else value + "0"
            assert not passes(found, calling(found, (found.tool, {**found.arguments, key: wrong})))
            without = {name: kept for name, kept in found.arguments.items() if name != key}
            assert not passes(found, calling(found, (found.tool, without)))
        assert not passes(found, calling(found, (found.tool, {**found.arguments, "extra": 1})))
        assert not passes(found, calling(found, (found.tool, [found.arguments])))
        assert not passes(found, calling(found, (found.tool, found.arguments), (found.tool, found.arguments)))
        for name in names:
            assert passes(found, calling(found, (name, found.arguments))) is (name == found.tool)


def test_an_answer_without_one_of_its_facts_fails(era: world.Era) -> None:
    for found in cases(era):
        for fact in found.facts:
            for wrong in ("", "something", f"1{fact}", f"{fact}5", f"{fact}.5"):
                answer = found.answer.replace(fact, wrong)
                assert not passes(found, calling(found, (found.tool, found.arguments), answer=answer)), answer


def test_an_answer_may_be_in_other_words_and_case(era: world.Era) -> None:
    for found in cases(era):
        answer = "Sure! " + ", ".join(found.facts).upper() + "."
        assert passes(found, calling(found, (found.tool, found.arguments), answer=answer)), answer


def test_broken_arguments_are_no_crash() -> None:
    found = world.case(1, "after")
    call, result, answer = world.gold(found)
    broken = ToolCall(id="c", name=found.tool, arguments='{"a": ')
    score = judge(found, (msgspec.structs.replace(call, tool_calls=(broken,)), result, answer))
    assert (score.value, score.parts["format"], score.parts["call"]) == (0.0, 1.0, 0.0)


def test_both_eras_share_requests_and_luck_and_all_kinds_occur() -> None:
    before, after = list(cases("before")), list(cases("after"))
    assert [found.request for found in before] == [found.request for found in after]
    assert ["error" in found.result for found in before] == ["error" in found.result for found in after]
    counts = Counter(found.kind for found in before)
    assert set(counts) == set(world.KINDS)
    assert min(counts.values()) > 25
    assert 0.1 < sum("error" in found.result for found in before) / len(before) < 0.3


def test_a_case_is_the_same_every_time(era: world.Era) -> None:
    assert list(cases(era)) == list(cases(era))


def test_there_are_six_tools_with_typed_parameters(era: world.Era) -> None:
    tools = world.tools(era)
    assert len(tools) == 6
    for tool in tools:
        assert all("type" in schema or "enum" in schema for schema in tool.parameters["properties"].values())
    assert {tool.name for tool in world.tools("before")} ^ {tool.name for tool in world.tools("after")} == {
        "track_parcel",
        "locate_shipment",
    }


def test_the_tool_prompt_is_short(era: world.Era, renderer: Renderer) -> None:
    """Instructions and the six tools, before the request."""
    system, _ = world.prompt(world.case(1, era))
    assert len(renderer.start([system], world.tools(era))) <= 200


def test_a_whole_attempt_is_at_most_400_tokens(era: world.Era, renderer: Renderer) -> None:
    for found in cases(era):
        call, result, answer = world.gold(found)
        ids = renderer.start([*world.prompt(found), call, result], world.tools(era))
        assert len(ids) + len(renderer.encode_reply(answer)) <= 400
        assert max(len(renderer.encode_reply(reply)) for reply in (call, answer)) < world.MAX_TOKENS


# ------------------------------------------------------------------------------------------------------ tasks


def test_a_task_carries_its_case_and_hides_it_from_the_model(era: world.Era) -> None:
    for found in cases(era):
        task = env.task(found, "train")
        assert task.spec == {"seed": found.seed, "era": era}
        assert task.kind == found.kind
        outcome = Outcome(messages=world.gold(found))
        assert check(task, Trace(id="t", origin="rollout", at=0.0), outcome, None).value == 1.0
        assert found.answer not in " ".join(message.content or "" for message in task.prompt)


def test_suites_are_balanced_and_traffic_lessons_and_holdout_share_no_case() -> None:
    before, after = lessons.holdout_before(), lessons.holdout_after()
    assert Counter(task.suite for task in before) == {
        "support-changed-before": lessons.NUM_EACH_BEFORE,
        "support-unchanged-before": lessons.NUM_EACH_BEFORE,
    }
    assert Counter(task.suite for task in after) == {
        "support-changed": lessons.NUM_EACH,
        "support-unchanged": lessons.NUM_EACH,
    }
    assert all(task.split == "holdout" for task in (*before, *after))
    taught = {task.spec["seed"] for task, _ in (*lessons.demonstrations(), *lessons.demonstrations_after())}
    held = {task.spec["seed"] for task in (*before, *after)}
    assert not taught & held
    assert min(taught | held) >= env.HOLDOUT_SEEDS
    assert len({task.id for task in (*before, *after)}) == len(before) + len(after)


def test_demonstrations_pass_their_own_verifier() -> None:
    for task, messages in (*lessons.demonstrations(), *lessons.demonstrations_after()):
        assert passes(world.case(task.spec["seed"], task.spec["era"]), messages)


def test_a_production_trace_becomes_the_task_of_its_ticket() -> None:
    trace = Trace(id="trace_9", origin="production", tags={"case": "17", "era": "after"}, at=0.0)
    task = env.task_from_trace(trace)
    assert task is not None
    assert (task.spec, task.source, task.split) == ({"seed": 17, "era": "after"}, "trace_9", "train")
    assert task.id == env.task(world.case(17, "after"), "train").id
    for tags in ({}, {"case": "17"}, {"case": "17", "era": "before"}, {"case": "x", "era": "after"}):
        assert env.task_from_trace(Trace(id="t", origin="production", tags=tags, at=0.0)) is None
