from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A fresh store on a real SQLite file."""
    with open_store(None, tmp_path / "root") as opened:
        yield opened
