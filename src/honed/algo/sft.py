"""Imitation: cross entropy on what was shown (demonstrations, corrections) or on attempts that a verifier passed.

Pure: traces whose ids were filled by a renderer (or sampled by an engine) in, samples out. Log-probabilities are not
needed, so a demonstration, which nobody sampled, may be imitated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from honed.algo.branches import Branch, branches
from honed.config import Settings
from honed.errors import Refused
from honed.protocols import Loss
from honed.types import Group, Sample, Trace


class SftSettings(Settings):
    """Settings of imitation."""

    learning_rate: float = Field(default=2e-4, gt=0)
    """AdamW's rate for imitation steps."""
    batch_size: int = Field(default=8, ge=1)
    """The most traces per optimiser step: a pass is dealt out evenly over as many steps as that takes."""
    passes: int = Field(default=3, ge=1)
    """How often each demonstration is seen; what is replayed beside them is shared out over the passes."""
    rehearsal_candidates: int = Field(default=32, ge=0)
    """Before each pass but the first, so many of the replayed conversations (or half as many again as a pass replays,
    if that is more) are scored, and those are learned again that have become least likely since they were served.
    0: none is asked, and each is met once."""
    decay: float = Field(default=0.0, ge=0, le=1)
    """The share of the steps, at the end, over which the learning rate falls linearly to 0."""
    average: Literal["token", "sequence"] = "token"
    """Mean over the batch's trained tokens, or over traces of their token means; each token as its message weighs."""
    min_score: float | None = None
    """Imitate only traces whose score reaches this (None: all that have no fault; demonstrations have no score)."""
    seed: int = 0
    """Seed of the order of the traces in each pass."""


class Sft:
    """The algorithm: every output token of every trace that has no fault and reaches min_score, weighed as its message
    (Message.weight)."""

    loss: ClassVar[Loss] = "cross_entropy"

    def __init__(self, settings: SftSettings | None = None) -> None:
        self.settings = settings or SftSettings()
        self.needs: frozenset[str] = frozenset()

    def __call__(self, groups: Sequence[Group]) -> list[Sample]:
        return self.samples([trace for group in groups for trace in group.traces])

    def samples(self, traces: Sequence[Trace]) -> list[Sample]:
        """One optimiser step's samples: weights sum to 1 over all of them. Raises Refused for traces without ids."""
        parts = [found for trace in traces if self._wanted(trace) and (found := branches(trace)) and _mass(found)]
        masses = [_mass(found) for found in parts]
        if self.settings.average == "sequence":
            totals = [len(parts) * mass for mass in masses]
        else:
            totals = [sum(masses)] * len(parts)
        return [
            part.sample((part.mask * part.emphasis / np.float32(total)).astype(np.float32))
            for found, total in zip(parts, totals, strict=True)
            for part in found
        ]

    def _wanted(self, trace: Trace) -> bool:
        if trace.fault is not None:
            return False
        least = self.settings.min_score
        return least is None or trace.score is None or trace.score.value >= least


def _mass(parts: Sequence[Branch]) -> float:
    """Trained tokens, each as its message weighs."""
    return float(sum(part.emphasis[part.mask].sum() for part in parts))


def from_ids(rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> list[Sample]:
    """Samples of one step from sequences that are tokenised already: (ids, whether to train each), mean over tokens.

    Raises Refused when a row's lengths differ, or its first token is to be trained.
    """
    total = max(1, sum(sum(map(bool, mask)) for _, mask in rows))
    samples = []
    for number, (ids, mask) in enumerate(rows):
        if len(ids) != len(mask) or not len(ids) or mask[0]:
            raise Refused(f"row {number}: {len(ids)} ids, {len(mask)} marks; the first token can't be trained.")
        weights = np.asarray(mask, bool).astype(np.float32) / np.float32(total)
        samples.append(Sample(tokens=np.asarray(ids, np.int32), weights=weights, branch=f"row {number}"))
    return samples
