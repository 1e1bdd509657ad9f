"""[serve]: where the gateway listens and what it allows."""

from __future__ import annotations

from pydantic import Field

from honed.config import Settings
from honed.record import Fsync


class ServeSettings(Settings):
    """The gateway's settings."""

    host: str = "127.0.0.1"
    """Address to listen on; the loopback by default."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_tokens: int = Field(default=512, ge=1)
    """Tokens of a reply when the request does not say; fewer where the context has fewer left."""
    fsync: Fsync = "interval"
    """When the capture log is forced to the disk: a power cut may lose what was not; kill -9 loses nothing anyway."""
    poll_seconds: float = Field(default=0.25, gt=0)
    """How often releases are looked at and the capture log is drained."""
    drain_seconds: float = Field(default=20.0, ge=0)
    """Time that running requests are given to end after SIGTERM."""
