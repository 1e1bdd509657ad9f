"""What attempts are rewarded for: something that costs nothing to judge, or the support agent's right call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence


def even(ids: Sequence[int]) -> float:
    """The share of even ids: any policy can learn it."""
    return sum(id % 2 == 0 for id in ids) / max(1, len(ids))


def right_call(seed: int, text: str) -> float:
    """1 where the reply is the one call that the support case of `seed` wants after the change of tools, else 0."""
    from support import world

    calls = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    if len(calls) != 1:
        return 0.0
    try:
        call = json.loads(calls[0])
        return float(world.is_right_call(world.case(seed, "after"), call["name"], call["arguments"]))
    except (ValueError, KeyError, TypeError):
        return 0.0
