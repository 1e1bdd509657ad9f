"""`honed up`: the gateway and the loop under one supervisor."""

from __future__ import annotations

from honed.cli import output
from honed.runtime.supervise import supervise


def up(config: output.ConfigOption = output.DEFAULT_CONFIG) -> None:
    """Serves and learns: `honed serve` and `honed run`, restarted when they die, ended together."""
    output.settings(config)
    supervise(config)
