"""The support agent as an environment and as a maker of tasks, with the verifier in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support import env, world

from honed import codec
from honed.env.verify import VerifierHost
from honed.protocols import Outcome
from honed.types import Message, Sampling, Tool, ToolCall, Trace, Turn


class Replies:
    """A session that says what it is told to, in order."""

    trace = "trace_1"

    def __init__(self, *replies: Message) -> None:
        self.replies = list(replies)
        self.seen: list[tuple[Message, ...]] = []
        self.tools: tuple[Tool, ...] = ()

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), sampling: Sampling | None = None
    ) -> Turn:
        self.seen.append(tuple(messages))
        self.tools = tuple(tools)
        return Turn(
            id=f"turn_{len(self.seen)}", trace="trace_1", reply=self.replies.pop(0), sampling=Sampling(), model="m",
            finish="stop", at=0.0,
        )  # fmt: skip

    @property
    def turns(self) -> tuple[Turn, ...]:
        return ()


def trace(**tags: str) -> Trace:
    return Trace(id="trace_1", origin="production", tags=tags, at=0.0)


async def run(found: world.Case, *replies: Message) -> tuple[Outcome, Replies]:
    session = Replies(*replies)
    return await env.SupportEnvironment().run(env.task(found, "train"), session, None), session


async def test_the_back_end_answers_the_right_call() -> None:
    found = world.case(1, "after")
    call, result, answer = world.gold(found)
    outcome, session = await run(found, call, answer)
    assert outcome.messages == (call, result, answer)
    assert outcome.state == {"calls": [{"name": found.tool, "arguments": found.arguments}]}
    assert outcome.fault is None
    assert session.seen[0] == world.prompt(found)
    assert session.tools == world.tools("after")


async def test_a_call_of_the_era_before_is_told_so_and_is_no_fault() -> None:
    seed = next(seed for seed in range(100) if world.case(seed, "after").kind == "parcel")
    old = world.gold(world.case(seed, "before"))
    outcome, _ = await run(world.case(seed, "after"), old[0], old[2])
    assert "there is no tool track_parcel" in (outcome.messages[1].content or "")
    assert (outcome.state, outcome.fault) == ({"calls": []}, None)


async def test_an_agent_that_only_calls_is_stopped() -> None:
    found = world.case(1, "after")
    calls = [ToolCall(id=f"call_{i}", name="get_order", arguments=f'{{"order_id": "A{i}"}}') for i in range(9)]
    _, session = await run(found, *(Message(role="assistant", tool_calls=(call,)) for call in calls))
    assert len(session.seen) == world.MAX_TURNS


async def test_the_verifier_judges_in_a_process_of_its_own() -> None:
    found = world.case(1, "after")
    task = env.task(found, "train")
    host = VerifierHost()
    try:
        for said, value in ((world.gold(found), 1.0), (world.gold(found)[:1], 0.0)):
            outcome = Outcome(messages=said)
            score = await host.score(task.verifier, task, trace(), outcome, None, timeout_seconds=60.0)
            assert (score.value, score.verifier) == (value, "support.verify:check")
    finally:
        await host.close()


def test_a_task_shows_the_model_the_prompt_and_keeps_the_rest_from_it() -> None:
    found = world.case(1, "after")
    task = env.task(found, "train")
    assert task.id == codec.task_id(task)
    assert task.prompt == world.prompt(found)
    assert task.spec == {"seed": 1, "era": "after"}
    assert all(found.answer not in (message.content or "") for message in task.prompt)


def test_a_production_trace_becomes_the_task_of_its_ticket() -> None:
    made = env.task_from_trace(trace(case="1234", era="after"))
    assert made is not None
    assert (made.id, made.source) == (env.task(world.case(1234, "after"), "train").id, "trace_1")


@pytest.mark.parametrize(
    "tags", [{}, {"case": "7"}, {"case": "7", "era": "before"}, {"case": "seven", "era": "after"}, {"era": "after"}]
)
def test_other_traces_become_no_task(tags: dict[str, str]) -> None:
    assert env.task_from_trace(trace(**tags)) is None


def test_a_suite_holds_as_many_changed_kinds_as_others() -> None:
    tasks = env.suite("after", "holdout", env.HOLDOUT_SEEDS, 10)
    changed = [task for task in tasks if task.kind in world.CHANGED]
    assert len(tasks) == 20
    assert len({task.id for task in tasks}) == 20
    assert {task.suite for task in changed} == {env.TARGET}
    assert len(changed) == 10
    assert {task.suite for task in tasks if task not in changed} == {env.GUARD}
    assert {task.suite for task in env.suite("before", "holdout", 0, 1)} == {
        env.TARGET + "-before",
        env.GUARD + "-before",
    }
