"""How many tokens, running and kept, fit into a given memory; how many requests, where memory is never given back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from honed.engine.cache import BLOCK, Shape, row_lengths
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError
from honed.log import log
from honed.model.bank import RETURNS

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
    # a prompt is for a moment in blocks and in a row; where memory is never given back, a slot is a row of every length
    gives_back = RETURNS and shape.device == "cpu"
    one = row_lengths(context)[-1] if gives_back else sum(row_lengths(context))
    least = 2 * one if gives_back else one + BLOCK
    tokens = int(settings.memory_gb * 1e9) // shape.num_bytes
    if tokens < least:
        raise ConfigError(
            f"engine.memory_gb = {settings.memory_gb:g} has no room for one request of {context} tokens; set it to "
            f"{_rounded_up(least * shape.num_bytes / 1e9):g} or more, or lower engine.context."
        )
    if gives_back:
        capacity = (tokens - one) // BLOCK * BLOCK
        return Sizes(settings.slots, capacity, capacity)
    slots = max(1, min(settings.slots, int(tokens * ROWS_SHARE) // one))
    if slots < settings.slots:
        log("engine.fewer_slots", slots=slots, wanted=settings.slots, memory_gb=settings.memory_gb)
    kept = (tokens - slots * one) // BLOCK * BLOCK
    return Sizes(slots, kept, slots * context + kept)


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
