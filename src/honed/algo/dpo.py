"""Preferences: of two answers to one prompt, prefer the better (DPO, Rafailov et al. 2023). Pure.

Which loss over the pairs (DPO, IPO, SimPO) and its beta are the trainer's (train/preference.py). All but SimPO need the
reference policy's log-probabilities: those of the version that the turn began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from honed.algo.branches import Branch, branches
from honed.config import Settings
from honed.errors import Refused
from honed.protocols import Loss
from honed.types import Group, Sample, Trace


class DpoSettings(Settings):
    """Settings of DPO."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """AdamW's rate for preference steps."""
    min_gap: float = Field(default=0.5, gt=0)
    """How much better the chosen attempt's score must be."""
    max_pairs: int = Field(default=4, ge=1)
    """Most pairs made of one group."""


class Dpo:
    """The algorithm: a group's best attempts against its worst, each attempt in at most one pair. `reference` says
    whether the loss compares with the version that the turn began with."""

    loss: ClassVar[Loss] = "preference"

    def __init__(self, settings: DpoSettings | None = None, *, reference: bool = True) -> None:
        self.settings = settings or DpoSettings()
        self.needs: frozenset[str] = frozenset({"reference"} if reference else ())

    def __call__(self, groups: Sequence[Group]) -> list[Sample]:
        return pair_samples([pair for group in groups for pair in self.pairs(group)])

    def pairs(self, group: Group) -> list[tuple[Trace, Trace]]:
        """(chosen, rejected) of a group; attempts with a fault or without a score are in none."""
        scored = [trace for trace in group.traces if trace.fault is None and trace.score is not None]
        ranked = sorted(scored, key=lambda trace: -_score(trace))
        found: list[tuple[Trace, Trace]] = []
        for best, worst in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if _score(best) - _score(worst) >= self.settings.min_gap and len(found) < self.settings.max_pairs:
                found.append((best, worst))
        return found


def pair_samples(pairs: Sequence[tuple[Trace, Trace]]) -> list[Sample]:
    """Samples of (chosen, rejected) traces, for example a correction and what it corrects.

    The loss is a mean over pairs. Raises Refused for a trace without token ids or with more than one branch.
    """
    samples = []
    for number, sides in enumerate(pairs):
        for trace, side in zip(sides, ("chosen", "rejected"), strict=True):
            branch = _only(trace)
            weights = branch.mask.astype(np.float32) / np.float32(len(pairs))
            samples.append(branch.sample(weights, pair=f"{number}-{sides[0].id}:{side}"))
    return samples


def _only(trace: Trace) -> Branch:
    found = branches(trace)
    if len(found) != 1:
        raise Refused(f"trace {trace.id} has {len(found)} branches; a side of a preference has exactly one.")
    return found[0]


def _score(trace: Trace) -> float:
    assert trace.score is not None
    return trace.score.value
