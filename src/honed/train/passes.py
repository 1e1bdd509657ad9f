"""A pass over samples: forward, loss and backward per micro-batch, summed; or log-probabilities only.

Synchronous; local.py gives it a thread. Gradients accumulate in the parameters until an optimiser step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from honed.model.tree_model import TreeModel
from honed.protocols import Loss, Scores, StepResult
from honed.train import losses
from honed.train.pack import Packed, check, micro_batches, pack, trained
from honed.train.settings import TrainSettings
from honed.types import Sample

NOTHING = "no trained tokens"
PER_TOKEN = {"gap": "mismatch_mean", "k3": "mismatch_k3"}
"""Sums over trained tokens that are reported as means under another name; the other facts keep theirs."""
COUNTS = ("distinct_tokens", "micro_batches", "pairs")
PER_PAIR = ("pairs_right", "margin")


def forward_backward(model: TreeModel, samples: Sequence[Sample], loss: Loss, settings: TrainSettings) -> StepResult:
    """Adds the loss's gradient to the parameters. Skipped when no token has a weight, or when the loss is not finite.

    `metrics`: distinct_tokens that ran and micro_batches; for policy gradients mismatch_mean, mismatch_max and
    mismatch_k3 between trainer and sampler, and the share of tokens clipped. `seconds` are CPU seconds. Raises Refused
    before anything ran when a sample is malformed.
    """
    started = time.process_time()
    for sample in samples:
        check(sample, model.vocabulary)
    alive = [sample for sample in samples if sample.pair is not None or len(trained(sample))]
    num_trained = sum(len(trained(sample)) for sample in alive)
    result = StepResult(num_samples=len(samples), tokens=sum(len(sample.tokens) for sample in samples))
    if not num_trained:
        return msgspec.structs.replace(result, skipped=NOTHING)
    total, facts = 0.0, {"distinct_tokens": 0.0, "micro_batches": 0.0}
    for indices in micro_batches(alive, settings.micro_tokens):
        batch = pack(model, [alive[index] for index in indices])
        lp = _current(model, batch, settings)
        value, found = losses.compute(loss, lp, batch, settings)
        total += value.item()
        if not math.isfinite(total):
            break
        value.backward()
        found |= losses.mismatch(lp, batch.logprobs) if batch.logprobs is not None else {}
        if "gap_max" in found:
            facts["mismatch_max"] = max(facts.get("mismatch_max", 0.0), found.pop("gap_max"))
        for key, number in {**found, "distinct_tokens": len(batch.tree), "micro_batches": 1}.items():
            facts[key] = facts.get(key, 0.0) + number
    return msgspec.structs.replace(
        result,
        loss=total,
        trained_tokens=num_trained,
        seconds=time.process_time() - started,
        skipped="" if math.isfinite(total) else f"the loss is {total}",
        metrics=_means(facts, num_trained),
    )


def logprobs(model: TreeModel, samples: Sequence[Sample], settings: TrainSettings) -> list[Scores]:
    """Per sample the log-probability of each token after those before it, at its temperature; position 0 is 0.0."""
    started = time.process_time()
    for sample in samples:
        check(sample, model.vocabulary)
    found: list[list[float]] = [[0.0] * len(sample.tokens) for sample in samples]
    alone = [_unpaired(sample) for sample in samples]
    with torch.no_grad():
        for indices in micro_batches(alone, settings.micro_tokens):
            batch = pack(model, [alone[index] for index in indices], everywhere=True)
            values = _current(model, batch, settings).double().cpu().numpy()
            owner = batch.owner.cpu().numpy()
            for place, index in enumerate(indices):
                found[index][1:] = values[owner == place].tolist()
    share = (time.process_time() - started) / max(1, sum(map(len, found)))
    return [Scores(values=values, seconds=share * len(values)) for values in found]


def _current(model: TreeModel, batch: Packed, settings: TrainSettings) -> Tensor:
    hidden = model.hidden(batch.tree)
    return model.logprobs(hidden, batch.rows, batch.targets, batch.temperatures, settings.logit_rows)


def _means(facts: dict[str, float], num_trained: int) -> dict[str, float]:
    means: dict[str, float] = {}
    for key, number in facts.items():
        if key in COUNTS or key == "mismatch_max":
            means[key] = number
        elif key in PER_PAIR:
            means[key] = number / facts["pairs"]
        else:
            means[PER_TOKEN.get(key, key)] = number / num_trained
    return means


def _unpaired(sample: Sample) -> Sample:
    weights = np.zeros(len(sample.tokens), np.float32)
    return Sample(tokens=sample.tokens, weights=weights, temperature=sample.temperature, branch=sample.branch)
