"""kill -9 of the gateway and of its engine under traffic: no answered request's Turn is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from honed.record import Drainer
from honed.store import Store, open_store

from .fake_gateway import LINE

TESTS = Path(__file__).parents[1]
NUM_CLIENTS = 6


@dataclass
class Seen:
    """What clients got: the text asked by the id of every whole answer, and the feedback keys that were accepted."""

    asked: dict[str, str] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    failed: int = 0


async def start(root: Path) -> tuple[asyncio.subprocess.Process, int]:
    """A gateway that is ready, and its port."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HONED_LOG": "off"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crash.fake_gateway", str(root), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line.strip().isdigit(), "the gateway did not come up"
    return process, int(line)


async def client(port: int, name: str, seen: Seen, stop: asyncio.Event) -> None:
    """Asks again and again, streamed every second time; an answer counts when its last byte has come."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as http:
        number = 0
        while not stop.is_set():
            number += 1
            text = f"{name} asks {number}"
            try:
                id = await (_streamed if number % 2 else _whole)(http, text)
                seen.asked[id] = text
                key = f"key {text}"
                row = {"target": id, "name": "success", "value": True, "key": key}
                if (await http.post("/v1/feedback", json=row)).status_code in (200, 201, 202):
                    seen.keys.add(key)
            except (httpx.HTTPError, LookupError):
                seen.failed += 1
                await asyncio.sleep(0.02)


def _body(text: str, **more: object) -> dict[str, object]:
    return {"model": LINE, "messages": [{"role": "user", "content": text}], **more}


async def _whole(http: httpx.AsyncClient, text: str) -> str:
    response = await http.post("/v1/chat/completions", json=_body(text))
    if response.status_code != 200:
        raise LookupError(response.text)
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == text
    return str(answer["id"])


async def _streamed(http: httpx.AsyncClient, text: str) -> str:
    id, said, done = "", "", False
    async with http.stream("POST", "/v1/chat/completions", json=_body(text, stream=True)) as response:
        if response.status_code != 200:
            raise LookupError("not streamed")
        async for line in response.aiter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "choices" not in chunk:
                    raise LookupError(line)
                id = chunk["id"]
                said += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if not done:
        raise LookupError("cut off")
    assert said == text
    return id


async def rounds(root: Path, seen: Seen, kills: list[str], seed: int) -> None:
    """Traffic through a life of the gateway for every kill, and a last one that ends well."""
    draws = random.Random(seed)
    process, port = await start(root)
    for victim in [*kills, "nobody"]:
        stop, before = asyncio.Event(), len(seen.asked)
        clients = [
            asyncio.create_task(client(port, f"c{i} {victim} {draws.random()}", seen, stop)) for i in range(NUM_CLIENTS)
        ]
        while len(seen.asked) < before + 12:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(draws.random() * 0.1)
        if victim == "engine":
            (engine,) = psutil.Process(process.pid).children()
            engine.kill()
            after = len(seen.asked)
            while len(seen.asked) < after + NUM_CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stop.set()
        if victim == "gateway":
            process.kill()
            await process.wait()
        await asyncio.gather(*clients)
        if victim == "gateway":
            process, port = await start(root)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


def assert_nothing_lost(store: Store, seen: Seen) -> None:
    """Every answered id is one turn of one trace, with what was asked and said; feedback too. Every stored turn has one
    entry in the ledger."""
    for id, text in seen.asked.items():
        turn = store.traces.turn(id)
        assert turn.reply.content == text
        trace = store.traces.get(turn.trace)
        assert [each.id for each in trace.turns] == [id]
    entries = store.ledger.list(LINE, stage="serve")
    assert store.ledger.unpaid(LINE, "turn:") == []
    assert len([entry for entry in entries if entry.activity == "generate"]) == store.traces.count(origin="production")
    rows = store.feedback.of(list(seen.asked))
    assert sorted(row.key or "" for row in rows if row.key in seen.keys) == sorted(seen.keys)


@pytest.mark.parametrize(
    ("kills", "seed"), [(["gateway"] * 5, 1), (["engine"] * 4, 2)], ids=["five gateways", "four engines"]
)
async def test_no_answered_turn_is_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, kills: list[str], seed: int
) -> None:
    root, seen = tmp_path_factory.mktemp("g"), Seen()
    await rounds(root, seen, kills, seed)
    store = open_store(None, root)
    drainer = Drainer(root / "capture", store)
    drainer.drain_once()
    assert_nothing_lost(store, seen)
    num = store.traces.count(origin="production")
    assert drainer.drain_once() == 0
    assert store.traces.count(origin="production") == num
    assert len(seen.asked) >= 12 * (len(kills) + 1)
