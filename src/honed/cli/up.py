"""`honed up`: the gateway and the loop under one supervisor."""

from __future__ import annotations

import typer

from honed.cli import output
from honed.errors import ConfigError
from honed.runtime.supervise import supervise


def up(config: output.ConfigOption = None) -> None:
    """Serves and learns: `honed serve` and `honed run`, restarted when they die, ended together.

    Exit code 2 when one of them finds that it was asked for something wrong.
    """
    path = config or output.DEFAULT_CONFIG
    if config is None and not path.exists():
        raise ConfigError(f"honed up wants a config file: name one with --config, or make {path}; it may be empty.")
    output.settings(path)
    raise typer.Exit(supervise(path))
