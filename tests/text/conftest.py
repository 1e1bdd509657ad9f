from collections.abc import Callable
from pathlib import Path

import pytest

from honed.text import Renderer, load_renderer

from .templates import smollm2, write_model


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    """The renderer of SmolLM2, or of a small template by its kind."""
    folder: Path = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Renderer:
        if kind == "smollm2":
            return smollm2()
        if not (folder / kind).exists():
            write_model(kind, folder / kind)
        return load_renderer(folder / kind)

    return make
