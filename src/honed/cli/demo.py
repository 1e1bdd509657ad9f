"""`honed demo`: the whole road on a real model, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import honed
from honed.errors import UserError


def demo(
    seed: Annotated[int, typer.Option(help="Decides tasks, traffic and every draw.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="Where its store goes; default runs/demo-SEED.")] = None,
    report: Annotated[Path, typer.Option(help="The page to write; demo.json goes beside it.")] = Path("report.html"),
) -> None:
    """A support agent is trained, served, broken by changed tools, repaired, and guarded. Takes minutes."""
    examples = Path(honed.__file__).parents[2] / "examples"
    if not (examples / "support" / "demo.py").exists():
        raise UserError(f"the demo lives in the repository, and {examples} is not there: run it from a clone.")
    sys.path.insert(0, str(examples))
    from support.demo import run_demo  # the example is no part of the package

    run_demo(seed=seed, folder=folder or Path("runs") / f"demo-{seed}", report=report)
