"""Draws tokens from logits, for a whole batch at once, with randomness that depends on nothing but (seed, position).

One uniform per (seed, position) and the inverse of the cumulative distribution in vocabulary order: a request's tokens
don't depend on its neighbours' draws. A distribution is bent by, in this order, the repetition penalty, the mask of a
grammar, temperature, min_p, top_k, top_p. Temperature 0 takes the likeliest token, whose log-probability under the
distribution that sampled (a point) is 0. A row costs one pass of exponentials, two at a temperature other than 1, and
no sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from honed.errors import BadRequest
from honed.types import LEAST_TEMPERATURE, Sampling

NUCLEUS_FIRST = 1024
"""Tokens looked at first for top_p; four times as many as long as they don't hold enough."""
BLOCK = 64
"""The cumulative distribution is taken over sums of so many tokens, and then inside the block that was hit."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """What one row got. `finite` False: its logits were not, and the rest means nothing."""

    id: int
    logprob: float
    raw_logprob: float
    top: tuple[tuple[int, float], ...]
    finite: bool


RANGES = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def check(sampling: Sampling) -> None:
    """Raises BadRequest that names the parameter out of range."""
    for name, (low, high) in RANGES.items():
        if not low <= getattr(sampling, name) <= high:
            raise BadRequest(f"{name} = {getattr(sampling, name)} is not between {low:g} and {high:g}.", param=name)
    if 0.0 < sampling.temperature < LEAST_TEMPERATURE:
        raise BadRequest(f"temperature = {sampling.temperature} is too near to 0; set it to 0.", param="temperature")
    if not 0.0 < sampling.top_p <= 1.0:
        raise BadRequest(f"top_p = {sampling.top_p} is not in (0, 1].", param="top_p")
    if sampling.top_k < 0:
        raise BadRequest(f"top_k = {sampling.top_k} is negative; 0 filters nothing.", param="top_k")
    if sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens = {sampling.max_tokens} must be at least 1.", param="max_tokens")
    if sampling.top_logprobs < 0:
        raise BadRequest(f"top_logprobs = {sampling.top_logprobs} is negative.", param="top_logprobs")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a 64-bit hash of seed and position (two rounds of splitmix64, Steele et al. 2014)."""
    mixed = _splitmix(_splitmix(seed & _MASK) ^ (position & _MASK))
    return (mixed >> 11) * 2.0**-53


def draw(
    logits: Tensor,
    samplings: Sequence[Sampling],
    seeds: Sequence[int],
    positions: Sequence[int],
    histories: Sequence[Sequence[int]] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Draw]:
    """logits [n, vocabulary], any float type -> n draws. Row i uses samplings[i], uniform(seeds[i], positions[i]).

    `histories` are the ids read and sampled so far, which a repetition penalty needs; `masks` bool [vocabulary] of the
    tokens that a row may draw (None: any).
    """
    logits = logits.float()
    weights = torch.empty_like(logits)
    normalisers = _exponentials(logits, None, weights)
    wanted = _bent(logits, samplings, histories, masks)
    greedy = [i for i, sampling in enumerate(samplings) if sampling.temperature <= 0]
    if wanted is not logits or any(sampling.temperature not in (0.0, 1.0) for sampling in samplings):
        inverse = [1.0 / sampling.temperature if sampling.temperature > 0 else 1.0 for sampling in samplings]
        _exponentials(wanted, torch.tensor(inverse, device=logits.device)[:, None], weights)
    _filter(weights, samplings)
    points = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    ids, logprobs = _invert(weights, torch.tensor(points))
    if greedy:
        ids[greedy], logprobs[greedy] = wanted[greedy].argmax(-1), 0.0
    raw = (logits.gather(1, ids[:, None])[:, 0] - normalisers).tolist()
    tops = _tops(logits, normalisers, [sampling.top_logprobs for sampling in samplings])
    columns = zip(ids.tolist(), logprobs.tolist(), raw, tops, torch.isfinite(normalisers).tolist(), strict=True)
    return [Draw(*column) for column in columns]


def scores(logits: Tensor, ids: Tensor, temperature: float) -> list[float]:
    """Log-probability of ids[i] under softmax(logits[i] / temperature); at temperature 1 the raw one of `draw`."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    normalisers = _exponentials(scaled, None, torch.empty_like(scaled))
    return (scaled.gather(1, ids[:, None])[:, 0] - normalisers).tolist()


def _exponentials(logits: Tensor, inverse: Tensor | None, out: Tensor) -> Tensor:
    """Fills `out` with exp((logits - their maximum) inverse temperature), and returns log of their sum plus the maximum
    [n]: at temperature 1 the normaliser, not finite where a logit is not."""
    peaks = logits.amax(-1, keepdim=True)
    torch.sub(logits, peaks, out=out)
    if inverse is not None:
        out.mul_(inverse)
    return out.exp_().sum(-1).log_() + peaks[:, 0]


def _bent(
    logits: Tensor,
    samplings: Sequence[Sampling],
    histories: Sequence[Sequence[int]] | None,
    masks: Sequence[Tensor | None] | None,
) -> Tensor:
    """Logits of what was there before divided by the penalty, or multiplied where negative (CTRL, Keskar et al. 2019,
    section 4.1, in the form that keeps a penalty one), and -inf where masked; the given ones where no row is bent."""
    penalised = [i for i, sampling in enumerate(samplings) if sampling.repetition_penalty != 1.0]
    masked = [(i, mask) for i, mask in enumerate(masks or ()) if mask is not None]
    if not penalised and not masked:
        return logits
    out = logits.clone()
    for i in penalised:
        assert histories is not None, "a repetition penalty without the tokens to penalise"
        seen = torch.tensor(sorted(set(histories[i])), dtype=torch.long, device=logits.device)
        values, penalty = out[i, seen], samplings[i].repetition_penalty
        out[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    for i, mask in masked:
        out[i].masked_fill_(~mask.to(logits.device), float("-inf"))
    return out


def _filter(weights: Tensor, samplings: Sequence[Sampling]) -> None:
    """Zeroes what min_p, top_k and top_p leave out, in place."""
    for row, sampling in zip(weights, samplings, strict=True):
        if sampling.temperature <= 0:
            continue
        if sampling.min_p > 0.0:
            row[row < sampling.min_p * row.amax()] = 0.0
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            kept = _nucleus(row, sampling.top_k, sampling.top_p)
            values = row[kept]
            row.zero_()
            row[kept] = values


def _nucleus(row: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ids that survive: the top_k likeliest, of those the fewest whose share of what is left reaches top_p."""
    limit = min(top_k, len(row)) if top_k else len(row)
    if top_p >= 1.0:
        return row.topk(limit).indices
    total = row.topk(limit).values.sum() if top_k else row.sum()
    count = min(limit, NUCLEUS_FIRST)
    while True:
        values, ids = row.topk(count)
        share = _cumulative(values) / float(total)
        if count == limit or share[-1] >= top_p:
            before = torch.cat([share.new_zeros(1), share[:-1]])
            return ids[(before < top_p).to(ids.device)]
        count = min(limit, 4 * count)


def _invert(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The first id whose cumulative share of the weights exceeds each point, never one of weight 0; its log share."""
    missing = -weights.shape[1] % BLOCK
    padded = (functional.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK))
    cumulative = _cumulative(padded.sum(-1))
    totals = cumulative[:, -1:]
    target = points[:, None].double() * totals
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = padded.gather(1, block.to(weights.device)[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    offset = torch.searchsorted(_cumulative(inside), target - before, right=True).clamp_(max=BLOCK - 1)
    found = (block * BLOCK + offset)[:, 0].clamp_(max=weights.shape[1] - 1).to(weights.device)
    hit = weights.gather(1, found[:, None])[:, 0]
    missed = hit <= 0  # rounding put the target at the end of a block, or of the row
    if bool(missed.any()):
        found = torch.where(missed, weights.argmax(-1), found)
        hit = weights.gather(1, found[:, None])[:, 0]
    return found, (hit / totals[:, 0].to(hit)).log_()


def _cumulative(values: Tensor) -> Tensor:
    """The cumulative sum over the last dimension, in double precision on the CPU: it is short, and no GPU has one that
    gives the same bits each time."""
    return values.cpu().double().cumsum(-1)


def _tops(logits: Tensor, normalisers: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = max(counts, default=0)
    if most == 0:
        return [()] * len(counts)
    values, ids = logits.topk(min(most, logits.shape[1]))
    pairs = zip(ids.tolist(), (values - normalisers[:, None]).tolist(), counts, strict=True)
    return [tuple(zip(row[:n], logprobs[:n], strict=True)) for row, logprobs, n in pairs]


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
