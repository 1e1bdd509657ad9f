"""`honed serve`: the gateway and its engine."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from honed.assemble import serve_gateway
from honed.cli import output


def serve(
    config: output.ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="Instead of the config's; 0 takes a free one.")] = None,
) -> None:
    """Serves the line's released version over HTTP, and records what happens."""
    settings = output.settings(config)

    def ready(at: int) -> None:
        typer.echo(f"honed serves {settings.model.line} at http://{settings.serve.host}:{at}/v1")

    asyncio.run(serve_gateway(settings, port=port, ready=ready))
