"""The three losses, as sums over trained tokens; every normaliser is already in the weights.

Each takes the current log-probabilities lp [N] (at the sample's temperature) and a Packed micro-batch, and returns the
summed loss with what is worth knowing about it. Nothing here divides by a batch size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from honed.errors import Refused
from honed.protocols import Loss
from honed.train.pack import Packed
from honed.train.settings import TrainSettings

LossFunction = Callable[[Tensor, Packed, TrainSettings], tuple[Tensor, dict[str, float]]]
LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: past it a ratio says only that something is broken, and fp32 must stay finite."""


def policy_gradient(lp: Tensor, batch: Packed, settings: TrainSettings) -> tuple[Tensor, dict[str, float]]:
    """-sum w min(r A, clip(r, 1 - low, 1 + high) A) c + kl sum w k3 (PPO eq. 7; GRPO eq. 3).

    r = exp(lp - anchor). With `old_logprobs` they are the anchor, and c = min(exp(old - sampled), cap) corrects for the
    sampler (truncated importance sampling). Without them the sampler's own log-probabilities are the anchor, and the
    ratio itself corrects (c = 1; correcting twice would count it double). k3 = exp(ref - lp) - 1 - (ref - lp).
    Raises Refused when a sample has no advantages, no log-probabilities, or no reference although kl > 0.
    """
    advantages, sampled = _required(batch.advantages, "advantages"), _required(batch.logprobs, "logprobs")
    anchor = sampled if batch.old_logprobs is None else batch.old_logprobs
    ratio = (lp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    facts = {"clipped": _sum(gain < ratio * advantages)}
    if batch.old_logprobs is not None:
        weight = (batch.old_logprobs - sampled).clamp(max=LOG_RATIO_LIMIT).exp()
        gain = gain * weight.clamp(max=settings.importance_cap)
        facts["capped"] = _sum(weight > settings.importance_cap)
    loss = -(batch.weights * gain).sum()
    if settings.kl > 0:
        gap = (_required(batch.reference, "reference") - lp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        k3 = gap.exp() - 1 - gap
        loss = loss + settings.kl * (batch.weights * k3).sum()
        facts["reference_k3"] = _sum(k3)
    return loss, facts


def cross_entropy(lp: Tensor, batch: Packed, settings: TrainSettings) -> tuple[Tensor, dict[str, float]]:
    """-sum w lp."""
    return -(batch.weights * lp).sum(), {"nll": -_sum(lp)}


def preference(lp: Tensor, batch: Packed, settings: TrainSettings) -> tuple[Tensor, dict[str, float]]:
    """-sum over pairs w log sigmoid(beta ((pi_c - ref_c) - (pi_r - ref_r))) (DPO, eq. 7).

    pi and ref are sums over a side's trained tokens; w is the chosen side's mean weight. Raises Refused
    without pairs or without `reference`.
    """
    if len(batch.pairs) * 2 != batch.num_samples:
        raise Refused("the preference loss needs samples in pairs ('<id>:chosen' and '<id>:rejected').")
    reference = _required(batch.reference, "reference")
    gaps = lp.new_zeros(batch.num_samples).index_add(0, batch.owner, lp - reference)
    sizes = torch.bincount(batch.owner, minlength=batch.num_samples).clamp(min=1)
    weights = lp.new_zeros(batch.num_samples).index_add(0, batch.owner, batch.weights.to(lp.dtype)) / sizes
    chosen, rejected = batch.pairs.unbind(1)
    margin = settings.dpo_beta * (gaps[chosen] - gaps[rejected])
    loss = -(weights[chosen] * functional.logsigmoid(margin)).sum()
    return loss, {"pairs": float(len(margin)), "pairs_right": _sum(margin > 0), "margin": _sum(margin)}


LOSSES: dict[Loss, LossFunction] = {
    "policy_gradient": policy_gradient,
    "cross_entropy": cross_entropy,
    "preference": preference,
}


def mismatch(lp: Tensor, sampled: Tensor) -> dict[str, float]:
    """Sums over tokens of how far trainer and sampler differ on the same weights: |gap|, its maximum, and k3 of it.

    k3 = R - 1 - log R with R = exp(trainer - sampler): 0 when they agree, never negative.
    """
    gap = (lp.detach() - sampled).double()
    if not len(gap):
        return {}
    k3 = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() - 1 - gap
    return {"gap": _sum(gap.abs()), "gap_max": float(gap.abs().max()), "k3": _sum(k3)}


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise Refused(f"the samples have no {name}, which this loss needs.")
    return value


def _sum(value: Tensor) -> float:
    return float(value.detach().double().sum())
