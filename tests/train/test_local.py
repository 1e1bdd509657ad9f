from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel

from honed.errors import CorruptData, Refused, UserError
from honed.model.lora import LoraSettings
from honed.protocols import Snapshot
from honed.sync.memory import MemoryChannel
from honed.train.local import LocalTrainer
from honed.train.settings import TrainSettings
from honed.train.weights import copies
from honed.types import Sample

from .models import family, naive_logprobs, sample, scored, tiny

SETTINGS = TrainSettings(learning_rate=1e-2, threads=1, micro_tokens=40)


def trainer(folder: Path, channel: MemoryChannel | None = None, **settings: object) -> LocalTrainer:
    model = tiny(torch.float32)
    loaded = SimpleNamespace(model=model, config=model.config, directory=folder, digest="base")
    chosen = TrainSettings(**{**SETTINGS.model_dump(), **settings})
    return LocalTrainer(loaded, LoraSettings(rank=4, alpha=8), chosen, folder / "blobs", channel)


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return copies(trainer._parameters)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def nll(trainer: LocalTrainer, samples: list[Sample]) -> float:
    found = await scored(trainer, samples)
    return -float(sum(np.dot(s.weights, lp) for s, lp in zip(samples, found, strict=True)))


async def imitate(trainer: LocalTrainer, samples: list[Sample], steps: int) -> None:
    for _ in range(steps):
        assert not (await trainer.forward_backward(samples, "cross_entropy")).skipped
        assert not (await trainer.step()).skipped


async def test_imitation_lowers_the_loss_and_reports_what_it_did(tmp_path: Path) -> None:
    teacher, samples = trainer(tmp_path), family()
    before = await nll(teacher, samples)
    result = await teacher.forward_backward(samples, "cross_entropy")
    assert result.loss == pytest.approx(before, rel=1e-5)
    assert (result.num_samples, result.trained_tokens) == (6, 24)
    assert result.tokens == sum(len(sample.tokens) for sample in samples)
    assert 0 < result.metrics["distinct_tokens"] < result.tokens
    assert result.metrics["micro_batches"] > 1
    assert result.seconds > 0
    stepped = await teacher.step(1e-2)
    assert stepped.grad_norm > 0
    await imitate(teacher, samples, 10)
    assert await nll(teacher, samples) < before / 2


async def test_policy_gradient_moves_towards_reward_and_measures_the_mismatch(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    good, bad = sample([1, 2, 3, 4, 5], 2), sample([1, 2, 3, 6, 7], 2)
    rows = [msgspec.structs.replace(s, weights=(s.weights != 0).astype(np.float32) / 4) for s in (good, bad)]
    before = await scored(teacher, rows)
    batch = [
        msgspec.structs.replace(row, logprobs=np.asarray(lp, np.float32), advantages=np.full(5, advantage, np.float32))
        for row, lp, advantage in zip(rows, before, (0.5, -0.5), strict=True)
    ]
    result = await teacher.forward_backward(batch, "policy_gradient")
    assert result.loss == pytest.approx(0, abs=1e-6)
    assert result.metrics["mismatch_max"] < 1e-5
    assert result.metrics["mismatch_k3"] == pytest.approx(0, abs=1e-9)
    await teacher.step(1e-2)
    after = await scored(teacher, rows)
    assert sum(after[0][3:]) > sum(before[0][3:])
    assert sum(after[1][3:]) < sum(before[1][3:])
    off = [msgspec.structs.replace(s, logprobs=s.logprobs - np.float32(0.25)) for s in batch]
    again = (await teacher.forward_backward(off, "policy_gradient")).metrics
    assert again["mismatch_max"] > 0.1


async def test_logprobs_are_those_of_the_model_at_the_samples_temperature(tmp_path: Path) -> None:
    samples = [msgspec.structs.replace(s, temperature=0.5 + i / 4) for i, s in enumerate(family())]
    found = await scored(trainer(tmp_path), samples)
    for one, lp in zip(samples, found, strict=True):
        assert lp[0] == 0.0
        assert lp[1:] == pytest.approx(naive_logprobs(tiny(torch.float32), one).tolist(), abs=2e-5)


async def test_preference_pairs(tmp_path: Path) -> None:
    teacher = trainer(tmp_path, micro_tokens=1)
    pairs = [sample([1, 2, 3, number], 1, pair=f"{i}:{side}") for i, side, number in PAIRS]
    reference = await scored(teacher, pairs)
    ones = [np.array([0, 0, 0, 0.5], np.float32)] * 4
    rows = [
        msgspec.structs.replace(s, reference=np.asarray(lp, np.float32), weights=w)
        for s, lp, w in zip(pairs, reference, ones, strict=True)
    ]
    result = await teacher.forward_backward(rows, "preference")
    assert result.loss == pytest.approx(np.log(2), rel=1e-5)
    assert result.metrics["pairs"] == 2
    for _ in range(5):
        await teacher.step(1e-2)
        result = await teacher.forward_backward(rows, "preference")
    assert result.loss < np.log(2)
    assert result.metrics["pairs_right"] == 1.0


PAIRS = [(0, "chosen", 4), (1, "rejected", 7), (0, "rejected", 5), (1, "chosen", 6)]


async def test_a_batch_without_trained_tokens_is_skipped_and_changes_nothing(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    before = weights(teacher)
    blank = [msgspec.structs.replace(s, weights=np.zeros(len(s.tokens), np.float32)) for s in family()]
    result = await teacher.forward_backward(blank, "cross_entropy")
    assert result.skipped == "no trained tokens"
    assert result.loss == 0
    assert (await teacher.step()).skipped
    assert same(weights(teacher), before)


async def test_what_is_not_finite_is_skipped_and_leaves_no_trace(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    await imitate(teacher, family(), 1)
    before = weights(teacher)
    huge = msgspec.structs.replace(family()[0], weights=np.where(family()[0].weights, 3e38, 0).astype(np.float32))
    result = await teacher.forward_backward([huge], "cross_entropy")
    assert result.skipped == "the loss is inf"
    assert (await teacher.step()).skipped == "the loss is inf"
    assert same(weights(teacher), before)
    await imitate(teacher, family(), 1)
    assert all(torch.isfinite(tensor).all() for tensor in weights(teacher).values())


async def test_a_malformed_sample_is_refused_before_anything_runs(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    bad = sample([1, 2, 3], 2, advantages=np.array([0, np.nan, 0], np.float32))
    with pytest.raises(Refused, match="advantages holds"):
        await teacher.forward_backward([*family(), bad], "policy_gradient")
    assert (await teacher.step()).skipped.startswith("a pass failed")
    assert (await teacher.step()).skipped == "no gradient was accumulated"


async def test_a_pass_that_fails_half_way_leaves_no_gradient(tmp_path: Path) -> None:
    teacher, samples = trainer(tmp_path, micro_tokens=1), family()
    before = weights(teacher)
    bad = [*samples[:-1], msgspec.structs.replace(samples[-1], logprobs=None)]
    with pytest.raises(Refused, match="no logprobs"):
        await teacher.forward_backward(bad, "policy_gradient")
    assert "no logprobs" in (await teacher.step()).skipped
    assert same(weights(teacher), before)


@pytest.mark.parametrize("id", [53, -1])
async def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, id: int) -> None:
    teacher = trainer(tmp_path)
    with pytest.raises(Refused, match="not in"):
        await teacher.forward_backward([sample([1, id, 2], 1)], "cross_entropy")
    with pytest.raises(Refused, match="not in"):
        await teacher.logprobs([sample([1, id, 2], 1)])


async def test_a_masked_sample_changes_no_weight(tmp_path: Path) -> None:
    one, other = trainer(tmp_path), trainer(tmp_path)
    blank = msgspec.structs.replace(family()[0], weights=np.zeros(len(family()[0].tokens), np.float32))
    await imitate(one, family(), 2)
    await imitate(other, [*family(), blank], 2)
    assert same(weights(one), weights(other))


async def test_the_same_samples_and_seed_give_the_same_bits(tmp_path: Path) -> None:
    first, second, third = trainer(tmp_path), trainer(tmp_path), trainer(tmp_path, seed=1)
    for teacher in (first, second, third):
        await imitate(teacher, family(), 3)
    assert same(weights(first), weights(second))
    assert not same(weights(first), weights(third))


async def test_a_fresh_adapter_is_the_base_model(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    fresh, base = weights(teacher), await scored(teacher, family())
    await imitate(teacher, family(), 2)
    await teacher.forward_backward(family(), "cross_entropy")
    await teacher.restore(None)
    assert same(weights(teacher), fresh)
    assert await scored(teacher, family()) == base
    assert (await teacher.step()).skipped, "accumulated gradients must be gone"


async def test_going_on_from_a_snapshot_equals_never_having_stopped(tmp_path: Path) -> None:
    straight, stopped = trainer(tmp_path), trainer(tmp_path)
    await imitate(straight, family(), 4)
    await imitate(stopped, family(), 2)
    kept = await stopped.snapshot("runs/r/2")
    resumed = trainer(tmp_path)
    await resumed.restore(kept)
    await imitate(resumed, family(), 2)
    assert same(weights(straight), weights(resumed))
    without = trainer(tmp_path)
    await without.restore(kept, optimiser=False)
    await imitate(without, family(), 2)
    assert not same(weights(straight), weights(without))


async def test_a_snapshot_is_a_folder_with_a_manifest_and_the_same_content_is_written_once(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    await imitate(teacher, family(), 1)
    first = await teacher.snapshot("versions/support/1")
    folder = tmp_path / "blobs" / "versions" / "support" / "1"
    assert first.uri == str(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "manifest.json", "optimiser"} <= names
    stamp = (folder / "manifest.json").stat().st_mtime_ns
    assert await teacher.snapshot("versions/support/1") == first
    assert (folder / "manifest.json").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.iterdir()] == ["1"]
    await imitate(teacher, family(), 1)
    second = await teacher.snapshot("versions/support/1")
    assert second.digest != first.digest
    with pytest.raises(CorruptData):
        await teacher.restore(first)
    await teacher.restore(second)


async def test_peft_itself_loads_a_snapshot(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    await imitate(teacher, family(), 2)
    kept = await teacher.snapshot("s")
    theirs = PeftModel.from_pretrained(tiny(torch.float32), kept.uri)
    for one, lp in zip(family(), await scored(teacher, family()), strict=True):
        ids = torch.from_numpy(one.tokens.astype(np.int64))[None]
        expected = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert lp[1:] == pytest.approx(expected.tolist(), abs=2e-5)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "manifest.json", "optimiser/optimiser.safetensors"])
async def test_a_damaged_snapshot_is_refused_by_file_and_nothing_changes(tmp_path: Path, file: str) -> None:
    teacher = trainer(tmp_path)
    await imitate(teacher, family(), 1)
    kept = await teacher.snapshot("s")
    await imitate(teacher, family(), 1)
    before = weights(teacher)
    path = Path(kept.uri) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=path.name if "manifest" not in file else "manifest.json|another version"):
        await teacher.restore(kept)
    assert same(weights(teacher), before)
    path.unlink()
    with pytest.raises(CorruptData):
        await teacher.restore(kept)
    assert same(weights(teacher), before)


async def test_a_snapshot_of_another_rank_is_refused(tmp_path: Path) -> None:
    kept = await trainer(tmp_path).snapshot("s")
    model = tiny(torch.float32)
    loaded = SimpleNamespace(model=model, config=model.config, directory=tmp_path, digest="base")
    other = LocalTrainer(loaded, LoraSettings(rank=2, alpha=8), SETTINGS, tmp_path / "blobs")
    with pytest.raises(CorruptData, match="another rank"):
        await other.restore(kept)


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../b", ""])
async def test_a_snapshot_stays_inside_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no snapshot name"):
        await trainer(tmp_path).snapshot(name)


async def test_published_weights_are_a_copy(tmp_path: Path) -> None:
    channel = MemoryChannel()
    teacher = trainer(tmp_path, channel)
    await teacher.publish("support@1.0")
    before = weights(teacher)
    await imitate(teacher, family(), 1)
    assert same(await channel.fetch("support@1.0"), before)
    await teacher.publish("support@1.1")
    assert same(await channel.fetch("support@1.1"), weights(teacher))


async def test_publishing_without_a_channel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no channel"):
        await trainer(tmp_path).publish("support@1.0")


async def test_a_snapshot_that_names_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CorruptData):
        await trainer(tmp_path).restore(Snapshot(uri=str(tmp_path / "gone"), digest="x"))
