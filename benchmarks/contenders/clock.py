"""The seconds of each step of a transformers trainer."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step begins and ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
