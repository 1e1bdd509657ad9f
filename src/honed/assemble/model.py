"""The parts that several builders share: the store, the prices, the model on disk and its renderer."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from honed import errors
from honed.assemble.config import Config
from honed.economics.prices import PriceBook, load_book
from honed.engine.scripted import ByteRenderer
from honed.errors import CorruptData, EngineError, HonedError, Refused
from honed.model.load import Prepared, prepare
from honed.store import Store
from honed.store import open_store as open_records
from honed.text import load_renderer
from honed.types import Version


def open_store(config: Config) -> Store:
    """The store that the config names."""
    return open_records(config.store.url, Path(config.store.root), blobs=config.store.blobs)


def price_book(config: Config) -> PriceBook:
    """The price book."""
    return load_book(config.prices.book)


PREPARE = """
import contextlib, json, pathlib, sys
try:
    from honed.model.load import prepare
    with contextlib.redirect_stdout(sys.stderr):
        made = prepare(sys.argv[1], *map(pathlib.Path, sys.argv[2:]))
    said = {"directory": str(made.directory), "digest": made.digest}
except Exception as error:
    said = {"kind": type(error).__name__, "message": str(error)}
print(json.dumps(said))
"""
"""The child's program: what was made, or what was wrong with it, as one line of JSON."""


def prepared(config: Config) -> Prepared:
    """The model's directory and digest. A conversion runs in a child, so that this process never loads torch.

    Raises what `prepare` raises, and EngineError when the child was killed; nothing is tried a second time here.
    """
    source = config.model.source
    if source == "scripted":
        return Prepared(directory=Path(), digest="scripted", source=source)
    if source == "smollm2" or source.endswith(".gguf"):
        return _prepared_by_child(source, config.model.cache)
    return prepare(source, Path(config.model.cache) if config.model.cache else None)


@functools.cache
def _prepared_by_child(source: str, cache: str | None) -> Prepared:
    """Asked once a process: the digest of a model does not change under it. A failure is not kept."""
    command = [sys.executable, "-c", PREPARE, source, *([cache] if cache else [])]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        raise EngineError(
            f"the child that prepares the model {source!r} ended with code {child.returncode}"
            f"{' (out of memory?)' if child.returncode == -9 else ''}; run honed doctor."
        )
    said = json.loads(child.stdout)
    if "message" in said:
        raise _as_raised(source, said["kind"], said["message"])
    return Prepared(directory=Path(said["directory"]), digest=said["digest"], source=source)


def _as_raised(source: str, kind: str, message: str) -> HonedError:
    """The child's exception: honed's own as it was, any other as CorruptData that names the model."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, HonedError):
        return found(message)
    first = (message.splitlines() or [""])[0]
    return CorruptData(f"the model {source!r} cannot be converted: {kind}: {first}")


def merge_version(config: Config, version: Version, folder: Path) -> str:
    """Writes an adapter version as a whole model; its digest. Raises Refused for an adapter of another base."""
    from honed.model.merge import merge

    base = prepared(config)
    if version.base and version.base != base.digest:
        raise Refused(
            f"{version.id} adapts the base {version.base[:12]}, and model.source is {base.digest[:12]}: "
            "set model.source to what it was made of."
        )
    return merge(base, Path(version.uri.removeprefix("file://")), version.digest, folder.absolute())


def renderer_of(config: Config) -> Any:
    """The renderer of the model's tokenizer and template; the scripted engine's works on bytes."""
    if config.model.source == "scripted":
        return ByteRenderer()
    return load_renderer(prepared(config).directory, config.model.format)
