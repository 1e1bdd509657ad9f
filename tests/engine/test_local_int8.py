"""The local engine in int8: beside full precision, under adapters, and for whole models that are handed over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from engine.test_local import Answer, ask, check_raw, prompt
from engine.test_local_adapters import peft_model
from engine.tiny import ADAPTER_CONFIG, adapter_pairs, reference_logprobs, tiny
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.errors import BadRequest
from honed.sync.memory import MemoryChannel
from honed.types import Sampling

SETTINGS = EngineSettings(slots=8, capacity=4096, context=512, prefill_chunk=32, threads=1)
EXACT = Sampling(temperature=0.0, max_tokens=12)
QUICK = Sampling(temperature=0.0, max_tokens=12, precision="int8")


def gaps(model: torch.nn.Module, ids: list[int], answer: Answer) -> torch.Tensor:
    """How far the engine's raw log-probabilities lie from transformers'."""
    expected = reference_logprobs(model, ids + answer.ids)[len(ids) - 1 : -1]
    return (expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0] - torch.tensor(answer.raw)).abs()


async def test_both_precisions_serve_side_by_side_and_share_no_cache() -> None:
    one = adapter_pairs(tiny().model, 1)
    channel = MemoryChannel(ADAPTER_CONFIG)
    await channel.publish("line@1", one)
    engine = LocalEngine(tiny(), SETTINGS, channel, precisions=("int8",))
    models = {"": tiny().model, "line@1": peft_model("llama", one)}
    asked: list[tuple[str, list[int], Sampling]] = [
        (version, prompt(seed, 60), sampling) for seed in range(2) for version in models for sampling in (EXACT, QUICK)
    ]
    for _ in range(2):  # the second time from the cache
        answers = await asyncio.gather(*[ask(engine, ids, sampling, version) for version, ids, sampling in asked])
        for (version, ids, sampling), answer in zip(asked, answers, strict=True):
            if sampling is EXACT:
                check_raw(models[version], ids, answer, 2e-4)
            else:
                found = gaps(models[version], ids, answer)
                assert 1e-4 < float(found.max()) < 0.5
    await engine.unload("line@1")
    assert not [key for key in engine._core.scheduler.blocks._roots if key.startswith("line@1")]
    await engine.close()


async def test_an_engine_that_serves_in_int8_needs_no_asking() -> None:
    engine = LocalEngine(tiny(), EngineSettings(**{**SETTINGS.model_dump(exclude_unset=True), "precision": "int8"}))
    answer, asked = await ask(engine, prompt(3, 40), EXACT), await ask(engine, prompt(3, 40), QUICK)
    assert answer.raw == asked.raw
    assert float(gaps(tiny().model, prompt(3, 40), answer).max()) > 1e-4
    scores = (await engine.logprobs([*prompt(3, 40), *answer.ids], "")).values
    assert scores[39:] == pytest.approx(answer.raw, abs=1e-4)
    with pytest.raises(BadRequest, match="holds no weights in full"):
        await ask(engine, [1, 2], Sampling(max_tokens=1, precision="full"))
    await engine.close()


async def test_a_request_for_a_precision_that_is_not_held_is_refused() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    with pytest.raises(BadRequest, match="holds no weights in int8"):
        await ask(engine, [1, 2], QUICK)
    await engine.close()


async def test_a_whole_model_is_quantised_when_it_is_handed_over() -> None:
    other: Any = tiny().model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    channel = MemoryChannel()
    await channel.publish("line@0.1", {name: value.detach() for name, value in other.named_parameters()})
    engine = LocalEngine(tiny(), SETTINGS, channel, precisions=("int8",))
    exact, quick = [await ask(engine, prompt(4, 50), sampling, "line@0.1") for sampling in (EXACT, QUICK)]
    check_raw(other, prompt(4, 50), exact)
    assert 1e-4 < float(gaps(other, prompt(4, 50), quick).max()) < 0.5
    await engine.close()
