"""The arrays of samples that an algorithm needs and only the trainer or the engine knows: log-probabilities of given
tokens under the trainer's weights, the turn's first version, or a teacher."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from honed.protocols import Algorithm, Distillation, Engine, Scores, Trainer
from honed.store import Store
from honed.types import Group, Sample, Version


async def fill(
    samples: Sequence[Sample],
    algorithm: Algorithm,
    kinds: Mapping[str, str],
    *,
    trainer: Trainer,
    engine: Engine,
    store: Store,
    parent: Version,
) -> tuple[list[Sample], float]:
    """The samples with what `algorithm` needs, and the CPU seconds that it took; `kinds` is the kind of task of each
    branch, `parent` the reference."""
    samples, seconds = list(samples), 0.0
    if "old_logprobs" in algorithm.needs:
        found = await trainer.logprobs(samples)
        samples = [
            msgspec.structs.replace(s, old_logprobs=_array(each)) for s, each in zip(samples, found, strict=True)
        ]
        seconds += sum(each.seconds for each in found)
    wanted: list[str] = []
    if "reference" in algorithm.needs:
        await _load(engine, parent)
        wanted = [parent.id] * len(samples)
    elif isinstance(algorithm, Distillation):
        wanted = [algorithm.teacher(kinds.get(sample.branch, "")) for sample in samples]
        await load_versions(engine, store, wanted)
    for index, version in enumerate(wanted):
        sample = samples[index]
        scores = await engine.logprobs([int(id) for id in sample.tokens], version, sample.temperature)
        seconds += scores.seconds
        reference = np.concatenate([np.zeros(1, np.float32), _array(scores)])
        samples[index] = msgspec.structs.replace(sample, reference=reference)
    if isinstance(algorithm, Distillation):
        samples = algorithm.complete(samples)
    return samples, seconds


async def load_versions(engine: Engine, store: Store, ids: Sequence[str]) -> None:
    """Makes versions available to the engine. Raises NotFound for one that is not in the store."""
    for id in sorted(set(ids)):
        await _load(engine, await asyncio.to_thread(store.versions.find, id))


def kinds_of(groups: Sequence[Group], kinds: Mapping[str, str]) -> dict[str, str]:
    """The kind of task that each turn of the groups was about, by turn; `kinds` is by task."""
    return {turn.id: kinds.get(group.task, "") for group in groups for trace in group.traces for turn in trace.turns}


async def _load(engine: Engine, version: Version) -> None:
    if version.number:
        await engine.load(version)


def _array(scores: Scores) -> np.ndarray:
    return np.asarray(scores.values, dtype=np.float32)
