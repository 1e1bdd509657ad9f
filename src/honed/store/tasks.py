"""Tasks and their standing: what can be practised, what is set aside, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import sqlalchemy as sa

from honed import codec
from honed.errors import NotFound, UserError
from honed.store.database import Database, chunks, insert_new
from honed.store.schema import tasks
from honed.types import Task

State = Literal["ready", "waiting", "always", "never", "retired", "quarantined"]
"""ready to practise; waiting for its probe; always or never passed at the probe; retired; quarantined (its verifier is
doubtful)."""


class Tasks:
    """Every task ever made; one is never deleted, it changes its state."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, new: Sequence[Task], state: str = "ready", reason: str = "") -> int:
        """Stores the tasks whose ids are new, in order, and returns how many were. Stored ones keep their state."""
        _check(state)
        rows = [
            {
                "id": task.id,
                "kind": task.kind,
                "suite": task.suite,
                "split": task.split,
                "source": task.source,
                "state": state,
                "reason": reason,
                "body": codec.encode(task),
                "at": time.time(),
            }
            for task in new
        ]
        return self._database.write(lambda connection: insert_new(connection, tasks, rows))

    def get(self, id: str) -> Task:
        """One task. Raises NotFound."""
        return codec.decode(self._row(id).body, Task)

    def find(self, ids: Sequence[str]) -> dict[str, Task]:
        """The stored tasks among `ids`, by id."""
        found: dict[str, Task] = {}
        with self._database.read() as connection:
            for some in chunks(list(dict.fromkeys(ids))):
                for row in connection.execute(sa.select(tasks.c.body).where(tasks.c.id.in_(some))):
                    task = codec.decode(row.body, Task)
                    found[task.id] = task
        return found

    def set_state(self, id: str, state: str, reason: str = "") -> None:
        """Changes a task's standing and says why. Raises NotFound."""
        _check(state)
        change = sa.update(tasks).where(tasks.c.id == id).values(state=state, reason=reason)
        if self._database.write(lambda connection: connection.execute(change).rowcount) == 0:
            raise NotFound(f"no task {id!r} in {self._database.name}.")

    def state(self, id: str) -> str:
        """A task's standing. Raises NotFound."""
        return self._row(id).state

    def reason(self, id: str) -> str:
        """Why a task has its standing. Raises NotFound."""
        return self._row(id).reason

    def counts(self) -> dict[tuple[str, str, str], int]:
        """How many tasks there are by (kind, split, state)."""
        columns = (tasks.c.kind, tasks.c.split, tasks.c.state)
        query = sa.select(*columns, sa.func.count()).group_by(*columns).order_by(*columns)
        with self._database.read() as connection:
            return {(kind, split, state): num for kind, split, state, num in connection.execute(query)}

    def _row(self, id: str) -> Any:
        query = sa.select(tasks.c.body, tasks.c.state, tasks.c.reason).where(tasks.c.id == id)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise NotFound(f"no task {id!r} in {self._database.name}.")
        return row

    def list(
        self,
        split: str | None = None,
        suite: str | None = None,
        kind: str | None = None,
        state: str | None = None,
        *,
        source: str | None = None,
        limit: int | None = None,
    ) -> list[Task]:
        """Tasks in the order in which they were put."""
        exact = {"split": split, "suite": suite, "kind": kind, "state": state, "source": source}
        where = [tasks.c[name] == value for name, value in exact.items() if value is not None]
        query = sa.select(tasks.c.body).where(*where).order_by(tasks.c.seq).limit(limit)
        with self._database.read() as connection:
            return [codec.decode(row.body, Task) for row in connection.execute(query)]


def _check(state: str) -> None:
    if state not in get_args(State):
        raise UserError(f"{state!r} is no state of a task; use one of {', '.join(get_args(State))}.")
