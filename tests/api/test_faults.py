"""What goes wrong around a gateway: readers who leave, disks and stores that refuse, bodies that mean harm."""

from __future__ import annotations

import asyncio
import http.client
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from api.served import LINE, Served, serving
from honed.engine.scripted import ScriptedSettings

ASK = [{"role": "user", "content": "hello"}]
BODY = {"model": LINE, "messages": ASK}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ScriptedSettings(context=600, delay_seconds=0.005)) as running:
        yield running


def chat(served: Served, body: object = BODY) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{served.url}/v1/chat/completions", content=content)


def until(done: Callable[[], bool]) -> None:
    """Waits for something that another thread is about to do."""
    for _ in range(2000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"support","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"support","messages":[{"role":"user","content":"x"}],"temperature":1' + b"0" * 400 + b"}",
        b'{"model":"support","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        json.dumps({**BODY, "stream": True, "stream_options": "x"}).encode(),
        json.dumps({**BODY, "tools": "x"}).encode(),
        b'{"model":' + b"[" * 100_000,
    ],
    ids=["surrogate", "huge", "nan", "options", "tools", "deep"],
)
def test_no_body_is_the_servers_fault(served: Served, body: bytes) -> None:
    answer = chat(served, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert chat(served).status_code == 200


def test_a_schema_nested_too_deep_is_refused(served: Served) -> None:
    schema: dict = {}
    for _ in range(300):
        schema = {"items": schema}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    assert chat(served, {**BODY, "tools": [tool]}).status_code == 400


def test_a_reader_who_leaves_a_stream_is_recorded_as_cancelled_with_what_was_said(served: Served) -> None:
    text = "x" * 75
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    body = {**BODY, "messages": [{"role": "user", "content": text}], "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    id = response.headers["x-honed-turn"]
    response.read(400)
    response.close()
    connection.close()
    until(lambda: served.drain() == 1)
    turn = served.store.traces.turn(id)
    assert turn.finish == "cancelled"
    assert 0 < len(turn.output) < len(text)
    assert turn.reply.content == "x" * len(turn.output)
    until(lambda: "honed_running_requests 0.0" in httpx.get(f"{served.url}/metrics").text)


def test_a_disk_that_refuses_is_counted_answers_go_on_and_feedback_is_not_promised(served: Served) -> None:
    served.gateway.capture.close()
    assert chat(served).status_code == 200
    health = httpx.get(f"{served.url}/healthz").json()
    assert health["capture_dropped"] == 1
    assert "honed_capture_dropped_records 1.0" in httpx.get(f"{served.url}/metrics").text
    row = {"target": "t", "name": "success", "value": 1}
    answer = httpx.post(f"{served.url}/v1/feedback", json=row)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


def test_a_locked_store_stops_no_answer_and_gets_every_turn_later(served: Served, tmp_path: Path) -> None:
    lock = sqlite3.connect(tmp_path / "honed.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    drained = threading.Thread(target=served.drain)
    drained.start()
    ids = [chat(served).json()["id"] for _ in range(5)]
    assert drained.is_alive() or served.store.traces.count() == 0
    assert httpx.get(f"{served.url}/healthz").json()["capture_backlog_bytes"] > 0
    lock.execute("ROLLBACK")
    lock.close()
    drained.join()
    served.drain()
    assert {served.store.traces.turn(id).finish for id in ids} == {"stop"}
    assert served.store.traces.count() == 5


def test_log_probabilities_name_tokens_by_their_text(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    asked = [{"role": "user", "content": "hé"}]
    reply = client.chat.completions.create(model=LINE, messages=asked, logprobs=True, max_tokens=3)  # type: ignore[call-overload]
    entries = reply.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in entries] == [
        ("h", [104]),
        ("token_id:195", None),  # half a character has no text
        ("token_id:169", None),
    ]
    chunks = client.chat.completions.create(  # type: ignore[call-overload]
        model=LINE, messages=asked, logprobs=True, max_tokens=3, stream=True
    )
    streamed = [
        entry.token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == [entry.token for entry in entries]


async def test_many_streams_at_once_are_each_their_own(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    async def ask(number: int) -> str:
        text = f"number {number} " * 3
        stream = await client.chat.completions.create(
            model=LINE, messages=[{"role": "user", "content": text}], stream=True
        )
        said = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(said) == text
        return text

    assert len(set(await asyncio.gather(*(ask(number) for number in range(16))))) == 16
    assert served.drain() == 16


async def test_a_crowd_is_answered_each_with_its_own(tmp_path: Path) -> None:
    number = 512
    with serving(tmp_path, ScriptedSettings()) as running:
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:

            async def ask(text: str) -> str | None:
                reply = await client.chat.completions.create(
                    model=LINE, messages=[{"role": "user", "content": text}], max_tokens=16
                )
                return reply.choices[0].message.content

            asked = [f"number {each}" for each in range(number)]
            assert await asyncio.gather(*map(ask, asked)) == asked  # a status of 4xx or 5xx raises
        metrics = (await asyncio.to_thread(httpx.get, f"{running.url}/metrics")).text
        assert f'honed_requests_total{{route="/v1/chat/completions",status="200"}} {number}.0' in metrics
        assert await asyncio.to_thread(running.drain) == number


@pytest.mark.parametrize(
    ("value", "at"),
    [
        ([{"role": "king", "content": "x"}], "value[0].role"),
        ([{"role": "assistant", "content": 3}], "value[0].content"),
        ([{"role": "assistant"}], "value[0].content"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], "value"),
        ([], "value"),
        ([3], "value"),
    ],
)
def test_a_correction_that_nobody_could_learn_from_is_refused(served: Served, value: list, at: str) -> None:
    row = {"target": "t", "name": "fix", "kind": "correction", "value": value}
    answer = httpx.post(f"{served.url}/v1/feedback", json=row)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, at)


def test_a_repeated_key_gets_the_receipt_of_the_row_that_is_kept(served: Served) -> None:
    row = {"target": "t", "name": "success", "value": 1, "key": "k"}
    ids = {httpx.post(f"{served.url}/v1/feedback", json=row).json()["id"] for _ in range(2)}
    served.drain()
    assert {kept.id for kept in served.store.feedback.of(["t"])} == ids
