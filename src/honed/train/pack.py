"""Samples to micro-batches: who runs with whom (so that prefixes are shared), and which rows of the pass are needed.

Only rows that predict a token with a weight are multiplied by the output embedding, and a sample's tail after its last
trained token isn't run at all. The cut never changes a gradient: each sample carries its own normaliser, and the sides
of a pair stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from honed.errors import Refused
from honed.model.tree import Tree, common
from honed.model.tree_model import TreeModel
from honed.types import Sample

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Packed:
    """One micro-batch. The N trained tokens of all its samples, one after the other, as float or int tensors [N].

    `rows[i]` is the row of the pass that predicts `targets[i]`; `owner[i]` numbers its sample within the batch. The
    optional arrays are None when no sample has them. `pairs` [P, 2] numbers the chosen and rejected samples.
    """

    tree: Tree
    rows: Tensor
    targets: Tensor
    temperatures: Tensor
    owner: Tensor
    weights: Tensor
    advantages: Tensor | None
    logprobs: Tensor | None
    old_logprobs: Tensor | None
    reference: Tensor | None
    pairs: Tensor
    num_samples: int


def check(sample: Sample, vocabulary: int) -> None:
    """Raises Refused, naming the sample, when its arrays differ in length or hold what can't be trained on."""
    length, name = len(sample.tokens), sample.branch or "a sample"
    for field in ("weights", "advantages", "logprobs", "old_logprobs", "reference"):
        array = getattr(sample, field)
        if array is not None and array.shape != (length,):
            raise Refused(f"{name}: {field} has shape {array.shape} beside {length} tokens.")
        if array is not None and not np.isfinite(array[sample.weights != 0]).all():
            raise Refused(f"{name}: {field} holds a value that is not finite where the weight is not 0.")
    if length == 0 or sample.temperature <= 0:
        raise Refused(f"{name}: {length} tokens at temperature {sample.temperature}; both must be above 0.")
    if sample.tokens.min() < 0 or sample.tokens.max() >= vocabulary:
        raise Refused(f"{name}: a token is not in [0, {vocabulary}); is it for another model?")
    if sample.weights[0] != 0:
        raise Refused(f"{name}: the first token has a weight, but nothing comes before it to predict it from.")


def trained(sample: Sample) -> np.ndarray:
    """The positions with a weight."""
    return np.flatnonzero(sample.weights)


def micro_batches(samples: Sequence[Sample], budget: int) -> list[list[int]]:
    """Indices of `samples`, cut so that a batch's distinct tokens stay within `budget`; a pair is never cut.

    Neighbours in lexicographic order share the longest prefixes, so batches are filled in that order. A unit that is
    longer than the budget runs alone.
    """
    units = sorted(_units(samples), key=lambda unit: samples[unit[0]].tokens.astype(">i4").tobytes())
    batches: list[list[int]] = []
    used = budget + 1
    for unit in units:
        extra = _new_tokens(samples, batches[-1] if batches else [], unit)
        if used + extra > budget:
            batches.append([])
            used, extra = 0, _new_tokens(samples, [], unit)
        batches[-1] += unit
        used += extra
    return batches


def pack(model: TreeModel, samples: Sequence[Sample], *, everywhere: bool = False) -> Packed:
    """The micro-batch of `samples`. With `everywhere` each position but the first counts as trained."""
    places = [np.arange(1, len(sample.tokens)) if everywhere else trained(sample) for sample in samples]
    ends = [max(int(place[-1]), 1) if len(place) else 1 for place in places]
    tree = model.build([sample.tokens[:end] for sample, end in zip(samples, ends, strict=True)])
    rows = [tree.rows[index][place - 1] for index, place in enumerate(places)]
    targets = [sample.tokens[place] for sample, place in zip(samples, places, strict=True)]

    def floats(name: str) -> Tensor | None:
        arrays = [getattr(sample, name) for sample in samples]
        if all(array is None for array in arrays):
            return None
        for sample, array in zip(samples, arrays, strict=True):
            if array is None:
                raise Refused(f"{sample.branch or 'a sample'} has no {name}, but others of its batch do.")
        return _tensor([array[place] for array, place in zip(arrays, places, strict=True)], np.float64, model)

    sizes = [len(place) for place in places]
    temperatures = [np.full(size, sample.temperature) for size, sample in zip(sizes, samples, strict=True)]
    weights = floats("weights")
    assert weights is not None
    return Packed(
        tree=tree,
        rows=_tensor(rows, np.int64, model),
        targets=_tensor(targets, np.int64, model),
        temperatures=_tensor(temperatures, np.float64, model),
        owner=_tensor([np.full(size, index) for index, size in enumerate(sizes)], np.int64, model),
        weights=weights,
        advantages=floats("advantages"),
        logprobs=floats("logprobs"),
        old_logprobs=floats("old_logprobs"),
        reference=floats("reference"),
        pairs=torch.tensor(_pairs(samples), dtype=torch.int64, device=model.device).reshape(-1, 2),
        num_samples=len(samples),
    )


def required(value: Tensor | None, name: str) -> Tensor:
    """An array that a loss can't do without. Raises Refused when no sample has it."""
    if value is None:
        raise Refused(f"the samples have no {name}, which this loss needs.")
    return value


def _tensor(arrays: list[np.ndarray], dtype: type, model: TreeModel) -> Tensor:
    joined = torch.from_numpy(np.concatenate(arrays).astype(dtype))
    if dtype is np.float64 and model.dtype != torch.float64:
        joined = joined.float()
    return joined.to(model.device)


def _units(samples: Sequence[Sample]) -> list[list[int]]:
    units: list[list[int]] = []
    by_pair: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.pair is None:
            units.append([index])
        else:
            key = sample.pair.rpartition(":")[0]
            if key not in by_pair:
                units.append(by_pair.setdefault(key, []))
            by_pair[key].append(index)
    return units


def _pairs(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    sides: dict[str, dict[str, int]] = {}
    for index, sample in enumerate(samples):
        if sample.pair is not None:
            key, _, side = sample.pair.rpartition(":")
            if side not in SIDES or side in sides.setdefault(key, {}):
                raise Refused(f"pair {sample.pair!r}: each pair is one '<id>:chosen' and one '<id>:rejected'.")
            sides[key][side] = index
    for key, found in sides.items():
        if len(found) != 2:
            raise Refused(f"pair {key!r} has only its {next(iter(found))} side in the batch.")
    return [(found["chosen"], found["rejected"]) for found in sides.values()]


def _new_tokens(samples: Sequence[Sample], batch: Sequence[int], unit: Sequence[int]) -> int:
    """How many tokens `unit` adds to a batch's tree."""
    seen = [samples[index].tokens for index in batch]
    extra = 0
    for index in unit:
        tokens = samples[index].tokens
        extra += len(tokens) - max((common(tokens, other) for other in seen), default=0)
        seen.append(tokens)
    return extra
