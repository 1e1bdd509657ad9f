"""The parts that several builders share: the store, the prices, the model on disk and its renderer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from honed.assemble.config import Config
from honed.economics.prices import PriceBook, load_book
from honed.engine.scripted import ByteRenderer
from honed.model.load import Prepared, prepare
from honed.store import Store
from honed.store import open_store as open_records
from honed.text import load_renderer


def open_store(config: Config) -> Store:
    """The store that the config names."""
    return open_records(config.store.url, Path(config.store.root), blobs=config.store.blobs)


def price_book(config: Config) -> PriceBook:
    """The price book."""
    return load_book(config.prices.book)


PREPARE = """
import sys, pathlib
from honed.model.load import prepare
prepare(sys.argv[1], *map(pathlib.Path, sys.argv[2:]))
"""


def prepared(config: Config) -> Prepared:
    """The model's directory and digest. A conversion runs in a child, so that this process never loads torch."""
    source = config.model.source
    if source == "scripted":
        return Prepared(directory=Path(), digest="scripted", source=source)
    cache = Path(config.model.cache) if config.model.cache else None
    if source == "smollm2" or source.endswith(".gguf"):
        subprocess.run([sys.executable, "-c", PREPARE, source, *([str(cache)] if cache else [])], check=False)
    return prepare(source, cache)


def renderer_of(config: Config) -> Any:
    """The renderer of the model's tokenizer and template; the scripted engine's works on bytes."""
    if config.model.source == "scripted":
        return ByteRenderer()
    return load_renderer(prepared(config).directory, config.model.format)
