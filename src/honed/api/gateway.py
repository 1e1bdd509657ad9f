"""The parts that the routes share: who answers, where records go, what is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from honed.api.meters import Meters
from honed.api.settings import ServeSettings
from honed.protocols import Model
from honed.record import CaptureLog, Drainer
from honed.store import Store

Decode = Callable[[Sequence[int]], str]


class Serving(Protocol):
    """What the routes need to know of the fleet. `problem`: why nothing can be served any more, or ""."""

    line: str
    serving: str
    problem: str

    def version_of(self, line: str) -> str: ...
    def pinned(self, version: str) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Everything that a request may touch. `model` is a Recorder; `decode` gives the text of tokens, for logprobs."""

    model: Model
    fleet: Serving
    store: Store
    capture: CaptureLog
    drainer: Drainer
    decode: Decode | None = None
    settings: ServeSettings = field(default_factory=ServeSettings)
    meters: Meters = field(default_factory=Meters)
