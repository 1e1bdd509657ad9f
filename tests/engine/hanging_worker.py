"""An engine child, scripted, whose first request hangs for ever if the file `--source` exists; it takes the file away.

`python -m engine.hanging_worker --source FILE --socket PATH`: it answers questions while it hangs, as an engine does
whose thread hangs in a step.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from honed.engine import worker
from honed.engine.scripted import ScriptedEngine
from honed.protocols import Chunk, EngineStatus, Request


class HangingEngine(ScriptedEngine):
    """Stays at one heartbeat from its first request on."""

    hangs = False

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Nothing, ever."""
        self.hangs = True
        await asyncio.Event().wait()
        yield Chunk(id=request.id)

    async def status(self) -> EngineStatus:
        """The same heartbeat again."""
        return msgspec.structs.replace(await super().status(), heartbeat=7 if self.hangs else None)


def make(flag: Path) -> ScriptedEngine:
    """The engine of this life."""
    if not flag.exists():
        return ScriptedEngine()
    flag.unlink()
    return HangingEngine()


if __name__ == "__main__":
    parent = os.getppid()
    worker.die_with_parent()
    options = worker._parser().parse_args(sys.argv[1:])
    asyncio.run(worker.serve(lambda: make(Path(options.source)), options.socket, parent))
