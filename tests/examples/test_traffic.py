"""The customers' process against a real gateway over HTTP: the loop of tools, the feedback, the corrections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from api.served import Served, serving
from support import env, traffic, world

from honed.engine.scripted import ByteRenderer, ScriptedSettings
from honed.loop.demonstrations import corrected
from honed.types import Feedback, Message, Trace


def written(message: Message) -> str:
    """An assistant's message as the scripted engine must say it."""
    calls = [f'<tool_call>{{"name": "{c.name}", "arguments": {c.arguments}}}</tool_call>' for c in message.tool_calls]
    return (message.content or "") + "".join(calls)


def script(found: world.Case, era: world.Era) -> ScriptedSettings:
    """A model that serves the case as was right in `era`, and says sorry to an error."""
    call, result, answer = world.gold(world.case(found.seed, era))
    rules = {found.request: written(call), result.content or "": written(answer), "error": "Sorry, that failed."}
    return ScriptedSettings(rules=rules)


def broken_by_the_change() -> world.Case:
    """A request whose tool was renamed, from a seed whose customers post corrections."""
    cases = (world.case(seed, "after") for seed in range(0, 4000, 4))
    return next(found for found in cases if found.kind == "parcel" and "error" not in found.result)


async def serve_one(served: Served, found: world.Case, capsys: pytest.CaptureFixture[str]) -> tuple[dict, Trace, list]:
    await traffic.send(f"{served.url}/v1", found.era, found.seed, 1, 4, "support", 512)  # a token a byte
    served.drain()
    row = json.loads(capsys.readouterr().out)
    (trace,) = served.store.traces.list(origin="production")
    whole = served.store.traces.get(trace.id)
    return row, whole, served.store.feedback.of([whole.id, *(turn.id for turn in whole.turns)])


async def test_a_served_request_is_one_trace_with_its_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = broken_by_the_change()
    with serving(tmp_path, script(found, "after")) as served:
        row, trace, rows = await serve_one(served, found, capsys)
    assert (row["success"], row["corrected"], row["kind"], row["changed"]) == (1.0, False, "parcel", True)
    assert [turn.finish for turn in trace.turns] == ["tool_calls", "stop"]
    assert row["turn"] == trace.turns[-1].id
    assert [(feedback.name, feedback.value, feedback.target) for feedback in rows] == [("success", 1.0, row["turn"])]
    made = env.task_from_trace(trace)
    assert made is not None
    assert made.spec == {"seed": found.seed, "era": "after"}


async def test_a_correction_is_the_conversation_as_it_should_have_been_from_the_request_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = broken_by_the_change()
    with serving(tmp_path, script(found, "before")) as served:
        row, trace, rows = await serve_one(served, found, capsys)
    assert (row["success"], row["corrected"]) == (0.0, True)
    said = {feedback.name: feedback for feedback in rows}
    assert said["success"].value == 0.0
    assert len(trace.turns) == 2, "the wrong call was made, and answered"
    shown = corrected(ByteRenderer(), trace, said["correction"], None)
    assert shown.turns[0].added == world.prompt(found)
    assert [turn.reply for turn in shown.turns] == [world.gold(found)[0], world.gold(found)[2]]


async def test_feedback_sent_twice_is_kept_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = broken_by_the_change()
    with serving(tmp_path, script(found, "before")) as served:
        _, trace, rows = await serve_one(served, found, capsys)
        again = [{"target": f.target, "name": f.name, "value": f.value, "kind": f.kind, "key": f.key} for f in rows]
        async with traffic.httpx.AsyncClient(base_url=f"{served.url}/v1") as http:
            (await http.post("feedback", json=again)).raise_for_status()
        served.drain()
        kept: list[Feedback] = served.store.feedback.of([trace.id, *(turn.id for turn in trace.turns)])
    assert sorted(feedback.id for feedback in kept) == sorted(feedback.id for feedback in rows)


async def test_one_seed_in_four_corrects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, ScriptedSettings(replies={"*": "I can't help."})) as served:
        await traffic.send(f"{served.url}/v1", "after", 4000, 8, 4, "support")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["seed"] for row in rows if row["corrected"]} == {4000, 4004}
    assert {row["success"] for row in rows} == {0.0}
