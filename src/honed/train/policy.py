"""The policy-gradient loss and its family, as a sum over trained tokens; every normaliser is already in the weights.

    loss = -sum_t w_t c_t f(r_t, A_t)  +  kl sum_t w_t k(ref_t, lp_t),    r = exp(lp - anchor)

f is what the objective makes of a ratio, c the correction for a sampler that is not quite the trainer. With
`old_logprobs` they are the anchor and c corrects; without them the sampler's own log-probabilities are the anchor and
the ratio itself corrects (c = 1: correcting twice would count the error double).
"""

from __future__ import annotations

import torch
from torch import Tensor

from honed.train.pack import Packed, required
from honed.train.settings import PolicySettings

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: past it a ratio says only that something is broken, and fp32 must stay finite."""


def policy_gradient(lp: Tensor, batch: Packed, settings: PolicySettings) -> tuple[Tensor, dict[str, float]]:
    """The loss of log-probabilities lp [N], and sums over tokens of what is worth knowing.

    Raises Refused when a sample has no advantages, no log-probabilities, or no reference although kl > 0.
    """
    advantages, sampled = required(batch.advantages, "advantages"), required(batch.logprobs, "logprobs")
    anchor = sampled if batch.old_logprobs is None else batch.old_logprobs
    gain, bound = OBJECTIVES[settings.objective](lp, anchor, advantages, batch, settings)
    facts = {"clipped": total(bound)}
    if batch.old_logprobs is not None:
        weight, cut = correction(batch.old_logprobs, sampled, batch, settings)
        gain = gain * weight
        facts["corrected"] = total(cut)
    loss = -(batch.weights * gain).sum()
    if settings.kl > 0:
        divergence = kl(lp, required(batch.reference, "reference"), settings)
        loss = loss + settings.kl * (batch.weights * divergence).sum()
        facts["reference_kl"] = total(divergence)
    return loss, facts


def ppo(
    lp: Tensor, anchor: Tensor, advantages: Tensor, batch: Packed, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A) (PPO, Schulman et al. 2017, eq. 7), and which tokens the clip holds.

    With dual_clip c, no less than c A where A < 0 (Ye et al. 2020, dual-clip PPO).
    """
    return _clip(bounded(lp - anchor).exp(), advantages, settings)


def gspo(
    lp: Tensor, anchor: Tensor, advantages: Tensor, batch: Packed, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """PPO's clip on s = exp(mean over the sequence of lp - anchor) (GSPO-token, Zheng et al. 2025, eq. 14).

    Each token has the value s and the gradient s dlp, so a sequence's sum is GSPO's (eq. 5) when its weights are equal.
    """
    mean = sequence_mean(lp.detach() - anchor, batch)
    ratio = bounded(mean).exp() * (lp - lp.detach()).exp()
    return _clip(ratio, advantages, settings)


def cispo(
    lp: Tensor, anchor: Tensor, advantages: Tensor, batch: Packed, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """clip(r) A lp with the ratio held constant (CISPO, MiniMax-M1 2025): a clipped token still teaches."""
    ratio = bounded(lp.detach() - anchor).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return clipped * advantages * lp, clipped != ratio


OBJECTIVES = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def correction(old: Tensor, sampled: Tensor, batch: Packed, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    """The weight of each token for w = exp(old - sampled), and which tokens it bounds or drops.

    Truncated importance sampling, IcePop's mask (Ling team 2025), or a mask of whole sequences by the geometric mean.
    """
    gap = old - sampled
    weight = bounded(gap).exp()
    low, high = settings.correction_low, settings.correction_high
    if settings.correction == "truncate":
        return weight.clamp(max=high), weight > high
    judged = weight if settings.correction == "icepop" else bounded(sequence_mean(gap, batch)).exp()
    dropped = (judged < low) | (judged > high)
    return weight.masked_fill(dropped, 0.0), dropped


def kl(lp: Tensor, reference: Tensor, settings: PolicySettings) -> Tensor:
    """An estimate [N] of KL(policy || reference) from tokens that the policy sampled (Schulman 2020).

    k1 = lp - ref, k2 = (lp - ref)^2 / 2, k3 = exp(ref - lp) - 1 - (ref - lp). The slope of k1 itself would not know the
    reference; its gradient is that of the expectation, (lp - ref) dlp, as when it is taken off the reward.
    """
    gap = bounded(reference - lp)
    if settings.kl_estimator == "k1":
        return -gap.detach() * (1 + lp - lp.detach())
    return gap.square() / 2 if settings.kl_estimator == "k2" else gap.exp() - 1 - gap


def sequence_mean(values: Tensor, batch: Packed) -> Tensor:
    """Each token's sequence's mean of `values` [N] over its trained tokens."""
    sums = values.new_zeros(batch.num_samples).index_add(0, batch.owner, values)
    sizes = torch.bincount(batch.owner, minlength=batch.num_samples).clamp(min=1)
    return (sums / sizes)[batch.owner]


def bounded(gap: Tensor) -> Tensor:
    """A log ratio within +-20."""
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def total(value: Tensor) -> float:
    """The sum, in double precision, outside the graph."""
    return float(value.detach().double().sum())


def _clip(ratio: Tensor, advantages: Tensor, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    free = ratio * advantages
    gain = torch.minimum(free, ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages)
    if settings.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, settings.dual_clip * advantages), gain)
    return gain, gain != free
