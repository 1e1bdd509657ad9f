"""Training every weight: the gradients of each parameter, and versions that are models of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from engine.test_local import GREEDY, ask, check_raw
from model.tiny import directory
from transformers import AutoModelForCausalLM

from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError, CorruptData, Refused
from honed.model.linear import serving_copy
from honed.model.load import load
from honed.model.lora import LoraSettings
from honed.model.tree_model import Bend, TreeModel
from honed.protocols import Snapshot
from honed.runtime import learner
from honed.runtime.settings import LearnerSettings
from honed.sync.memory import MemoryChannel
from honed.train.local import LocalTrainer
from honed.train.settings import TrainSettings
from honed.train.weights import copies
from honed.types import Version

from .models import family, gradient, naive_logprobs, relative, sample, scored, shared_gradient, tiny

SETTINGS = TrainSettings(method="full", learning_rate=1e-2, threads=1, micro_tokens=40)
ENGINE = EngineSettings(slots=4, capacity=1024, context=128, threads=1)


def trainer(folder: Path, channel: MemoryChannel | None = None) -> LocalTrainer:
    loaded = load(directory(folder / "base"))
    return LocalTrainer(loaded, LoraSettings(), SETTINGS, folder / "blobs", channel)


async def learn(teacher: LocalTrainer, steps: int = 1) -> None:
    for _ in range(steps):
        assert not (await teacher.forward_backward(family(), "cross_entropy")).skipped
        assert not (await teacher.step()).skipped


def same(one: LocalTrainer, other: LocalTrainer) -> bool:
    return all(torch.equal(one._parameters[name], other._parameters[name]) for name in one._parameters)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_the_gradient_of_every_parameter_equals_that_of_each_sample_alone(dtype: torch.dtype, tolerance: float) -> None:
    model, samples = tiny(dtype), family()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for each in samples:
        (naive_logprobs(model, each) * torch.from_numpy(each.weights[1:]).to(dtype)).sum().backward()
    assert model.lm_head.weight.grad is not None
    expected = gradient(model)
    assert relative(shared_gradient(model, samples)[0], expected) < tolerance


@pytest.mark.parametrize("bend", [Bend(), Bend(0.5), Bend(1.0, 3.0), Bend(0.25, 2.0)])
def test_a_learning_head_has_the_gradient_of_the_formula(bend: Bend) -> None:
    reader = TreeModel(tiny())
    reader._bend = bend
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 32, dtype=torch.float64, generator=draw, requires_grad=True)
    reader.head = torch.nn.Linear(32, 53, bias=True, dtype=torch.float64)
    learning = (hidden, reader.head.weight, reader.head.bias)
    rows, targets = torch.tensor([0, 2, 5]), torch.tensor([1, 7, 3])
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    product = (hidden[rows] @ reader.head.weight.T + reader.head.bias) * bend.scale
    logits = product if bend.cap is None else torch.tanh(product / bend.cap) * bend.cap
    temperatures = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    expected = (logits / temperatures[:, None]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((expected * weights).sum(), learning)
    found = reader.logprobs(hidden, rows, targets, temperatures, 2)
    assert torch.allclose(found, expected, rtol=1e-12)
    for slope, right in zip(torch.autograd.grad((found * weights).sum(), learning), wanted, strict=True):
        assert torch.allclose(slope, right, rtol=1e-10, atol=1e-12)


async def test_products_in_bfloat16_leave_weights_and_gradients_in_float32(tmp_path: Path) -> None:
    """The format of a GPU, on a CPU."""
    found = []
    for autocast in ("float32", "bfloat16"):
        loaded = load(directory(tmp_path / autocast))
        settings = SETTINGS.model_copy(update={"autocast": autocast})
        teacher = LocalTrainer(loaded, LoraSettings(), settings, tmp_path / "blobs")
        assert not (await teacher.forward_backward(family(), "cross_entropy")).skipped
        assert {parameter.dtype for parameter in teacher._parameters.values()} == {torch.float32}
        found.append(gradient(loaded.model))
    assert 1e-4 < relative(found[1], found[0]) < 0.05


async def test_a_snapshot_is_a_model_that_transformers_opens(tmp_path: Path) -> None:
    teacher, samples = trainer(tmp_path), family()
    before = await scored(teacher, samples)
    await learn(teacher, 3)
    kept = await teacher.snapshot("versions/support/1")
    assert kept.kind == "full"
    after = await scored(teacher, samples)
    assert sum(map(sum, after)) > sum(map(sum, before))
    model = AutoModelForCausalLM.from_pretrained(kept.uri)
    for each, found in zip(samples, after, strict=True):
        assert naive_logprobs(model, each).tolist() == pytest.approx(found[1:], abs=1e-4)
    names = {path.name for path in Path(kept.uri).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "manifest.json"} <= names
    assert load(Path(kept.uri)).config.vocab_size == model.config.vocab_size
    saved = json.loads((Path(kept.uri) / "config.json").read_text())
    assert not [value for value in saved.values() if isinstance(value, str) and "honed" in value]


async def test_training_goes_on_from_a_snapshot_bit_for_bit(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    await learn(teacher, 2)
    kept = await teacher.snapshot("runs/1")
    assert await teacher.snapshot("runs/1") == kept
    await learn(teacher, 2)
    other = trainer(tmp_path)
    await other.restore(kept)
    await learn(other, 2)
    assert same(teacher, other)


async def test_nothing_restored_is_the_model_as_it_came(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    before = copies(teacher._parameters)
    await teacher.restore(None)
    assert not (await teacher.forward_backward(family(), "cross_entropy")).skipped
    await teacher.restore(None)
    assert (await teacher.step()).skipped == "no gradient was accumulated"
    await learn(teacher)
    assert not all(torch.equal(teacher._parameters[name], before[name]) for name in before)
    await teacher.restore(None)
    assert all(torch.equal(teacher._parameters[name], before[name]) for name in before)


async def test_what_was_made_by_the_other_method_is_refused(tmp_path: Path) -> None:
    full = trainer(tmp_path)
    adapter = LocalTrainer(load(directory(tmp_path / "two")), LoraSettings(), TrainSettings(threads=1), tmp_path / "b")
    with pytest.raises(Refused, match=r"an adapter, and train.method = 'full' goes on from a whole model"):
        await full.restore(await adapter.snapshot("runs/a"))
    with pytest.raises(Refused, match=r"a whole model, and train.method = 'lora' goes on from an adapter"):
        await adapter.restore(await full.snapshot("runs/f"))


async def test_a_damaged_or_foreign_snapshot_changes_nothing(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    await learn(teacher)
    kept, before = await teacher.snapshot("runs/1"), copies(teacher._parameters)
    wide = LocalTrainer(load(directory(tmp_path / "wide", vocab_size=300)), LoraSettings(), SETTINGS, tmp_path / "b")
    with pytest.raises(CorruptData, match="another shape"):
        await teacher.restore(await wide.snapshot("runs/w"))
    weights = Path(kept.uri) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptData, match=r"model.safetensors does not match"):
        await teacher.restore(kept)
    with pytest.raises(CorruptData, match="no checkpoint"):
        await teacher.restore(Snapshot(uri=str(tmp_path / "base"), digest="x", kind="full"))
    assert all(torch.equal(teacher._parameters[name], before[name]) for name in before)


async def test_a_whole_model_serves_beside_the_first_one(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    await learn(teacher, 3)
    kept = await teacher.snapshot("versions/support/1")
    loaded = load(tmp_path / "base")
    engine = LocalEngine(loaded, ENGINE)
    version = Version(line="support", number=1, kind="full", uri=kept.uri, digest=kept.digest, base=loaded.digest)
    await engine.load(version)
    models = {"": loaded.model, "support@1": AutoModelForCausalLM.from_pretrained(kept.uri)}
    prompts = [[5, 6, 7, 8, 9] * 8, [50, 60, 70]]
    asked = [(name, ids) for ids in prompts for name in models] * 2
    for (name, ids), answer in zip(asked, [await ask(engine, ids, version=name) for name, ids in asked], strict=True):
        check_raw(models[name], ids, answer)
    together = await asyncio.gather(*[ask(engine, ids, GREEDY, version=name) for name, ids in asked])
    for (name, ids), answer in zip(asked, together, strict=True):
        check_raw(models[name], ids, answer)
    await engine.unload("support@1")
    assert (await engine.status()).versions == ()
    await engine.close()


async def test_whole_models_of_other_shapes_or_broken_values_are_refused(tmp_path: Path) -> None:
    teacher, channel = trainer(tmp_path), MemoryChannel()
    wide = LocalTrainer(load(directory(tmp_path / "wide", vocab_size=300)), LoraSettings(), SETTINGS, tmp_path / "b")
    kept = await wide.snapshot("versions/support/1")
    engine = LocalEngine(load(tmp_path / "base"), ENGINE, channel)
    with pytest.raises(ConfigError, match=r"support@1 is a model of another shape.*embed_tokens"):
        await engine.load(Version(line="support", number=1, kind="full", uri=kept.uri, digest=kept.digest))
    broken = copies(teacher._parameters)
    broken["model.norm.weight"][0] = torch.nan
    await channel.publish("support@0.1", broken)
    with pytest.raises(CorruptData, match=r"not finite in 'model.norm.weight'"):
        await ask(engine, [1, 2], version="support@0.1")
    assert (await engine.status()).versions == ()
    await engine.close()


async def test_a_learner_of_all_weights_hands_them_over_and_leaves_the_base_alone(tmp_path: Path) -> None:
    source = directory(tmp_path / "base")
    settings = LearnerSettings(blobs=str(tmp_path / "blobs"), train=SETTINGS, engine=ENGINE, threads=1)
    try:
        engine, teacher = await learner.make(str(source), settings)
    finally:
        torch.use_deterministic_algorithms(False)
    ids = [5, 6, 7, 8, 9]
    before = (await engine.logprobs(ids, "")).values
    for step in range(2):
        assert not (await teacher.forward_backward(family(), "cross_entropy")).skipped
        await teacher.step(1e-2)
        await teacher.publish(f"support@0.{step}")
    assert (await engine.logprobs(ids, "")).values == before
    found = (await engine.logprobs(ids, "support@0.1")).values
    (expected,) = await scored(teacher, [sample(ids, 2)])
    assert found == pytest.approx(expected[1:], abs=1e-4)
    assert found != pytest.approx(before, abs=1e-2)
    await engine.close()
    await teacher.close()


def test_a_serving_copy_that_is_not_packed_would_share_what_is_trained() -> None:
    """Why the learner copies the model for its engine."""
    model = tiny()
    serving = serving_copy(model)
    shared = {id(parameter) for parameter in model.parameters()}
    assert any(id(parameter) in shared for parameter in serving.model.parameters())
