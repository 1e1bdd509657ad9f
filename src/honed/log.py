"""Events as JSON lines on stderr, or wherever `configure` points; never content, never secrets.

`log("rollout.scored", task=..., score=...)` writes one line; run, task and trace ids come from `bind`.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

_context: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("honed_log", default=None)
_sink: TextIO | None = None
_enabled = os.environ.get("HONED_LOG", "on") != "off"


def configure(sink: TextIO | None = None, *, enabled: bool = True) -> None:
    """Sends events to `sink` (None: stderr), or nowhere."""
    global _sink, _enabled
    _sink, _enabled = sink, enabled


@contextlib.contextmanager
def bind(**ids: Any) -> Iterator[None]:
    """Adds ids to every event logged inside the block, tasks started there included."""
    token = _context.set({**(_context.get() or {}), **ids})
    try:
        yield
    finally:
        _context.reset(token)


def log(event: str, **fields: Any) -> None:
    """Writes one event; a sink that fails never breaks the caller."""
    if not _enabled:
        return
    line = json.dumps({"at": round(time.time(), 3), "event": event, **(_context.get() or {}), **fields}, default=str)
    with contextlib.suppress(OSError, ValueError):
        (_sink or sys.stderr).write(line + "\n")
