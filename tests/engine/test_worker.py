"""The engine child as a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from model.folders import write_directory

from engine.test_local import eventually
from engine.tiny import tiny
from honed.engine.local import LocalEngine
from honed.engine.process import RemoteEngine
from honed.engine.settings import EngineSettings
from honed.engine.worker import handlers
from honed.errors import BadRequest, NotFound
from honed.protocols import Request
from honed.rpc import Client, Server
from honed.types import Sampling, Version

IDS = (256, *b"user\nhello", 257, 256, *b"assistant\n")


async def spawn(socket: Path, *more: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "honed.engine.worker", "--source", "scripted", "--socket", str(socket), *more]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)


async def connect(socket: Path) -> RemoteEngine:
    for _ in range(1000):
        if socket.exists():
            return RemoteEngine(await Client.connect_unix(str(socket)))
        await asyncio.sleep(0.02)
    raise AssertionError("the worker never listened")


@pytest.fixture
async def remote(tmp_path: Path) -> AsyncIterator[RemoteEngine]:
    """A local engine on a tiny model behind the worker's handlers and a real socket."""
    engine = LocalEngine(tiny(), EngineSettings(slots=4, context=512, threads=1))
    server = Server(handlers(engine))
    await server.listen_unix(str(tmp_path / "s"))
    client = RemoteEngine(await Client.connect_unix(str(tmp_path / "s")))
    yield client
    await client.close()
    await server.close()
    await engine.close()


async def test_a_local_engine_answers_over_a_socket(remote: RemoteEngine) -> None:
    request = Request(id="a", ids=(1, 2, 3), sampling=Sampling(temperature=0.0, max_tokens=5))
    chunks = [chunk async for chunk in remote.submit(request)]
    assert sum(len(chunk.ids) for chunk in chunks) == 5
    assert chunks[-1].finish == "length"
    assert len((await remote.logprobs([1, 2, 3], "")).values) == 2
    with pytest.raises(BadRequest) as caught:
        await anext(remote.submit(Request(id="b", ids=(1,) * 600, sampling=Sampling())))
    assert caught.value.param == "messages"
    with pytest.raises(NotFound):
        await anext(remote.submit(Request(id="c", ids=(1,), sampling=Sampling(), version="line@4")))
    await remote.load(Version(line="line", number=0))
    await remote.unload("line@4")
    assert (await remote.status()).base == "tiny-llama"


async def test_leaving_a_remote_stream_frees_the_slot(remote: RemoteEngine) -> None:
    stream = remote.submit(Request(id="a", ids=(1,), sampling=Sampling(temperature=0.0, max_tokens=500)))
    await anext(stream)
    await stream.aclose()
    await eventually(lambda status: status.running == 0, remote)
    assert (await remote.status()).output_tokens < 500


async def test_the_child_serves_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    process = await spawn(tmp_path / "s", "--settings", json.dumps({"replies": {"*": "hi"}}), "--nice", "3")
    engine = await connect(tmp_path / "s")
    status = await engine.status()
    assert status.pid == process.pid
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    chunks = [c async for c in engine.submit(Request(id="a", ids=IDS, sampling=Sampling(max_tokens=9)))]
    assert chunks[-1].finish == "stop"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert not (tmp_path / "s").exists()
    await engine.close()


async def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-m', 'honed.engine.worker', '--source', 'scripted',"
        f" '--socket', {str(tmp_path / 's')!r}], stderr=subprocess.DEVNULL).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    engine = await connect(tmp_path / "s")
    parent.kill()
    await parent.wait()
    for _ in range(1000):
        if not alive(child):
            break
        await asyncio.sleep(0.02)
    assert not alive(child)
    await engine.close()


async def test_the_child_s_threads_soon_sleep_when_they_have_nothing_to_do(tmp_path: Path) -> None:
    """OpenMP reads its environment once, when torch is loaded, and says here what it read."""
    write_directory(tmp_path / "model")
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose", "OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "7"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "honed.engine.worker", "--source", str(tmp_path / "model")),
        *("--socket", str(tmp_path / "s"), "--settings", '{"threads": 2}'),
        stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    async for line in process.stderr:
        said += [line.decode()]
        if b"END" in line:
            process.kill()
    await process.wait()
    assert any("GOMP_SPINCOUNT = '20000'" in line for line in said), said
    assert any("OMP_NUM_THREADS = '2'" in line for line in said), said


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("source", "settings", "code", "word"),
    [
        ("scripted", "{", 2, "honed engine"),
        ("scripted", "[]", 2, "JSON object"),
        ("scripted", '{"repies": {}}', 2, "replies"),
        ("smollm2", '{"slot": 1}', 2, "slots"),
        ("/nowhere.gguf", "{}", 1, "nowhere"),
    ],
)
async def test_wrong_usage_ends_at_once_and_says_why(
    source: str, settings: str, code: int, word: str, tmp_path: Path
) -> None:
    command = ["-m", "honed.engine.worker", "--source", source, "--socket", str(tmp_path / "s"), "--settings", settings]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == code
    assert word in errors.decode()
