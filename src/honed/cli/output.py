"""What every command shares: where the config is, tables for people, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from honed import codec
from honed.assemble import Config, load_config, open_store
from honed.store import Store

DEFAULT_CONFIG = Path("honed.toml")
CONFIG_HELP = "The TOML file that says where everything is; without one, every default and a store in .honed."
CONFIG_NAMES: dict[str, Any] = {"envvar": "HONED_CONFIG", "show_default": str(DEFAULT_CONFIG), "help": CONFIG_HELP}
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", **CONFIG_NAMES)]
ConfigArgument = Annotated[Path | None, typer.Argument(**CONFIG_NAMES)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, newest first.")]
LineOption = Annotated[str | None, typer.Option("--line", help="Only this model line.")]


def settings(path: Path | None) -> Config:
    """The config at `path`, which must be there when somebody named it; for None honed.toml, else the defaults."""
    if path is None and not DEFAULT_CONFIG.exists():
        return Config()
    return load_config(path or DEFAULT_CONFIG)


def store(path: Path | None) -> Store:
    """The store that the config names."""
    return open_store(settings(path))


def show_json(value: Any) -> None:
    """Prints one JSON document."""
    typer.echo(codec.to_json(value).decode())


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """Prints a table, or one sentence when there is nothing to list."""
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console().print(table)


def console() -> Console:
    """A console on stdout; wide when it is not a terminal, so that pipes get whole lines."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def num(count: int, one: str, many: str = "") -> str:
    """A count with its noun: "1 trace", "2 traces", "2 entries"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def one_line(text: str | None, width: int = 70) -> str:
    """The text on one line, cut where it is longer than `width`."""
    line = " ".join((text or "").split())
    return line if len(line) <= width else line[: width - 1] + "…"


def when(at: float) -> str:
    """A local time of day, short."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""


def dollars(value: float | None) -> str:
    """Dollars with enough digits to tell small ones apart; unpriced is said, never 0."""
    return "unpriced" if value is None else f"${value:,.2f}" if abs(value) >= 1 else f"${value:.6f}"


def percent(value: float | None) -> str:
    """A share of 1 as per cent."""
    return "" if value is None else f"{100 * value:.1f} %"
