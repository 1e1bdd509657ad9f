"""The three losses, as sums over trained tokens; every normaliser is already in the weights.

Each takes the current log-probabilities lp [N] (at the sample's temperature) and a Packed micro-batch, and returns the
summed loss with what is worth knowing about it. Nothing here divides by a batch size.
"""

from __future__ import annotations

from torch import Tensor

from honed.protocols import Loss
from honed.train.pack import Packed
from honed.train.policy import bounded, policy_gradient, total
from honed.train.preference import preference
from honed.train.settings import TrainSettings


def compute(loss: Loss, lp: Tensor, batch: Packed, settings: TrainSettings) -> tuple[Tensor, dict[str, float]]:
    """The summed loss, and sums over tokens or pairs of what is worth knowing."""
    if loss == "policy_gradient":
        return policy_gradient(lp, batch, settings.policy)
    if loss == "preference":
        return preference(lp, batch, settings.preference)
    return cross_entropy(lp, batch)


def cross_entropy(lp: Tensor, batch: Packed) -> tuple[Tensor, dict[str, float]]:
    """-sum w lp."""
    return -(batch.weights * lp).sum(), {"nll": -total(lp)}


def mismatch(lp: Tensor, sampled: Tensor) -> dict[str, float]:
    """Sums over tokens of how far trainer and sampler differ on the same weights: |gap|, its maximum, and k3 of it.

    k3 = R - 1 - log R with R = exp(trainer - sampler): 0 when they agree, never negative.
    """
    gap = (lp.detach() - sampled).double()
    if not len(gap):
        return {}
    k3 = bounded(gap).exp() - 1 - gap
    return {"gap": total(gap.abs()), "gap_max": float(gap.abs().max()), "k3": total(k3)}
