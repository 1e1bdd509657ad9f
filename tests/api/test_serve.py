"""The gateway around its requests: who hangs up, what an engine's death looks like, how it ends, sessions and names."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from crash.test_gateway import start

from api.served import LINE, Served, serving
from honed.api.serve import _kept_up
from honed.engine.scripted import ScriptedSettings
from honed.errors import EngineError
from honed.protocols import EngineStatus
from honed.record import Drainer
from honed.store import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by /proc")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ScriptedSettings(delay_seconds=0.005)) as running:
        yield running


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": LINE, "messages": [{"role": "user", "content": text}], **more}


async def eventually(done: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what another process or thread is about to do."""
    for _ in range(1500):
        if await done():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never happened")


async def test_a_reader_who_hangs_up_on_a_whole_answer_ends_it(served: Served) -> None:
    text = "x" * 75
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", json.dumps(ask(text)))

    async def is_running() -> bool:
        return (await served.fleet.engine.status()).running == 1

    async def is_recorded() -> bool:
        return await asyncio.to_thread(served.drain) == 1

    await eventually(is_running)
    connection.close()
    await eventually(is_recorded)
    (trace,) = served.store.traces.list()
    (turn,) = trace.turns
    assert turn.finish == "cancelled"
    assert len(turn.output) < len(text)
    assert (await served.fleet.engine.status()).running == 0
    async with httpx.AsyncClient(base_url=served.url) as http_:
        assert 'status="499"' in (await http_.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_every_request_that_is_being_answered_counts_as_running(served: Served, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60.0) as http_:

        async def running() -> str:
            text = (await http_.get("/metrics")).text
            return next(line for line in text.splitlines() if line.startswith("honed_running_requests "))

        async def is_running() -> bool:
            return await running() == "honed_running_requests 1.0"

        asked = asyncio.create_task(http_.post("/v1/chat/completions", json=ask("x" * 75, stream=stream)))
        await eventually(is_running)
        assert (await asked).status_code == 200
        assert await running() == "honed_running_requests 0.0"


async def test_a_sender_who_leaves_before_the_body_is_there_is_no_fault_of_the_server(served: Served) -> None:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"model": ')
    connection.close()

    async def is_counted() -> bool:
        async with httpx.AsyncClient(base_url=served.url) as http_:
            text = (await http_.get("/metrics")).text
        assert 'status="500"' not in text
        return 'honed_requests_total{route="/v1/chat/completions",status="499"} 1.0' in text

    await eventually(is_counted)


async def test_a_session_keeps_customers_apart_who_say_the_same(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    first: dict[str, Any] = {}
    for name in ("ann", "bob"):
        first[name] = await client.chat.completions.create(**ask(), extra_headers={"x-honed-session": name})
    for name in ("ann", "bob"):
        messages = [*ask()["messages"], {"role": "assistant", "content": "hello"}, {"role": "user", "content": "on"}]
        await client.chat.completions.create(model=LINE, messages=messages, extra_headers={"x-honed-session": name})
    served.drain()
    for name in ("ann", "bob"):
        trace = served.store.traces.get(served.store.traces.turn(first[name].id).trace)
        assert trace.tags == {"session": name}
        assert [turn.parent for turn in trace.turns] == [None, first[name].id]


async def test_a_model_is_found_by_its_name(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    assert (await client.models.retrieve(LINE)).id == LINE
    assert (await client.models.retrieve("support@0")).id == "support@0"
    for name in ("nobody", "support@7"):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve(name)
        assert caught.value.code == "model_not_found"


async def test_what_serves_and_is_not_in_the_engine_is_the_servers_fault_and_no_unknown_model(served: Served) -> None:
    served.fleet.engine = Away(EngineError("restarting", retryable=True))  # type: ignore[assignment]
    await asyncio.sleep(0.1)  # a look of the fleet that had begun would put things right
    served.fleet.serving = "support@5"
    async with httpx.AsyncClient(base_url=served.url) as http_:
        answer = await http_.post("/v1/chat/completions", json=ask())
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert answer.headers["retry-after"] == "1"


async def test_an_integer_that_no_record_can_hold_is_refused(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    async with httpx.AsyncClient(base_url=served.url) as http_:
        assert (await http_.post("/v1/chat/completions", json=ask(tools=tools))).status_code == 400


async def test_an_engine_killed_in_the_middle_of_a_stream_is_its_last_event_and_the_next_request_works(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("g")
    process, port = await start(root)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http_:
            lines: list[str] = []
            body = ask("y" * 300, stream=True)
            async with http_.stream("POST", "/v1/chat/completions", json=body) as response:
                id = response.headers["x-honed-turn"]
                async for line in response.aiter_lines():
                    lines += [line] if line else []
                    if line and len(lines) == 20:  # empty lines come between
                        psutil.Process(process.pid).children()[0].kill()
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
            assert process.returncode is None
            said = "".join(json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines[:-1])
            answer = await http_.post("/v1/chat/completions", json=ask("next"))
            assert answer.json()["choices"][0]["message"]["content"] == "next"
    finally:
        process.kill()
        await process.wait()
    with open_store(None, root) as store:
        Drainer(root / "capture", store).drain_once()
        turn = store.traces.turn(id)
        assert (turn.finish, turn.reply.content) == ("error", said)


async def test_an_engine_killed_under_a_whole_answer_is_a_503_or_an_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    process, port = await start(tmp_path_factory.mktemp("g"))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http_:
            asked = [
                asyncio.create_task(http_.post("/v1/chat/completions", json=ask(f"{n} " + "z" * 200))) for n in range(8)
            ]
            await asyncio.sleep(0.1)
            psutil.Process(process.pid).children()[0].kill()
            for number, answer in enumerate(await asyncio.gather(*asked)):
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["message"]["content"] == f"{number} " + "z" * 200
                else:
                    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
            assert (await http_.post("/v1/chat/completions", json=ask())).status_code == 200
    finally:
        process.kill()
        await process.wait()


async def test_sigterm_lets_running_answers_end_and_leaves_an_empty_log(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("g")
    process, port = await start(root)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http_:
        async with http_.stream("POST", "/v1/chat/completions", json=ask("w" * 300, stream=True)) as response:
            id = response.headers["x-honed-turn"]
            process.send_signal(signal.SIGTERM)
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
    assert await process.wait() == 0
    assert list((root / "capture").iterdir()) == []
    with open_store(None, root) as store:
        assert store.traces.turn(id).reply.content == "w" * 300
        assert Drainer(root / "capture", store).drain_once() == 0


async def test_what_runs_beside_the_server_is_begun_again_when_it_fails() -> None:
    tries = 0

    async def flaky() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TypeError("nobody foresaw this")

    await _kept_up(flaky, pause_seconds=0.0)
    assert tries == 3


async def test_an_engine_that_gave_up_is_an_unhealthy_gateway_with_the_reason(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url) as http_:
        assert (await http_.get("/healthz")).json()["status"] == "ok"
        served.fleet.engine = Away(EngineError("it died five times"))  # type: ignore[assignment]

        async def is_failing() -> bool:
            return (await http_.get("/healthz")).status_code == 503

        await eventually(is_failing)
        assert (await http_.get("/healthz")).json()["reason"] == "it died five times"


class Away:
    """An engine that answers nothing but `error`."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    async def status(self) -> EngineStatus:
        raise self._error


async def test_a_gateway_whose_engine_stays_down_ends_with_code_1_and_says_why(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("g")
    (root / "honed.toml").write_text('[model]\nsource = "scripted"\nline = "support"\n[serve]\nport = 0\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from honed.cli import main; main()"),
        *("serve", "--config", str(root / "honed.toml")),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "HONED_LOG": "off"},
    )  # fmt: skip
    assert process.stdout is not None
    assert b"honed serves" in await process.stdout.readline()
    killing = asyncio.create_task(kill_every_engine(process.pid))
    _, errors = await process.communicate()
    await killing
    assert process.returncode == 1
    assert "stays down" in errors.decode()
    assert "Traceback" not in errors.decode()


async def kill_every_engine(gateway: int) -> None:
    """Until the gateway ends."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while True:
            for child in psutil.Process(gateway).children():
                child.kill()
            await asyncio.sleep(0.02)
