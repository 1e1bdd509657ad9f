"""Complete groups: the attempts that a run has paid for, replayed after a crash and never resampled."""

from __future__ import annotations

import time
from collections import defaultdict

import sqlalchemy as sa

from honed.store.database import Database, insert_new
from honed.store.schema import group_traces, groups
from honed.store.traces import put_trace, read_traces
from honed.types import Group


class Groups:
    """Groups by (run, step, slot)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, run: str, step: int, slot: int, group: Group) -> bool:
        """Stores a complete group with all its traces in one transaction, or nothing of it.

        The first group of a (run, step, slot) stays: returns whether this one was stored.
        """
        place = {"run": run, "step": step, "slot": slot}

        def work(connection: sa.Connection) -> bool:
            row = {**place, "id": group.id, "task": group.task, "at": time.time()}
            if not insert_new(connection, groups, [row]):
                return False
            for trace in group.traces:
                put_trace(connection, trace)
            links = [{**place, "position": i, "trace": trace.id} for i, trace in enumerate(group.traces)]
            insert_new(connection, group_traces, links)
            return True

        return self._database.write(work)

    def count(self, run: str, task: str | None = None) -> int:
        """How many groups a run has completed, of one task if given."""
        where = [groups.c.run == run] if task is None else [groups.c.run == run, groups.c.task == task]
        with self._database.read() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(groups).where(*where)).scalar_one()

    def list(self, run: str, step: int | None = None) -> list[tuple[int, int, Group]]:
        """(step, slot, group) of a run, in that order, traces included."""
        where = [groups.c.run == run] if step is None else [groups.c.run == run, groups.c.step == step]
        query = sa.select(groups).where(*where).order_by(groups.c.step, groups.c.slot)
        same = sa.and_(*(group_traces.c[name] == groups.c[name] for name in ("run", "step", "slot")))
        links = sa.select(group_traces).join(groups, same).where(*where).order_by(group_traces.c.position)
        members: dict[tuple[int, int], list[str]] = defaultdict(list)
        with self._database.read() as connection:
            heads = connection.execute(query).all()
            for link in connection.execute(links):
                members[link.step, link.slot].append(link.trace)
            found = read_traces(connection, [id for ids in members.values() for id in ids])
        return [
            (head.step, head.slot, Group(id=head.id, task=head.task, traces=tuple(found[id] for id in ids)))
            for head in heads
            for ids in [members[head.step, head.slot]]
        ]
