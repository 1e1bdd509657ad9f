"""The gateway process of the crash tests: the real one, over the scripted engine. Its port is a line on stdout.

`python -m crash.fake_gateway ROOT`
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from honed.assemble import Config, serve_gateway

LINE = "support"


def config(root: Path) -> Config:
    """A gateway whose engine says the user's message again, slowly enough to be killed in the middle."""
    sections = {
        "model": {"source": "scripted", "line": LINE},
        "store": {"root": str(root)},
        "scripted": {"delay_seconds": 0.002},
        "serve": {"poll_seconds": 0.05, "drain_seconds": 5.0},
    }
    return Config.model_validate(sections)


if __name__ == "__main__":
    asyncio.run(serve_gateway(config(Path(sys.argv[1])), port=0, ready=lambda port: print(port, flush=True)))
