"""The arrays of samples that an algorithm needs and only the trainer or the engine knows: log-probabilities of given
tokens under the trainer's weights, the turn's first version, or a teacher."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from honed.protocols import Algorithm, Distillation, Engine, Trainer
from honed.store import Store
from honed.types import Group, Sample, Version


async def fill(
    samples: list[Sample],
    algorithm: Algorithm,
    kinds: Mapping[str, str],
    *,
    trainer: Trainer,
    engine: Engine,
    store: Store,
    parent: Version,
) -> list[Sample]:
    """The samples with what `algorithm` needs; `kinds` is the kind of task of each branch, `parent` the reference."""
    if "old_logprobs" in algorithm.needs:
        found = await trainer.logprobs(samples)
        samples = [
            msgspec.structs.replace(sample, old_logprobs=np.asarray(values, dtype=np.float32))
            for sample, values in zip(samples, found, strict=True)
        ]
    if "reference" in algorithm.needs:
        await _load(engine, parent)
        samples = [await _with_reference(engine, sample, parent.id) for sample in samples]
    if isinstance(algorithm, Distillation):
        wanted = [algorithm.teacher(kinds.get(sample.branch, "")) for sample in samples]
        await load_versions(engine, store, wanted)
        pairs = zip(samples, wanted, strict=True)
        samples = algorithm.complete([await _with_reference(engine, *pair) for pair in pairs])
    return samples


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


async def _with_reference(engine: Engine, sample: Sample, version: str) -> Sample:
    values = await engine.logprobs([int(id) for id in sample.tokens], version, sample.temperature)
    return msgspec.structs.replace(sample, reference=np.asarray([0.0, *values], dtype=np.float32))
