"""Micro-batches of given arrays: lo = [-1, -2], lp = [-.9, -2.5], so r = [1.1051709, .6065307]."""

import numpy as np
import torch

from honed.model.tree import build
from honed.train.pack import Packed

NEW = torch.tensor([-0.9, -2.5], dtype=torch.float64)
OLD = torch.tensor([-1.0, -2.0], dtype=torch.float64)
SAMPLED = torch.tensor([-1.2, -1.0], dtype=torch.float64)


def packed(lp: torch.Tensor, owner: list[int] | None = None, pairs: list | None = None, **arrays: object) -> Packed:
    size = len(lp)
    owner = owner or [0] * size
    fields = {"advantages": None, "logprobs": None, "old_logprobs": None, "reference": None}
    weights = torch.full((size,), 1.0 / size, dtype=torch.float64)
    blank = torch.zeros(size, dtype=torch.int64)
    return Packed(
        tree=build([np.array([0])]),
        rows=blank,
        targets=blank,
        temperatures=torch.ones(size),
        owner=torch.tensor(owner),
        pairs=torch.tensor(pairs or [], dtype=torch.int64).reshape(-1, 2),
        num_samples=max(owner) + 1,
        **{**fields, "weights": weights, **arrays},
    )


def constant(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)
