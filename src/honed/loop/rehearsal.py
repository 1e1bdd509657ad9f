"""Which conversations that went well are learned again beside the corrections: those that the corrections hurt most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from honed.protocols import Algorithm, Trainer
from honed.types import Group, Trace


async def losses(traces: Sequence[Trace], algorithm: Algorithm, trainer: Trainer) -> tuple[dict[str, float], float]:
    """By trace id, how many nats less likely its replies are to the trainer's weights than when they were served, and
    the CPU seconds that it took to ask.

    A turn without recorded log-probabilities counts as if it had been certain.
    """
    samples, owners = [], []
    for trace in traces:
        found = algorithm([alone(trace)])
        samples += found
        owners += [trace.id] * len(found)
    scores = await trainer.logprobs(samples) if samples else []
    lost = {trace.id: sum(sum(turn.raw_logprobs or ()) for turn in trace.turns) for trace in traces}
    for owner, sample, score in zip(owners, samples, scores, strict=True):
        lost[owner] -= float(np.asarray(score.values)[sample.weights > 0].sum())
    return lost, sum(score.seconds for score in scores)


def most_hurt(lost: dict[str, float], count: int) -> list[str]:
    """The `count` that lost most, the worst first (maximally interfered retrieval, Aljundi et al. 2019, section 3)."""
    return sorted(lost, key=lambda id: (-lost[id], id))[:count]


def alone(trace: Trace) -> Group:
    """A trace as a group of its own."""
    return Group(id=f"group_{trace.id}", task=trace.task or "", traces=(trace,))
