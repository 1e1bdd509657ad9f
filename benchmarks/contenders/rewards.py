"""What attempts are rewarded for: something that costs nothing to judge, or the support agent's right call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence


def even(ids: Sequence[int]) -> float:
    """The share of even ids: any policy can learn it."""
    return sum(id % 2 == 0 for id in ids) / max(1, len(ids))


def graded_call(seed: int, text: str) -> float:
    """1 where the reply is the one call that the support case of `seed` wants after the change of tools; else a third
    for the right tool, and up to a third for the arguments that are right.

    A part is worth something so that attempts of a small group seldom all score alike: nothing could be learnt of them.
    """
    from support import world

    calls = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    if len(calls) != 1:
        return 0.0
    case = world.case(seed, "after")
    try:
        call = json.loads(calls[0])
        name, arguments = call["name"], dict(call["arguments"])
    except (ValueError, KeyError, TypeError):
        return 0.0
    if world.is_right_call(case, name, arguments):
        return 1.0
    if name != case.tool:
        return 0.0
    right = sum(key in arguments and arguments[key] == value for key, value in case.arguments.items())
    return (1 + right / len(case.arguments.keys() | arguments.keys())) / 3
