"""The loss over pairs of answers to one prompt: DPO and its kin, as a sum over pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from honed.errors import Refused
from honed.train.pack import Packed, required
from honed.train.policy import total
from honed.train.settings import PreferenceSettings


def preference(lp: Tensor, batch: Packed, settings: PreferenceSettings) -> tuple[Tensor, dict[str, float]]:
    """The summed loss of log-probabilities lp [N] of the trained tokens, one w (the chosen side's mean weight) a pair.

    dpo: -w log sigmoid(beta h), h = (pi_c - ref_c) - (pi_r - ref_r), sums over a side's tokens (Rafailov 2023, eq. 7).
    ipo: w (h - 1 / (2 beta))^2 (Azar et al. 2024, eq. 17).
    simpo: -w log sigmoid(beta (mean pi_c - mean pi_r) - margin), means over tokens (Meng et al. 2024, eq. 6).
    Raises Refused without pairs, or without `reference` where the loss has one.
    """
    if len(batch.pairs) * 2 != batch.num_samples:
        raise Refused("the preference loss needs samples in pairs ('<id>:chosen' and '<id>:rejected').")
    sizes = torch.bincount(batch.owner, minlength=batch.num_samples).clamp(min=1)
    chosen, rejected = batch.pairs.unbind(1)
    if settings.kind == "simpo":
        values = _by_sample(lp, batch) / sizes
        margin = settings.beta * (values[chosen] - values[rejected]) - settings.margin
    else:
        values = _by_sample(lp - required(batch.reference, "reference"), batch)
        margin = settings.beta * (values[chosen] - values[rejected])
    losses = (margin / settings.beta - 0.5 / settings.beta).square() if settings.kind == "ipo" else _logistic(margin)
    weights = (_by_sample(batch.weights.to(lp.dtype), batch) / sizes)[chosen]
    facts = {"pairs": float(len(margin)), "pairs_right": total(margin > 0), "margin": total(margin)}
    return (weights * losses).sum(), facts


def _logistic(margin: Tensor) -> Tensor:
    return -functional.logsigmoid(margin)


def _by_sample(values: Tensor, batch: Packed) -> Tensor:
    return values.new_zeros(batch.num_samples).index_add(0, batch.owner, values)
