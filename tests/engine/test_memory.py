"""engine.memory_gb: what is held never takes more, however requests come."""

from __future__ import annotations

import asyncio

import pytest
import torch
from model.test_bank import taken

from engine.test_local import ask, check_raw, prompt
from engine.tiny import tiny
from honed.config import parse
from honed.engine.cache import BLOCK, Shape, row_lengths
from honed.engine.local import LocalEngine
from honed.engine.memory import fit
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError
from honed.types import Sampling

SHAPE = Shape(num_layers=3, kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")


def test_without_a_budget_the_settings_decide() -> None:
    sizes = fit(EngineSettings(slots=5, capacity=999), SHAPE, 300)
    assert (sizes.slots, sizes.kept, sizes.capacity) == (5, 999, 999)


def test_a_budget_is_tokens_running_or_kept() -> None:
    """1e6 bytes are 2604 tokens of 384 bytes; 304, a prompt read from blocks to its row, are held back: 143 blocks."""
    sizes = fit(EngineSettings(slots=8, memory_gb=1e-3), SHAPE, 300)
    assert (sizes.slots, sizes.kept, sizes.capacity) == (8, 2288, 2288)


@pytest.fixture
def never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes no memory back."""
    monkeypatch.setattr("honed.engine.memory.RETURNS", False)


@pytest.mark.usefixtures("never_back")
def test_a_budget_is_shared_by_rows_and_kept_tokens_where_none_is_given_back() -> None:
    assert SHAPE.num_bytes == 2 * 3 * 2 * 8 * 4
    assert row_lengths(300) == [256, 304]
    # 1e6 bytes are 2604 tokens of 384 bytes; a slot can come to 256 + 304; 3 take 1680, and 924 are left: 57 blocks
    sizes = fit(EngineSettings(slots=8, memory_gb=1e-3), SHAPE, 300)
    assert (sizes.slots, sizes.kept, sizes.capacity) == (3, 912, 3 * 300 + 912)
    assert (sizes.slots * 560 + sizes.kept) * SHAPE.num_bytes <= 1e6
    # fewer slots are left alone
    assert fit(EngineSettings(slots=2, memory_gb=1e-3), SHAPE, 300).slots == 2


def test_a_budget_for_less_than_two_rows_is_refused_with_the_number() -> None:
    assert fit(EngineSettings(memory_gb=608 * 384.4 / 1e9), SHAPE, 300).capacity == 304
    with pytest.raises(ConfigError, match=r"memory_gb = 0.0002 has no room for one request of 300.*set it to 0.00024"):
        fit(EngineSettings(memory_gb=0.0002), SHAPE, 300)
    assert fit(EngineSettings(memory_gb=0.00024), SHAPE, 300).capacity == 320


@pytest.mark.usefixtures("never_back")
def test_a_budget_for_less_than_one_request_is_refused_with_the_number() -> None:
    least = (560 + BLOCK) * SHAPE.num_bytes / 1e9
    assert fit(EngineSettings(memory_gb=least * 1.001), SHAPE, 300).slots == 1
    with pytest.raises(ConfigError, match=r"memory_gb = 0.0002 has no room for one request of 300.*set it to 0.00023"):
        fit(EngineSettings(memory_gb=0.0002), SHAPE, 300)
    assert fit(EngineSettings(memory_gb=0.00023), SHAPE, 300).slots == 1


def test_a_budget_and_a_capacity_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="capacity and memory_gb both"):
        parse(EngineSettings, {"memory_gb": 1.0, "capacity": 4096}, source="x")
    # a child gets the settings whole, defaults too
    whole = EngineSettings(memory_gb=1.0).model_dump(mode="json")
    assert parse(EngineSettings, whole, source="x").memory_gb == 1.0


async def test_requests_of_all_lengths_stay_within_the_budget() -> None:
    budget = 1e-3
    engine = LocalEngine(tiny(), EngineSettings(slots=64, memory_gb=budget, context=300, threads=1))
    sampling = Sampling(temperature=0.0, max_tokens=4)
    for first in range(2):
        asked = [prompt(seed, 10 + 13 * seed) for seed in range(first, 22)]
        answers = await asyncio.gather(*[ask(engine, ids, sampling) for ids in asked])
        for ids, answer in zip(asked, answers, strict=True):
            check_raw(tiny().model, ids, answer)
    scheduler = engine._core.scheduler
    assert scheduler.blocks._room is not None
    held = [*(bank.data for bank in scheduler.rows._banks.values()), scheduler.blocks._room.data]
    assert len(held) == 3
    assert 0.5 * budget * 1e9 < sum(map(taken, held)) <= budget * 1e9
    assert scheduler.blocks.num_tokens > 0
    status = await engine.status()
    assert 0 < status.used <= status.capacity
    await engine.close()


async def test_the_least_recently_used_goes_when_the_room_for_reuse_is_full() -> None:
    engine = LocalEngine(tiny(), EngineSettings(slots=8, memory_gb=1e-3, context=300, threads=1))
    sampling = Sampling(temperature=0.0, max_tokens=2)
    for seed in range(14):
        await ask(engine, prompt(seed, 200), sampling)
    newest = await ask(engine, prompt(13, 200), sampling)
    oldest = await ask(engine, prompt(0, 200), sampling)
    assert newest.usage is not None
    assert oldest.usage is not None
    assert (newest.usage.cached, oldest.usage.cached) == (192, 0)
    await engine.close()
