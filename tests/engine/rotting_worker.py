"""A scripted engine child to which the versions named in the file `--source` are corrupt, as it begins.

`python -m engine.rotting_worker --source FILE --socket PATH`
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from honed.engine import worker
from honed.engine.scripted import ScriptedEngine, ScriptedSettings

if __name__ == "__main__":
    parent = os.getppid()
    worker.die_with_parent()
    options = worker._parser().parse_args(sys.argv[1:])
    corrupt = tuple(Path(options.source).read_text().split())
    asyncio.run(worker.serve(lambda: ScriptedEngine(ScriptedSettings(corrupt=corrupt)), options.socket, parent))
