"""How many requests and kept tokens fit into a given memory, at worst: every row of every length used at some time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from honed.engine.cache import BLOCK, Shape, row_lengths
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError
from honed.log import log

CAPACITY = 32768
"""Tokens, where nothing is said."""
ROWS_SHARE = 0.75
"""Of the memory, for running requests; the rest keeps prompts for reuse."""


@dataclass(frozen=True)
class Sizes:
    """`slots` requests at once; `kept` tokens for reuse; `capacity` tokens in all, running and kept."""

    slots: int
    kept: int
    capacity: int


def fit(settings: EngineSettings, shape: Shape, context: int) -> Sizes:
    """The settings' own sizes, or what engine.memory_gb has room for. Raises ConfigError where that is not one request.

    Weights, activations and logits are not in it.
    """
    if settings.memory_gb is None:
        capacity = settings.capacity or CAPACITY
        return Sizes(settings.slots, capacity, capacity)
    tokens = int(settings.memory_gb * 1e9) // shape.num_bytes
    one = sum(row_lengths(context))
    if tokens < one + BLOCK:
        raise ConfigError(
            f"engine.memory_gb = {settings.memory_gb:g} has no room for one request of {context} tokens; set it to "
            f"{_rounded_up((one + BLOCK) * shape.num_bytes / 1e9):g} or more, or lower engine.context."
        )
    slots = max(1, min(settings.slots, int(tokens * ROWS_SHARE) // one))
    if slots < settings.slots:
        log("engine.fewer_slots", slots=slots, wanted=settings.slots, memory_gb=settings.memory_gb)
    kept = (tokens - slots * one) // BLOCK * BLOCK
    return Sizes(slots, kept, slots * context + kept)


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
