"""What every plug-in must do, as functions that a plug-in's own tests call: they raise AssertionError with a sentence.

`check_engine`, `check_channel`, `check_environment` and `check_sandbox` take a factory, because each promise wants a
fresh one. Nothing here loads torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from honed import codec
from honed.clock import new_id
from honed.errors import BadRequest, NotFound
from honed.protocols import Channel, Chunk, Engine, Environment, Outcome, Request, Sandbox, Session
from honed.types import Sampling, Task, Version


async def check_engine(
    make: Callable[[], Awaitable[Engine]], ids: Sequence[int], *, versions: Sequence[Version] = ()
) -> None:
    """Promises of protocols.Engine: streaming, limits, seeds, cancel, log-probabilities, versions, many at once.

    `ids` is a prompt that it can continue by at least four tokens; `versions` are some that it can load.
    """
    for promise in (_limits, _reproducible, _cancels, _logprobs, _refuses, _many):
        engine = await make()
        try:
            await promise(engine, tuple(ids))
        finally:
            await engine.close()
    engine = await make()
    try:
        await _versions(engine, tuple(ids), versions)
    finally:
        await engine.close()


async def answer(
    engine: Engine, ids: Sequence[int], *, version: str = "", id: str = "", **sampling: Any
) -> list[Chunk]:
    """All chunks of one request."""
    request = Request(id=id or new_id("request_"), ids=tuple(ids), sampling=Sampling(**sampling), version=version)
    return [chunk async for chunk in engine.submit(request)]


async def _limits(engine: Engine, ids: tuple[int, ...]) -> None:
    chunks = await answer(engine, ids, max_tokens=4, seed=1)
    sampled = [id for chunk in chunks for id in chunk.ids]
    assert 1 <= len(sampled) <= 4, f"max_tokens = 4 gave {len(sampled)} tokens"
    assert [chunk.finish is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False], "only the last finishes"
    last = chunks[-1]
    assert last.finish in ("stop", "length"), f"finish is {last.finish}"
    assert last.usage is not None, "the last chunk has no usage"
    assert (last.usage.prompt, last.usage.output) == (len(ids), len(sampled)), f"usage is {last.usage}"
    for chunk in chunks:
        assert len(chunk.ids) == len(chunk.logprobs) == len(chunk.raw_logprobs), "a log-probability for every token"
        assert all(value <= 1e-6 for value in (*chunk.logprobs, *chunk.raw_logprobs)), "a log-probability above 0"
    stop = sampled[0]
    stopped = await answer(engine, ids, max_tokens=4, seed=1, stop_ids=(stop,))
    got = [id for chunk in stopped for id in chunk.ids]
    assert got == [stop], f"a stop id ends the reply and is its last id, got {got}"
    assert stopped[-1].finish == "stop", "a stop id gives finish 'stop'"


async def _reproducible(engine: Engine, ids: tuple[int, ...]) -> None:
    one, again = [await answer(engine, ids, max_tokens=4, seed=7) for _ in range(2)]
    assert _ids(one) == _ids(again), "the same seed drew other tokens"
    alone = _ids(one)
    beside = await asyncio.gather(*(answer(engine, ids, max_tokens=4, seed=seed) for seed in (7, 8, 9)))
    assert _ids(beside[0]) == alone, "a request's tokens depend on its neighbours"


async def _cancels(engine: Engine, ids: tuple[int, ...]) -> None:
    await engine.cancel("no such request")
    id, room = new_id("request_"), (await engine.status()).context - len(ids)
    request = Request(id=id, ids=ids, sampling=Sampling(max_tokens=min(512, room), seed=1))
    chunks: list[Chunk] = []
    async for chunk in engine.submit(request):
        if not chunks:
            await engine.cancel(id)
        chunks.append(chunk)
    assert chunks[-1].finish in ("cancelled", "stop"), f"a cancelled request finished with {chunks[-1].finish}"
    assert await answer(engine, ids, max_tokens=2, seed=1), "the engine answers nothing after a cancel"


async def _logprobs(engine: Engine, ids: tuple[int, ...]) -> None:
    values = (await engine.logprobs(ids, "")).values
    assert len(values) == len(ids) - 1, f"{len(values)} log-probabilities for {len(ids)} ids, not {len(ids) - 1}"
    assert all(value <= 1e-6 for value in values), "a log-probability above 0"


async def _refuses(engine: Engine, ids: tuple[int, ...]) -> None:
    try:
        await answer(engine, ids, version="nobody@77", max_tokens=2)
    except NotFound:
        pass
    else:
        raise AssertionError("a version that is not loaded must raise NotFound, never answer with other weights")
    context = (await engine.status()).context
    assert context > 0, "status says no context"
    param: str | None = None
    try:
        await answer(engine, ids, max_tokens=context + 1)
    except BadRequest as error:
        param = error.param
    assert param == "messages", f"prompt + max_tokens over the context must raise BadRequest('messages'), got {param!r}"


async def _many(engine: Engine, ids: tuple[int, ...]) -> None:
    found = await asyncio.gather(*(answer(engine, ids, max_tokens=3, seed=seed) for seed in range(24)))
    assert all(chunks[-1].finish in ("stop", "length") for chunks in found), "one of 24 requests did not finish"
    status = await engine.status()
    assert (status.running, status.waiting) == (0, 0), f"{status.running} requests are left over"


async def _versions(engine: Engine, ids: tuple[int, ...], versions: Sequence[Version]) -> None:
    for version in versions:
        await engine.load(version)
        await engine.load(version)
        chunks = await answer(engine, ids, version=version.id, max_tokens=2, seed=1)
        named = {chunk.version for chunk in chunks if chunk.ids}
        assert named == {version.id}, f"tokens of {version.id} are labelled {named}"
    loaded = set((await engine.status()).versions)
    assert {version.id for version in versions} <= loaded, f"status lists {loaded}"
    for version in versions:
        await engine.unload(version.id)
        try:
            await answer(engine, ids, version=version.id, max_tokens=2)
        except NotFound:
            continue
        raise AssertionError(f"{version.id} still answers after unload")


async def check_channel(make: Callable[[], Awaitable[Channel]], tensors: Sequence[dict[str, Any]]) -> None:
    """Promises of protocols.Channel: what is fetched is bit for bit what was published, by version; NotFound else.

    `tensors` are at least two versions' named arrays or tensors (anything with `tolist`).
    """
    channel = await make()
    for number, named in enumerate(tensors):
        await channel.publish(f"line@{number}", named)
    number, named = len(tensors) - 1, tensors[-1]
    got = await channel.fetch(f"line@{number}")
    assert set(got) == set(named), f"published {sorted(named)}, fetched {sorted(got)}"
    for name, value in named.items():
        assert got[name].tolist() == value.tolist(), f"{name} changed on its way"
        assert str(got[name].dtype) == str(value.dtype), f"{name} came as {got[name].dtype}, not {value.dtype}"
    try:
        await channel.fetch("line@77")
    except NotFound:
        return
    raise AssertionError("a version that nobody published must raise NotFound")


async def check_environment(
    make: Callable[[], Environment], task: Task, session: Callable[[], Session], sandbox: Sandbox | None = None
) -> None:
    """Promises of protocols.Environment: it asks the session, ends, reports a JSON-able state, keeps nothing between
    attempts, and lets the model's errors through."""
    one, other = make(), session()
    outcome = await one.run(task, other, sandbox)
    assert isinstance(outcome, Outcome), f"run returned {type(outcome).__name__}, no Outcome"
    assert other.turns, "the environment never asked the model"
    codec.to_json(outcome.state)
    pair = session(), session()
    await asyncio.gather(*(one.run(task, each, sandbox) for each in pair))
    assert all(each.turns for each in pair), "of two attempts at once, one never asked the model"
    try:
        await make().run(task, _Broken(), sandbox)
    except ConnectionError:
        return
    raise AssertionError("the model's error must come out of run")


async def check_sandbox(make: Callable[[], Awaitable[Sandbox]]) -> None:
    """Promises of protocols.Sandbox: files, exit codes, output, a deadline that holds, closing twice."""
    box = await make()
    await box.write("note.txt", b"\x00hello\n")
    assert await box.read("note.txt") == b"\x00hello\n", "a file came back changed"
    done = await box.exec(["sh", "-c", "cat; echo error >&2; exit 3"], stdin=b"in")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"in", b"error\n"), f"exec gave {done}"
    late = await box.exec(["sleep", "600"], timeout_seconds=0.2)
    assert late.timed_out, "a command over its deadline must say timed_out"
    await box.close()
    await box.close()


class _Broken:
    """A session whose model is gone."""

    trace = "trace_broken"
    turns: tuple[Any, ...] = ()

    async def reply(self, messages: Sequence[Any], tools: Sequence[Any] = (), sampling: Any = None) -> Any:
        raise ConnectionError("the model is gone")


def _ids(chunks: Sequence[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]
