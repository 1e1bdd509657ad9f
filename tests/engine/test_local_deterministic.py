"""deterministic = true: the same bits whatever runs beside a request and however its prompt was read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.test_local import Answer, ask, check_raw, prompt
from engine.tiny import ADAPTER_CONFIG, adapter_pairs, tiny
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError
from honed.sync.memory import MemoryChannel
from honed.types import Sampling

SETTINGS: dict[str, Any] = {"slots": 8, "capacity": 4096, "context": 500, "threads": 2, "deterministic": True}
WIDE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
"""Widths that two threads share evenly."""
SAMPLING = Sampling(temperature=0.8, top_p=0.9, max_tokens=9, seed=5, top_logprobs=2)
LENGTHS = (1, 15, 16, 17, 40, 100)


async def engine_of(kind: str, halved: bool = False, **settings: Any) -> LocalEngine:
    channel = MemoryChannel(ADAPTER_CONFIG)
    loaded = tiny(kind, halved=halved, **WIDE)
    await channel.publish("line@1", adapter_pairs(loaded.model, 1))
    return LocalEngine(loaded, EngineSettings(**{**SETTINGS, **settings}), channel)


def bits(answer: Answer) -> tuple[Any, ...]:
    return answer.ids, answer.logprobs, answer.raw, answer.top


async def alone(kind: str, version: str, halved: bool = False) -> list[Answer]:
    """Each prompt in an engine that does nothing else, read in one piece."""
    engine = await engine_of(kind, halved, prefix=False, prefill_chunk=512)
    answers = [await ask(engine, prompt(n, n), SAMPLING, version) for n in LENGTHS]
    await engine.close()
    return answers


@pytest.mark.parametrize(
    ("kind", "version", "halved"),
    [
        ("llama", "", False),
        ("llama", "line@1", False),
        ("llama", "line@1", True),
        ("qwen2", "line@1", False),
        ("mistral", "", False),
        ("gemma2", "", False),
    ],
)
async def test_neighbours_chunks_and_reuse_change_no_bit(kind: str, version: str, halved: bool) -> None:
    expected = await alone(kind, version, halved)
    engine = await engine_of(kind, halved, prefill_chunk=23)
    for _ in range(2):  # the second time prompts are there already
        others = [ask(engine, prompt(90 + n, 3 * n), SAMPLING, other) for n in (7, 30) for other in ("", "line@1")]
        scored = [engine.logprobs(prompt(77, 60), other) for other in ("", "line@1")]
        answers = await asyncio.gather(*[ask(engine, prompt(n, n), SAMPLING, version) for n in LENGTHS], *others)
        await asyncio.gather(*scored)
        assert [bits(answer) for answer in answers[: len(LENGTHS)]] == [bits(answer) for answer in expected]
    await engine.close()


async def test_what_was_sampled_scores_as_it_was_sampled() -> None:
    engine = await engine_of("llama")
    sampling = Sampling(temperature=1.0, max_tokens=9, seed=5)
    answer = await ask(engine, prompt(3, 30), sampling)
    scores = await engine.logprobs([*prompt(3, 30), *answer.ids], "")
    assert scores.values[29:] == answer.raw
    check_raw(tiny(**WIDE).model, prompt(3, 30), answer)
    await engine.close()


async def test_without_it_products_do_depend_on_their_rows() -> None:
    """Else the tests above would prove nothing."""
    tiled, plain = await alone("llama", "", halved=True), []
    engine = await engine_of("llama", halved=True, deterministic=False, prefix=False, prefill_chunk=512)
    plain = [await ask(engine, prompt(n, n), SAMPLING) for n in LENGTHS]
    assert [answer.raw for answer in plain] != [answer.raw for answer in tiled]
    for one, other in zip(plain, tiled, strict=True):
        assert one.raw == pytest.approx(other.raw, abs=1e-4)
    await engine.close()


async def test_mixtures_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.deterministic: experts get rows by the batch"):
        await engine_of("mixtral")


async def test_threads_that_cannot_share_the_layers_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers 96 and 160 wide can't be shared evenly. Set engine.threads to 2"):
        await engine_of("llama", threads=3)
    with pytest.raises(ConfigError, match=r"Set engine.deterministic to false"):
        LocalEngine(tiny(intermediate_size=72), EngineSettings(**SETTINGS))
    engine = await engine_of("llama", threads=0)
    await engine.close()
