"""Draws tokens from logits, for a whole batch at once, with randomness that depends on nothing but (seed, position).

One uniform per (seed, position) and the inverse of the cumulative distribution in vocabulary order: a request's tokens
don't depend on its neighbours' draws. Order of the filters: temperature, top_k, top_p. Temperature 0 takes the
likeliest token, whose log-probability under the distribution that sampled (a point) is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from honed.errors import BadRequest
from honed.types import Sampling

NUCLEUS_FIRST = 1024  # tokens looked at before a whole vocabulary is sorted for top_p
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """What one row got. `finite` False: its logits were not, and the rest means nothing."""

    id: int
    logprob: float
    raw_logprob: float
    top: tuple[tuple[int, float], ...]
    finite: bool


def check(sampling: Sampling) -> None:
    """Raises BadRequest that names the parameter out of range."""
    if not 0.0 <= sampling.temperature <= 100.0:
        raise BadRequest(f"temperature = {sampling.temperature} is not between 0 and 100.", param="temperature")
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


def draw(logits: Tensor, samplings: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]) -> list[Draw]:
    """logits [n, vocabulary], any float type -> n draws. Row i uses samplings[i], uniform(seeds[i], positions[i])."""
    raw = torch.log_softmax(logits.float(), -1)
    finite = torch.isfinite(raw.amax(-1)) & ~torch.isnan(raw.sum(-1))
    ids = raw.argmax(-1)
    logprobs = torch.zeros(len(samplings), device=raw.device)
    random = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
    if random:
        whole = len(random) == len(samplings)
        rows = torch.as_tensor(random, device=raw.device)
        filtered = _filtered(raw if whole else raw[rows], [samplings[i] for i in random])
        points = [uniform(seeds[i], positions[i]) for i in random]
        drawn = _invert(filtered, torch.tensor(points, device=raw.device))
        ids[rows] = drawn
        logprobs[rows] = filtered.gather(1, drawn[:, None])[:, 0]
    raw_logprobs = raw.gather(1, ids[:, None])[:, 0].tolist()
    tops = _tops(raw, [sampling.top_logprobs for sampling in samplings])
    columns = zip(ids.tolist(), logprobs.tolist(), raw_logprobs, tops, finite.tolist(), strict=True)
    return [Draw(*column) for column in columns]


def _filtered(raw: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log-probabilities [n, vocabulary] after temperature, top_k and top_p; -inf where filtered out."""
    if any(sampling.temperature != 1.0 for sampling in samplings):
        temperatures = torch.tensor([sampling.temperature for sampling in samplings], device=raw.device)
        raw = torch.log_softmax(raw / temperatures[:, None], -1)
    narrow = [i for i, sampling in enumerate(samplings) if sampling.top_k > 0 or sampling.top_p < 1.0]
    if not narrow:
        return raw
    out = raw.clone()
    for i in narrow:
        kept = _nucleus(raw[i], samplings[i].top_k, samplings[i].top_p)
        row = torch.full_like(raw[i], float("-inf"))
        row[kept] = torch.log_softmax(raw[i][kept], -1)
        out[i] = row
    return out


def _nucleus(row: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ids that survive: the top_k likeliest, of those the fewest whose share of what is left reaches top_p."""
    size = len(row)
    limit = min(top_k, size) if top_k else size
    count = limit if top_p >= 1.0 else min(limit, NUCLEUS_FIRST)
    values, ids = row.topk(count)
    if top_p >= 1.0:
        return ids
    total = values.exp().sum() if limit == count else torch.ones((), device=row.device)
    if top_k and limit > count:
        total = row.topk(limit).values.exp().sum()
    share = values.exp().cumsum(-1) / total
    if count < limit and share[-1] < top_p:
        values, ids = row.topk(limit)
        share = values.exp().cumsum(-1) / values.exp().sum()
    before = torch.cat([share.new_zeros(1), share[:-1]])
    return ids[before < top_p]


def _invert(logprobs: Tensor, points: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds each point, [n]; never an id of probability 0."""
    probabilities = logprobs.exp()
    cumulative = probabilities.cumsum(-1)
    target = (points * cumulative[:, -1]).to(cumulative.dtype)[:, None]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    overflow = found >= logprobs.shape[1]  # rounding put the target at the very end
    if bool(overflow.any()):
        found = torch.where(overflow, probabilities.argmax(-1), found)
    return found


def _tops(raw: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = max(counts, default=0)
    if most == 0:
        return [()] * len(counts)
    values, ids = raw.topk(min(most, raw.shape[1]))
    pairs = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [tuple(zip(row[:n], logprobs[:n], strict=True)) for row, logprobs, n in pairs]


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
