"""Complete groups, kept by (run, step, slot): after a crash they are replayed from the store and never resampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from honed.errors import Refused
from honed.loop.rollout import Rollouts
from honed.store import Store
from honed.types import Group, Origin, Task


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """The groups of one run. `seed` and the step decide every draw; `subject` is the version that pays for them."""

    store: Store
    run: str
    seed: int
    subject: str = ""
    on_group: Callable[[int, Group, bool], None] = field(default=lambda step, group, replayed: None)

    async def fill(
        self,
        rollouts: Rollouts,
        step: int,
        slots: Mapping[int, Task],
        version: str,
        num_attempts: int,
        *,
        origin: Origin = "rollout",
        tags: Mapping[str, str] | None = None,
    ) -> list[Group]:
        """The groups of a step in the order of its slots: those in the store, and new ones for the others.

        A new group is stored the moment it is complete, with its entries in the ledger. Raises Refused when the store
        holds another task or another number of attempts in a slot: the plan has changed under a running turn.
        """
        have = await self.complete(step)
        for slot, task in slots.items():
            if (group := have.get(slot)) is not None:
                self._check(step, slot, group, task, num_attempts)
                self.on_group(step, group, True)

        async def keep(slot: int, group: Group) -> None:
            await asyncio.to_thread(self.store.groups.put, self.run, step, slot, group)
            rollouts.charge(group)
            await rollouts.flush(self.store, self.subject)
            self.on_group(step, group, False)

        missing = {slot: task for slot, task in slots.items() if slot not in have}
        marks = {"run": self.run, "step": str(step), **(tags or {})}
        new = await rollouts.practise(
            missing,
            version,
            num_attempts,
            name=f"{self.run}/{step}",
            seed=self.seed + step,
            keep=keep,
            origin=origin,
            tags=marks,
        )
        return [new[slot] if slot in new else have[slot] for slot in slots]

    async def complete(self, step: int) -> dict[int, Group]:
        """What the store already holds of a step, by slot."""
        rows = await asyncio.to_thread(self.store.groups.list, self.run, step)
        return {slot: group for _, slot, group in rows}

    def _check(self, step: int, slot: int, group: Group, task: Task, num_attempts: int) -> None:
        if group.task != task.id or len(group.traces) != num_attempts:
            raise Refused(
                f"step {step}, slot {slot} of {self.run} holds {len(group.traces)} attempts at {group.task}, and the "
                f"plan wants {num_attempts} at {task.id}. Finish the turn with the config that it began with, or "
                "abandon it (honed run --abandon)."
            )
