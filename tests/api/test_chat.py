"""The chat route as the unmodified openai client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from text.templates import smollm2

from api.served import LINE, Served, serving
from honed.engine.scripted import ScriptedSettings
from honed.types import Release, Version

CALL = '<tool_call>{"name": "look", "arguments": {"id": "A1"}}</tool_call>'
BOTCHED = '<tool_call>{"name": "look"</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}},
}
ASK = [{"role": "user", "content": "hello é🎉"}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = ScriptedSettings(rules={"use a tool": CALL, "say stop": "one STOP two"}, context=400)
    with serving(tmp_path, settings) as running:
        yield running


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_a_whole_answer_is_the_turn_and_its_receipt(served: Served, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=LINE, messages=ASK, metadata={"case": "7"})
    reply = raw.parse()
    assert reply.choices[0].message.content == "hello é🎉"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "support@0"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len("hello é🎉".encode()) + 1  # and the stop token
    assert raw.headers["x-honed-version"] == "support@0"
    assert served.drain() == 1
    turn = served.store.traces.turn(reply.id)
    assert turn.trace == raw.headers["x-honed-trace"]
    assert bytes(id for id in turn.output if id < 256).decode() == "hello é🎉"
    assert served.store.traces.get(turn.trace).tags == {"case": "7"}


def test_a_stream_says_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=LINE, messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello é🎉"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.model for chunk in chunks} == {"support@0"}


def test_tools_are_called_and_their_results_extend_the_conversation(served: Served, client: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": "use a tool"}]
    first = client.chat.completions.create(model=LINE, messages=messages, tools=[TOOL])
    call = first.choices[0].message.tool_calls[0]
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"id": "A1"}
    messages += [
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "it is here"},
    ]
    second = client.chat.completions.create(model=LINE, messages=messages, tools=[TOOL])
    served.drain()
    turns = served.store.traces.path(second.id)
    assert [turn.id for turn in turns] == [first.id, second.id]
    assert turns[1].parent == first.id
    assert [message.role for message in turns[1].added] == ["tool"]


def test_a_tool_of_any_sound_schema_is_offered_by_the_real_renderer(tmp_path: Path) -> None:
    properties = {
        "a": {"type": "array", "items": True}, "b": {"type": ["string", "null"]}, "c": {"$ref": "#/$defs/x"},
        "d": {"anyOf": [{"enum": [1, None, "x"]}, False]},
    }  # fmt: skip
    function = {"name": "look", "parameters": {"type": "object", "properties": properties, "$defs": {"x": False}}}
    with serving(tmp_path, ScriptedSettings(rules={"use a tool": CALL}), renderer=smollm2()) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        reply = client.chat.completions.create(  # type: ignore[call-overload]
            model=LINE,
            messages=[{"role": "user", "content": "use a tool"}],
            tools=[{"type": "function", "function": function}],
        )
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["look"]


@pytest.mark.parametrize("stream", [False, True])
def test_where_no_tool_may_be_called_what_looks_like_a_call_is_text(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, ScriptedSettings(rules={"use a tool": CALL}), renderer=smollm2()) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked = client.chat.completions.create(  # type: ignore[call-overload]
            model=LINE, messages=[{"role": "user", "content": "use a tool"}], tools=[TOOL], tool_choice="none",
            stream=stream,
        )  # fmt: skip
        choices = [reply.choices[0] for reply in (asked if stream else [asked])]
    said = [choice.delta if stream else choice.message for choice in choices]
    assert not any(each.tool_calls for each in said)
    assert "".join(each.content or "" for each in said) == CALL
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "smollm2"])
def test_calls_that_cannot_be_read_are_text_and_are_counted(tmp_path: Path, kind: str, stream: bool) -> None:
    rules = {"botch": CALL + BOTCHED + BOTCHED}
    with serving(tmp_path, ScriptedSettings(rules=rules), renderer=smollm2() if kind == "smollm2" else None) as running:
        body = {"model": LINE, "messages": [{"role": "user", "content": "botch"}], "tools": [TOOL], "max_tokens": 200}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={**body, "stream": stream})
        assert "look" in answer.text
        assert '"tool_calls":' not in answer.text
        assert "honed_malformed_calls_total 2.0" in httpx.get(f"{running.url}/metrics").text


def test_a_streamed_call_shows_no_text_of_it(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "use a tool"}]
    chunks = list(client.chat.completions.create(model=LINE, messages=messages, tools=[TOOL], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert [delta.tool_calls[0].function.name for delta in deltas if delta.tool_calls] == ["look"]


def test_a_stop_string_ends_the_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "say stop"}]
    reply = client.chat.completions.create(model=LINE, messages=messages, stop="STOP")
    assert reply.choices[0].message.content == "one "
    assert reply.choices[0].finish_reason == "stop"


def test_logprobs_come_one_a_token(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=LINE, messages=ASK, logprobs=True, top_logprobs=2, max_tokens=3)
    entries = reply.choices[0].logprobs.content
    assert len(entries) == 3
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
    assert reply.choices[0].finish_reason == "length"


def test_a_long_prompt_without_a_limit_is_answered_with_what_is_left(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "x" * 360}]
    reply = client.chat.completions.create(model=LINE, messages=asked)  # type: ignore[call-overload]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == 400
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model=LINE, messages=asked, max_tokens=80)  # type: ignore[call-overload]
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": "support@9"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, 400, "messages"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]}, 400,
         "tools[0].function.parameters"),
        ({"n": 2}, 400, "n"),
        ({"stop": [1]}, 400, "stop"),
        ({"seed": "x"}, 400, "seed"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"colour": "red"}, 400, "colour"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_named(served: Served, change: dict, status: int, param: str) -> None:
    response = httpx.post(f"{served.url}/v1/chat/completions", json={"model": LINE, "messages": ASK, **change})
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert httpx.post(f"{served.url}/v1/chat/completions", json={"model": LINE, "messages": ASK}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"3"])
def test_a_body_that_is_no_json_object_is_a_400(served: Served, body: bytes) -> None:
    response = httpx.post(f"{served.url}/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_routes_and_methods_fail_in_openais_shape(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert httpx.get(f"{served.url}/v1/chat/completions").status_code == 405


def test_models_health_and_metrics(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [LINE]
    client.chat.completions.create(model=LINE, messages=ASK)
    assert httpx.get(f"{served.url}/healthz").json()["version"] == "support@0"
    assert (
        'honed_requests_total{route="/v1/chat/completions",status="200"} 1.0' in httpx.get(f"{served.url}/metrics").text
    )


def test_a_release_is_followed_acknowledged_and_named_in_the_header(served: Served, client: openai.OpenAI) -> None:
    version = Version(line=LINE, number=1, parent=0, uri="scripted", digest="d", at=1.0)
    served.store.versions.put(version)
    served.store.releases.put(Release(id="release_1", line=LINE, version=version.id, kind="promote", at=2.0))
    deadline = time.monotonic() + 20
    while served.fleet.serving != version.id and time.monotonic() < deadline:
        time.sleep(0.02)
    raw = client.chat.completions.with_raw_response.create(model=LINE, messages=ASK)
    assert raw.headers["x-honed-version"] == raw.parse().model == "support@1"
    assert served.store.releases.acks("release_1") == {"replica-1": "support@1"}
    pinned = client.chat.completions.with_raw_response.create(model="support@0", messages=ASK)
    assert pinned.headers["x-honed-version"] == pinned.parse().model == "support@0"
