"""The local engine against transformers' own logits, on tiny random models."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.tiny import ADAPTER_CONFIG, VOCABULARY, adapter_pairs, reference_logprobs, tiny
from honed.engine.core import MAX_FAILED_STEPS
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.engine.stall import until_stalled
from honed.errors import BadRequest, EngineError, NotFound
from honed.model import checkpoint
from honed.model.linear import Adapter
from honed.protocols import Engine, EngineStatus, Request
from honed.testing import check_engine
from honed.types import Finish, Sampling, Usage, Version

GREEDY = Sampling(temperature=0.0, max_tokens=12)
SETTINGS = EngineSettings(slots=8, capacity=4096, context=512, prefill_chunk=32, threads=1)


@dataclass
class Answer:
    """All chunks of a request, joined."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None


async def ask(
    engine: LocalEngine, ids: Sequence[int], sampling: Sampling = GREEDY, version: str = "", name: str = ""
) -> Answer:
    answer = Answer()
    request = Request(id=name or f"r{random.random()}", ids=tuple(ids), sampling=sampling, version=version)
    async for chunk in engine.submit(request):
        answer.ids += chunk.ids
        answer.logprobs += chunk.logprobs
        answer.raw += chunk.raw_logprobs
        answer.top += chunk.top
        assert chunk.version == version
        answer.finish, answer.usage = chunk.finish, chunk.usage
    return answer


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def check_raw(model: torch.nn.Module, ids: list[int], answer: Answer, tolerance: float = 1e-4) -> None:
    """The raw log-probabilities that the engine gave are transformers'."""
    expected = reference_logprobs(model, ids + answer.ids)[len(ids) - 1 : -1]
    found = expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
    assert answer.raw == pytest.approx(found, abs=tolerance)


async def eventually(check: Callable[[EngineStatus], bool], engine: Engine) -> None:
    """Waits until the engine's status is as wanted."""
    for _ in range(20000):
        if check(await engine.status()):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    made = LocalEngine(tiny(), SETTINGS)
    yield made
    await made.close()


async def test_rows_of_every_length_serve_side_by_side() -> None:
    loaded = tiny()
    engine = LocalEngine(loaded, SETTINGS)
    prompts = [prompt(seed, length) for seed, length in enumerate((20, 250, 251, 480, 30, 300))]
    answers = await asyncio.gather(*[ask(engine, ids) for ids in prompts])
    for ids, answer in zip(prompts, answers, strict=True):
        check_raw(loaded.model, ids, answer)
    await engine.close()


async def test_a_given_model_is_left_as_it_was() -> None:
    loaded = tiny()
    before = reference_logprobs(loaded.model, prompt(0, 20))
    engine = LocalEngine(loaded, SETTINGS)
    await ask(engine, prompt(0, 20))
    assert loaded.model.config._attn_implementation == "sdpa"
    assert torch.equal(reference_logprobs(loaded.model, prompt(0, 20)), before)
    await engine.close()


async def test_a_group_reads_its_prompt_once(engine: LocalEngine) -> None:
    ids = prompt(1, 100)
    sampling = Sampling(temperature=1.0, max_tokens=6)
    answers = await asyncio.gather(*[ask(engine, ids, sampling) for _ in range(6)])
    cached = sorted(answer.usage.cached for answer in answers if answer.usage)
    assert cached == [0, 96, 96, 96, 96, 96]  # whole blocks of 16
    model = tiny().model
    for answer in answers:
        check_raw(model, ids, answer)


async def test_a_conversation_reuses_its_own_beginning(engine: LocalEngine) -> None:
    ids = prompt(2, 40)
    first = await ask(engine, ids)
    longer = ids + first.ids + prompt(3, 10)
    second = await ask(engine, longer)
    assert second.usage is not None
    assert second.usage.cached == (40 + 11) // 16 * 16  # the last sampled token was never computed
    check_raw(tiny().model, longer, second)


async def test_rows_with_and_without_a_common_beginning_agree(engine: LocalEngine) -> None:
    common = prompt(4, 64)
    prompts = [common + prompt(seed, 5 + seed) for seed in range(4)]
    together = await asyncio.gather(*[ask(engine, ids) for ids in prompts])
    stranger = prompt(9, 30)
    mixed = await asyncio.gather(*[ask(engine, ids) for ids in (*prompts, stranger)])
    model = tiny().model
    for ids, a, b in zip(prompts, together, mixed, strict=False):
        assert a.ids == b.ids
        check_raw(model, ids, a)
        check_raw(model, ids, b)


async def test_without_prefix_reuse_nothing_is_cached() -> None:
    engine = LocalEngine(tiny(), SETTINGS.model_copy(update={"prefix": False}))
    for _ in range(2):
        answer = await ask(engine, prompt(1, 100))
        assert answer.usage is not None
        assert answer.usage.cached == 0
    assert (await engine.status()).used == 0
    await engine.close()


async def test_a_seed_gives_the_same_tokens_among_other_neighbours(engine: LocalEngine) -> None:
    ids, sampling = prompt(5, 30), Sampling(temperature=1.0, max_tokens=20, seed=11, top_p=0.9, top_k=40)
    alone = await ask(engine, ids, sampling)
    crowd = [ask(engine, prompt(seed, 20 + seed), Sampling(max_tokens=25)) for seed in range(6)]
    among, *_ = await asyncio.gather(ask(engine, ids, sampling), *crowd)
    assert among.ids == alone.ids
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    other = await ask(engine, ids, Sampling(temperature=1.0, max_tokens=20, seed=12, top_p=0.9, top_k=40))
    assert other.ids != alone.ids


async def test_stop_ids_end_a_reply_and_are_its_last_token(engine: LocalEngine) -> None:
    ids = prompt(6, 20)
    free = await ask(engine, ids)
    stop = free.ids[4]
    answer = await ask(engine, ids, Sampling(temperature=0.0, max_tokens=12, stop_ids=(stop,)))
    assert answer.ids == free.ids[: free.ids.index(stop) + 1]
    assert answer.finish == "stop"
    assert free.finish == "length"


async def test_usage_and_status_add_up(engine: LocalEngine) -> None:
    answers = await asyncio.gather(*[ask(engine, prompt(seed, 50)) for seed in range(4)])
    usages = [answer.usage for answer in answers]
    assert [(u.prompt, u.output) for u in usages if u] == [(50, 12)] * 4
    status = await engine.status()
    assert (status.prompt_tokens, status.output_tokens, status.running, status.waiting) == (200, 48, 0, 0)
    assert sum(u.seconds for u in usages if u) == pytest.approx(status.busy_seconds)
    assert status.busy_seconds > 0
    assert status.base == "tiny-llama"
    assert status.context == 512


async def test_top_logprobs_are_the_likeliest_tokens(engine: LocalEngine) -> None:
    ids = prompt(7, 20)
    answer = await ask(engine, ids, Sampling(temperature=0.0, max_tokens=3, top_logprobs=5))
    expected = reference_logprobs(tiny().model, ids + answer.ids)[len(ids) - 1 : -1].topk(5)
    for row, values, indices in zip(answer.top, expected.values, expected.indices, strict=True):
        assert [id for id, _ in row] == indices.tolist()
        assert [logprob for _, logprob in row] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [2, 31, 32, 33, 100])
async def test_logprobs_of_given_tokens(engine: LocalEngine, length: int) -> None:
    ids = prompt(8, length)
    expected = reference_logprobs(tiny().model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (await engine.logprobs(ids, "")).values == pytest.approx(expected.tolist(), abs=1e-4)


async def test_logprobs_at_another_temperature(engine: LocalEngine) -> None:
    """log softmax(logits / 2) from log softmax(logits) / 2, renormalised."""
    ids = prompt(8, 33)
    warm = torch.log_softmax(reference_logprobs(tiny().model, ids) / 2, -1)
    expected = warm[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (await engine.logprobs(ids, "", 2.0)).values == pytest.approx(expected.tolist(), abs=1e-4)
    with pytest.raises(BadRequest, match="temperature = 0"):
        await engine.logprobs(ids, "", 0.0)


async def test_logprobs_of_one_token_are_none(engine: LocalEngine) -> None:
    assert (await engine.logprobs([3], "")).values == []


@pytest.mark.parametrize(
    ("ids", "sampling", "param"),
    [
        ([], GREEDY, "messages"),
        ([1] * 505, Sampling(max_tokens=8), "messages"),
        ([VOCABULARY], GREEDY, "messages"),
        ([-1], GREEDY, "messages"),
        ([1], Sampling(temperature=-0.1), "temperature"),
        ([1], Sampling(temperature=float("nan")), "temperature"),
        ([1], Sampling(top_p=0.0), "top_p"),
        ([1], Sampling(top_k=-1), "top_k"),
        ([1], Sampling(max_tokens=0), "max_tokens"),
    ],
)
async def test_wrong_requests_name_their_parameter(
    engine: LocalEngine, ids: list[int], sampling: Sampling, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await ask(engine, ids, sampling)
    assert caught.value.param == param
    assert len((await ask(engine, [1, 2, 3])).ids) == 12


async def test_the_longest_possible_request_fits(engine: LocalEngine) -> None:
    answer = await ask(engine, prompt(9, 500))
    assert answer.finish == "length"
    check_raw(tiny().model, prompt(9, 500), answer)


async def test_more_requests_than_slots_and_capacity_all_end() -> None:
    loaded = tiny()
    engine = LocalEngine(loaded, EngineSettings(slots=3, capacity=256, context=200, prefill_chunk=16, threads=1))
    prompts = [prompt(seed % 5, 40 + seed % 5) for seed in range(20)]
    answers = await asyncio.gather(*[ask(engine, ids) for ids in prompts])
    for ids, answer in zip(prompts, answers, strict=True):
        check_raw(loaded.model, ids, answer)
    status = await engine.status()
    assert status.used <= 256
    assert (status.running, status.waiting) == (0, 0)
    await engine.close()


async def test_cancel_ends_a_request_and_frees_what_it_held() -> None:
    engine = LocalEngine(tiny(), EngineSettings(slots=1, capacity=2048, context=1024, threads=1))
    seen = []
    request = Request(id="long", ids=(1, 2, 3), sampling=Sampling(temperature=0.0, max_tokens=1000))
    waiting = asyncio.create_task(ask(engine, [4, 5]))
    async for chunk in engine.submit(request):
        seen.append(chunk)
        if len(seen) == 2:
            await engine.cancel("long")
    assert seen[-1].finish == "cancelled"
    assert seen[-1].usage is not None
    assert seen[-1].usage.output < 1000
    assert (await waiting).finish == "length"
    assert (await engine.status()).running == 0
    await engine.cancel("nobody")
    await engine.close()


async def test_a_caller_that_leaves_cancels_its_request() -> None:
    engine = LocalEngine(tiny(), EngineSettings(slots=1, capacity=2048, context=1024, threads=1))
    stream = engine.submit(Request(id="long", ids=(1,), sampling=Sampling(temperature=0.0, max_tokens=1000)))
    await anext(stream)
    await stream.aclose()
    assert (await ask(engine, [4, 5])).finish == "length"
    assert (await engine.status()).output_tokens < 1000
    await engine.close()


async def test_two_requests_of_one_id_end_apart() -> None:
    engine = LocalEngine(tiny(), EngineSettings(capacity=4096, context=1024, threads=1))
    other = asyncio.create_task(ask(engine, [1], Sampling(temperature=0.0, max_tokens=200), name="same"))
    await eventually(lambda status: status.running == 1, engine)
    stream = engine.submit(Request(id="same", ids=(2,), sampling=Sampling(temperature=0.0, max_tokens=1000)))
    await anext(stream)
    await stream.aclose()
    assert (await other).finish == "length"
    await engine.close()


async def test_lower_priority_numbers_go_first() -> None:
    engine = LocalEngine(tiny(), EngineSettings(slots=1, capacity=2048, context=512, threads=1))
    ended: list[str] = []

    async def one(name: str, priority: int) -> None:
        request = Request(id=name, ids=(1, 2), sampling=Sampling(temperature=0.0, max_tokens=60), priority=priority)
        async for _ in engine.submit(request):
            pass
        ended.append(name)

    await asyncio.gather(one("first", 0), one("late", 5), one("soon", 1))
    assert ended == ["first", "soon", "late"]
    await engine.close()


async def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine() -> None:
    loaded = tiny(tie_word_embeddings=False)
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[13] = float("nan")
    engine = LocalEngine(loaded, SETTINGS)
    healthy = asyncio.create_task(ask(engine, prompt_without(13, 30)))
    with pytest.raises(EngineError, match="not finite"):
        await ask(engine, [1, 2, 13, 4])
    ids = prompt_without(13, 30)
    check_raw(loaded.model, ids, await healthy)
    check_raw(loaded.model, ids, await ask(engine, ids))
    await engine.close()


def prompt_without(token: int, length: int) -> list[int]:
    return [id for id in prompt(21, length * 2) if id != token][:length]


async def test_a_step_that_raises_fails_its_requests_and_not_the_engine(engine: LocalEngine) -> None:
    broken = Request(id="x", ids=(1, 2), sampling=Sampling(temperature=1.0, max_tokens=4, seed=0))
    engine._core._runners, kept = {"full": Broken()}, engine._core._runners  # type: ignore[assignment]
    with pytest.raises(EngineError, match="the engine failed in a step") as caught:
        async for _ in engine.submit(broken):
            pass
    assert caught.value.retryable
    engine._core._runners = kept
    assert (await engine.status()).running == 0
    assert len((await ask(engine, [1, 2, 3])).ids) == 12


async def test_steps_that_all_fail_are_not_the_requests_fault_and_the_engine_says_that_it_is_broken() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    engine._core._runners = {"full": Broken()}  # type: ignore[assignment]
    for _ in range(MAX_FAILED_STEPS):
        with pytest.raises(EngineError) as caught:
            await ask(engine, [1, 2])
        assert caught.value.retryable
    await eventually(lambda status: "out of luck" in status.failure, engine)
    for asked in (ask(engine, [1, 2]), engine.unload("line@1"), engine.logprobs([1, 2], "")):
        with pytest.raises(EngineError, match="broken"):
            await asked
    assert await until_stalled(engine.status, 60.0) == (await engine.status()).failure
    await engine.close()


async def test_an_error_outside_a_step_ends_every_request_and_the_engine_says_so(engine: LocalEngine) -> None:
    """What throws where nothing is caught (here the drain) must not end the thread while requests wait."""
    running = [asyncio.create_task(ask(engine, prompt(i, 8), Sampling(max_tokens=400))) for i in range(4)]
    await eventually(lambda status: status.running == 4, engine)

    def fail() -> None:
        raise RuntimeError("a bad drain")

    engine._core._draining.append((Adapter("x", "", "x#1"), fail))
    for task in running:
        with pytest.raises(EngineError, match="a bad drain") as caught:
            await task
        assert caught.value.retryable
    assert "a bad drain" in (await engine.status()).failure
    assert (await engine.status()).running == 0


async def test_a_command_that_fails_tells_who_waits_and_the_engine_lives_on(engine: LocalEngine) -> None:
    kept, engine._core.versions = engine._core.versions, None  # type: ignore[assignment]
    with pytest.raises(EngineError, match="the engine failed") as caught:
        await engine.unload("line@1")
    assert caught.value.retryable
    engine._core.versions = kept
    assert (await engine.status()).failure == ""
    assert len((await ask(engine, [1, 2, 3])).ids) == 12


async def test_a_thread_that_hangs_in_a_step_is_a_stall_and_one_that_rests_is_none(engine: LocalEngine) -> None:
    rest = asyncio.create_task(until_stalled(engine.status, 0.05))
    await ask(engine, [1, 2, 3])
    await asyncio.sleep(0.2)
    assert not rest.done()
    rest.cancel()
    release = threading.Event()
    engine._core._runners, kept = {"full": Hanging(release)}, engine._core._runners  # type: ignore[assignment]
    asked = asyncio.create_task(ask(engine, [4, 5]))
    assert "no progress" in await until_stalled(engine.status, 0.05)
    engine._core._runners = kept
    release.set()
    with pytest.raises(EngineError, match="released"):
        await asked


class Hanging:
    """A runner that waits until the test lets it fail."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def run(self, pieces: Any) -> Any:
        self._release.wait()
        raise RuntimeError("released")


async def test_cpu_seconds_are_those_of_the_process_and_not_of_one_thread_times_the_threads() -> None:
    engine = LocalEngine(tiny(), SETTINGS.model_copy(update={"threads": 16}))
    before = time.process_time()
    await asyncio.gather(*[ask(engine, prompt(seed, 50)) for seed in range(4)])
    assert 0 < (await engine.status()).busy_seconds <= time.process_time() - before
    await engine.close()


class Broken:
    """A runner whose every step fails."""

    def run(self, pieces: Any) -> Any:
        raise RuntimeError("out of luck")


async def test_an_unknown_version_is_not_found_and_names_what_is_loaded(engine: LocalEngine) -> None:
    with pytest.raises(NotFound, match="support@3"):
        await ask(engine, [1], version="support@3")
    with pytest.raises(NotFound):
        await engine.logprobs([1, 2], "support@3")


async def test_number_zero_of_any_line_is_the_base(engine: LocalEngine) -> None:
    assert (await ask(engine, [1, 2, 3], version="support@0")).ids == (await ask(engine, [1, 2, 3])).ids


async def test_close_fails_what_still_runs() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    stream = engine.submit(Request(id="x", ids=(1,), sampling=Sampling(temperature=0.0, max_tokens=500)))
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    for late in (ask(engine, [1]), engine.unload("line@1"), engine.logprobs([1, 2], "")):
        with pytest.raises(EngineError, match="closed"):
            await late
    await engine.cancel("x")
    await engine.close()


async def test_the_local_engine_keeps_every_promise_of_an_engine(tmp_path: Path) -> None:
    versions = []
    for number in (1, 2):
        tensors = adapter_pairs(tiny().model, number)
        digest = checkpoint.write_adapter(tmp_path / str(number), tensors, ADAPTER_CONFIG)
        versions.append(Version(line="line", number=number, uri=str(tmp_path / str(number)), digest=digest))

    async def make() -> LocalEngine:
        return LocalEngine(tiny(), SETTINGS)

    await check_engine(make, prompt(3, 20), versions=versions)
