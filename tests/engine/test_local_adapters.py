"""LoRA versions in the local engine: PEFT's numerics, several in one batch, loading and unloading under load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from engine.test_local import GREEDY, SETTINGS, ask, check_raw, eventually, prompt
from engine.tiny import ADAPTER_CONFIG, adapter_pairs, tiny
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError, CorruptData, EngineError, NotFound, Refused
from honed.model import checkpoint
from honed.protocols import Request
from honed.sync.memory import MemoryChannel
from honed.types import Sampling, Version


def peft_model(kind: str, tensors: dict[str, torch.Tensor], targets: Any = "all-linear") -> torch.nn.Module:
    """PEFT's own model with those tensors."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4, lora_alpha=8)
    model = get_peft_model(tiny(kind).model, config)
    result = set_peft_model_state_dict(model, tensors)
    assert not result.unexpected_keys
    return model.eval()


async def with_adapters(kind: str, **adapters: dict[str, torch.Tensor]) -> LocalEngine:
    """An engine whose versions line@1, line@2, ... come through a channel."""
    channel = MemoryChannel(ADAPTER_CONFIG, limit=8)
    for name, tensors in adapters.items():
        await channel.publish(name.replace("_", "@"), tensors)
    return LocalEngine(tiny(kind), SETTINGS, channel)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_several_adapters_in_one_batch_equal_peft(kind: str) -> None:
    one, two = adapter_pairs(tiny(kind).model, 1), adapter_pairs(tiny(kind).model, 2)
    engine = await with_adapters(kind, line_1=one, line_2=two)
    models = {"": tiny(kind).model, "line@1": peft_model(kind, one), "line@2": peft_model(kind, two)}
    asked = [(version, prompt(seed, 20 + 13 * seed)) for seed in range(3) for version in models]
    answers = await asyncio.gather(*[ask(engine, ids, version=version) for version, ids in asked])
    for (version, ids), answer in zip(asked, answers, strict=True):
        check_raw(models[version], ids, answer, 2e-4)
    assert len({tuple(answer.ids) for answer in answers[:3]}) == 3  # the adapters do differ
    await engine.close()


async def test_an_adapter_of_some_modules_equals_peft() -> None:
    tensors = {
        key: value
        for key, value in adapter_pairs(tiny().model, 3).items()
        if any(name in key for name in ("k_proj", "v_proj", "up_proj"))
    }
    engine = await with_adapters("llama", line_1=tensors)
    answer = await ask(engine, prompt(0, 40), version="line@1")
    check_raw(peft_model("llama", tensors, ["k_proj", "v_proj", "up_proj"]), prompt(0, 40), answer, 2e-4)
    await engine.close()


async def test_cached_prompts_never_cross_versions() -> None:
    one, two = adapter_pairs(tiny().model, 1), adapter_pairs(tiny().model, 2)
    engine = await with_adapters("llama", line_1=one, line_2=two)
    ids = prompt(1, 64)
    for version, model in (("line@1", peft_model("llama", one)), ("line@2", peft_model("llama", two))):
        answer = await ask(engine, ids, version=version)
        assert answer.usage is not None
        assert answer.usage.cached == 0
        check_raw(model, ids, answer, 2e-4)
        again = await ask(engine, ids, version=version)
        assert again.usage is not None
        assert again.usage.cached == 48
    await engine.close()


async def test_a_name_with_new_weights_after_unload_shares_nothing_with_the_old() -> None:
    channel = MemoryChannel(ADAPTER_CONFIG)
    engine = LocalEngine(tiny(), SETTINGS, channel)
    for seed in (1, 2):
        tensors = adapter_pairs(tiny().model, seed)
        await channel.publish("line@1", tensors)
        answer = await ask(engine, prompt(1, 64), version="line@1")
        assert answer.usage is not None
        assert answer.usage.cached == 0
        check_raw(peft_model("llama", tensors), prompt(1, 64), answer, 2e-4)
        await engine.unload("line@1")
        assert (await engine.status()).used == 0
    await engine.close()


async def test_logprobs_under_an_adapter_equal_peft() -> None:
    tensors = adapter_pairs(tiny().model, 1)
    engine = await with_adapters("llama", line_1=tensors)
    ids = prompt(2, 70)
    with torch.no_grad():
        logits = peft_model("llama", tensors)(torch.tensor([ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (await engine.logprobs(ids, "line@1")).values == pytest.approx(expected.tolist(), abs=2e-4)
    await engine.close()


async def test_sixteen_requests_survive_loading_and_unloading() -> None:
    channel = MemoryChannel(ADAPTER_CONFIG, limit=8)
    tensors = {f"line@{number}": adapter_pairs(tiny().model, number) for number in (1, 2, 3)}
    await channel.publish("line@1", tensors["line@1"])
    engine = LocalEngine(tiny(), EngineSettings(slots=16, capacity=8192, context=256, threads=1), channel)
    sampling = Sampling(temperature=0.0, max_tokens=60)
    running = [asyncio.create_task(ask(engine, prompt(i, 20), sampling, "line@1")) for i in range(16)]
    await eventually(lambda status: status.running == 16, engine)
    for name in ("line@2", "line@3"):
        await channel.publish(name, tensors[name])
        await engine.load(Version(line="line", number=int(name[-1]), uri="memory:" + name))
    leaving = asyncio.create_task(engine.unload("line@1"))
    await asyncio.sleep(0.01)
    late = await asyncio.gather(*[ask(engine, prompt(i, 20), sampling, "line@2") for i in range(4)])
    answers = await asyncio.gather(*running)
    await leaving
    assert (await engine.status()).versions == ("line@2", "line@3")
    for expected, many in (("line@1", answers), ("line@2", late)):
        model = peft_model("llama", tensors[expected])
        for i, answer in enumerate(many):
            assert len(answer.ids) == 60
            check_raw(model, prompt(i, 20), answer, 5e-4)
    await engine.close()


async def test_an_unloaded_version_is_refused_while_its_last_request_runs() -> None:
    engine = LocalEngine(tiny(), EngineSettings(context=1000, threads=1), MemoryChannel(ADAPTER_CONFIG, limit=1))
    assert engine._channel is not None
    await engine._channel.publish("line@1", adapter_pairs(tiny().model, 1))
    request = Request(id="x", ids=(1, 2), sampling=Sampling(temperature=0.0, max_tokens=900), version="line@1")
    stream = engine.submit(request)
    await anext(stream)
    leaving = asyncio.create_task(engine.unload("line@1"))
    await eventually(lambda status: not status.versions, engine)
    await engine._channel.publish("other@1", {})  # pushes line@1 out of the channel
    with pytest.raises(NotFound):
        await ask(engine, [1], version="line@1")
    assert not leaving.done()
    await stream.aclose()
    await leaving
    await engine.close()


async def test_unloading_what_is_not_loaded_does_nothing() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    await engine.unload("line@9")
    assert (await engine.status()).versions == ()
    await engine.close()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (Version(line="line", number=1, uri="memory:line@1", base="another"), "base"),
        (Version(line="line", number=1, uri="/nowhere", kind="full", base="another"), "base"),
    ],
)
async def test_what_cannot_be_added_to_this_base_is_refused(version: Version, message: str) -> None:
    engine = await with_adapters("llama", line_1=adapter_pairs(tiny().model, 1))
    with pytest.raises(Refused, match=message):
        await engine.load(version)
    await engine.close()


async def test_wrong_adapters_are_refused_and_the_engine_lives_on() -> None:
    good = adapter_pairs(tiny().model, 1)
    key = next(iter(good))
    other = "base_model.model.model.embed_tokens.lora_A.weight"
    wrong: dict[str, tuple[dict[str, Any], type[Exception]]] = {
        "shape": ({**good, key: good[key][:, 1:]}, ConfigError),
        "nan": ({**good, key: good[key] * float("nan")}, CorruptData),
        "half": ({k: v for k, v in good.items() if k != key}, CorruptData),
        "empty": ({}, CorruptData),
        "name": ({**good, "base_model.model.lm_head.weight": good[key]}, ConfigError),
        "target": ({**good, other: good[key], other.replace("_A", "_B"): good[key]}, ConfigError),
    }
    channel = MemoryChannel(ADAPTER_CONFIG, limit=16)
    engine = LocalEngine(tiny(), SETTINGS, channel)
    for name, (tensors, error) in wrong.items():
        await channel.publish(f"{name}@1", tensors)
        with pytest.raises(error, match=name):
            await engine.load(Version(line=name, number=1, uri=f"memory:{name}@1"))
    assert (await engine.status()).versions == ()
    assert len((await ask(engine, [1, 2], GREEDY)).ids) == 12
    await engine.close()


@pytest.mark.parametrize(
    "config", [{"r": 4}, {}, {"r": 4, "lora_alpha": 8, "use_dora": True}, {"r": 4, "lora_alpha": 8, "bias": "all"}]
)
async def test_kinds_of_lora_that_are_not_supported_are_refused(config: dict[str, Any]) -> None:
    channel = MemoryChannel(config)
    await channel.publish("line@1", adapter_pairs(tiny().model, 1))
    engine = LocalEngine(tiny(), SETTINGS, channel)
    with pytest.raises(ConfigError, match="line@1"):
        await engine.load(Version(line="line", number=1, uri="memory:line@1"))
    await engine.close()


async def test_a_checkpoint_is_verified_loaded_once_and_equals_peft(tmp_path: Path) -> None:
    tensors = adapter_pairs(tiny().model, 1)
    digest = checkpoint.write_adapter(tmp_path / "v1", tensors, ADAPTER_CONFIG)
    engine = LocalEngine(tiny(), SETTINGS)
    for uri in (str(tmp_path / "v1"), (tmp_path / "v1").as_uri()):
        await engine.load(Version(line="line", number=1, uri=uri, digest=digest, base="tiny-llama"))
    assert (await engine.status()).versions == ("line@1",)
    answer = await ask(engine, prompt(0, 40), version="line@1")
    check_raw(peft_model("llama", tensors), prompt(0, 40), answer, 2e-4)
    other = checkpoint.write_adapter(tmp_path / "v2", adapter_pairs(tiny().model, 2), ADAPTER_CONFIG)
    with pytest.raises(Refused, match="line@1"):
        await engine.load(Version(line="line", number=1, uri=str(tmp_path / "v2"), digest=other))
    await engine.close()


async def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    digest = checkpoint.write_adapter(tmp_path, adapter_pairs(tiny().model, 1), ADAPTER_CONFIG)
    weights = tmp_path / checkpoint.WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    engine = LocalEngine(tiny(), SETTINGS)
    with pytest.raises(CorruptData, match=checkpoint.WEIGHTS):
        await engine.load(Version(line="line", number=1, uri=str(tmp_path), digest=digest))
    with pytest.raises(NotFound):
        await ask(engine, [1], version="line@1")
    await engine.close()


async def test_base_versions_need_no_loading() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    await engine.load(Version(line="line", number=0))
    await engine.load(Version(line="line", number=0, kind="full", base="tiny-llama"))
    assert (await engine.status()).versions == ()
    await engine.close()


async def test_a_version_without_files_is_not_found() -> None:
    engine = LocalEngine(tiny(), SETTINGS)
    with pytest.raises(NotFound, match="line@1"):
        await engine.load(Version(line="line", number=1))
    with pytest.raises(NotFound, match="no channel"):
        await engine.load(Version(line="line", number=1, uri="memory:line@1"))
    await engine.close()


async def test_two_loads_of_one_version_at_once_install_it_once(tmp_path: Path) -> None:
    digest = checkpoint.write_adapter(tmp_path, adapter_pairs(tiny().model, 1), ADAPTER_CONFIG)
    engine = LocalEngine(tiny(), SETTINGS)
    version = Version(line="line", number=1, uri=str(tmp_path), digest=digest)
    running = asyncio.create_task(ask(engine, prompt(0, 20), Sampling(temperature=0.0, max_tokens=200)))
    await asyncio.gather(engine.load(version), engine.load(version))
    installed = engine._core.versions["line@1"]
    await engine.load(version)
    assert engine._core.versions["line@1"] is installed
    assert installed.key.partition("#")[0] == "line@1"
    assert (await engine.status()).versions == ("line@1",)
    assert len((await ask(engine, prompt(0, 40), version="line@1")).ids) == 12
    assert len((await running).ids) == 200
    await engine.close()


async def test_a_version_that_is_read_while_the_engine_closes_is_an_error_and_no_wait(tmp_path: Path) -> None:
    digest = checkpoint.write_adapter(tmp_path, adapter_pairs(tiny().model, 1), ADAPTER_CONFIG)
    engine = LocalEngine(tiny(), SETTINGS)
    loading = asyncio.create_task(engine.load(Version(line="line", number=1, uri=str(tmp_path), digest=digest)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await loading
