"""Weights handed over inside one process: the way from the trainer to the rollout engine beside it.

Holds the last few versions; the durable copy is in the blob store. What crosses is references: the publisher gives
tensors that it will not change again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from honed.errors import NotFound


class MemoryChannel:
    """A Channel in memory. `config` describes the adapters that cross it (as PEFT's adapter_config.json does) and is
    empty where whole models do; `limit` is how many versions it holds: the oldest goes first."""

    def __init__(self, config: Mapping[str, Any] | None = None, *, limit: int = 4) -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit}: a channel must hold at least one version.")
        self.config: Mapping[str, Any] = config or {}
        self._limit = limit
        self._held: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def __contains__(self, version: object) -> bool:
        return version in self._held

    async def publish(self, version: str, tensors: dict[str, Any]) -> None:
        """Holds the tensors under the version's name, in place of any it held before."""
        self._held.pop(version, None)
        self._held[version] = dict(tensors)
        while len(self._held) > self._limit:
            self._held.popitem(last=False)

    async def fetch(self, version: str) -> dict[str, Any]:
        """The tensors of a version. Raises NotFound when it was never published or has been pushed out."""
        if version not in self._held:
            raise NotFound(f"the channel does not hold {version!r} (it holds: {', '.join(self._held) or 'nothing'}).")
        return dict(self._held[version])
