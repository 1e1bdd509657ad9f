"""The contenders' side of arena.py: says hello, then answers jobs line by line."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any


def options() -> dict[str, Any]:
    """What the benchmark told this contender."""
    return dict(json.loads(sys.argv[1]))


def serve(hello: dict[str, Any], job: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers each line until there is none."""
    _say(hello)
    for line in sys.stdin:
        try:
            _say(job(json.loads(line)))
        except Exception as error:  # said to the benchmark, which leaves this contender out from here on
            traceback.print_exc()
            _say({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def _say(said: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(said) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
