"""A trace as the conversation that it was: which turns follow which, and every message in order.

Turns form a tree (a `parent` makes a branch free); a signal or a task wants one path through it. Pure functions.
"""

from __future__ import annotations

import json

from honed.types import Message, Trace, Turn


def last_path(trace: Trace) -> tuple[Turn, ...]:
    """The turns from the root to the newest turn; earlier branches are left out. Empty for a trace without turns."""
    return path_to(trace, trace.turns[-1].id) if trace.turns else ()


def path_to(trace: Trace, turn_id: str) -> tuple[Turn, ...]:
    """The turns from the root to `turn_id`, which must be one of the trace's. A parent outside the trace ends it."""
    turns = {turn.id: turn for turn in trace.turns}
    path: list[Turn] = []
    current: str | None = turn_id
    while current is not None and current in turns:
        path.append(turns.pop(current))
        current = path[-1].parent
    return tuple(reversed(path))


def messages(path: tuple[Turn, ...]) -> tuple[Message, ...]:
    """What was said along a path, replies included."""
    said: list[Message] = []
    for turn in path:
        said += [*turn.added, turn.reply]
    return tuple(said)


def prompt(trace: Trace, turn_id: str) -> tuple[Message, ...]:
    """What `turn_id` was asked: every message before its reply."""
    return messages(path_to(trace, turn_id))[:-1]


def opening(trace: Trace) -> tuple[Message, ...]:
    """What the conversation began with: the messages before its first reply."""
    path = last_path(trace)
    return path[0].added if path else ()


def tool_failed(message: Message) -> bool:
    """Whether a tool's message reports an error: JSON with a truthy "error", or a text that begins with "error"."""
    if message.role != "tool" or not message.content:
        return False
    try:
        value = json.loads(message.content)
    except ValueError:
        return message.content.lstrip().lower().startswith("error")
    return isinstance(value, dict) and bool(value.get("error"))
