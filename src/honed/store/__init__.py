"""The only place with SQL: every record of honed over SQLAlchemy Core, and large files over fsspec.

All methods are synchronous and thread-safe; call them through `asyncio.to_thread`. Several processes may use one store
at the same time.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import sqlalchemy as sa

from honed.errors import ConfigError, StoreError
from honed.store.blobs import Blobs
from honed.store.database import Database
from honed.store.feedback import Feedbacks
from honed.store.groups import Groups
from honed.store.jobs import Jobs, file_lock
from honed.store.ledger import Ledger, Total
from honed.store.migrate import migrate
from honed.store.releases import Releases
from honed.store.tasks import Tasks
from honed.store.traces import Traces
from honed.store.versions import Verdicts, Versions

__all__ = ["Blobs", "Store", "Total", "open_store"]


class Store:
    """All records under one root. Made by `open_store`."""

    def __init__(self, database: Database, root: Path, blobs: Blobs) -> None:
        self._database = database
        self.root = root
        self.blobs = blobs
        self.traces = Traces(database)
        self.feedback = Feedbacks(database)
        self.tasks = Tasks(database)
        self.groups = Groups(database)
        self.versions = Versions(database)
        self.verdicts = Verdicts(database)
        self.releases = Releases(database)
        self.ledger = Ledger(database)
        self.jobs = Jobs(database, root / "run")

    def close(self) -> None:
        """Closes the idle connections."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(url: str | None, root: Path | str, *, blobs: str | None = None, busy_seconds: float = 30.0) -> Store:
    """Opens, and where needed makes or migrates, the store under `root`.

    `url` is a database URL, a path of a SQLite file, or None for `root/honed.db`; `blobs` a folder or an fsspec URL,
    None for `root/blobs`. Raises ConfigError for a URL that is none and StoreError, having changed nothing, for a
    database that is corrupt, foreign, unreachable or newer than this code.
    """
    root = Path(root)
    place = _url(url, root)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (root / "run").mkdir(exist_ok=True, mode=0o700)
        if place.get_backend_name() == "sqlite" and place.database:
            Path(place.database).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the store {root} cannot be made: {error}. Set [store] root to a writable folder.") from error
    database = Database(place, busy_seconds=busy_seconds)
    with file_lock(root / "run" / "migrate.lock", wait=True):
        migrate(database)
    return Store(database, root, Blobs(blobs or str(root.absolute() / "blobs"), cache=root / "blob-cache"))


def _url(url: str | None, root: Path) -> sa.URL:
    if url is None or "://" not in url:
        return sa.URL.create("sqlite", database=str(root / "honed.db" if url is None else Path(url)))
    try:
        parsed = sa.make_url(url)
        parsed.get_dialect()
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError) as error:
        raise ConfigError(f"[store] url = {url!r} is no database URL: {error}.") from error
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigError(f"[store] url = {url!r} names no file: a store is shared by processes.")
    return parsed
