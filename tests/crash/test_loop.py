"""kill -9 of the loop and of the learner at random moments: the turn ends as if nothing had happened.

Real processes and a real store; the intelligence is fake, so an uninterrupted turn says exactly what must come out.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from honed.errors import CorruptData
from honed.store import Store, open_store
from honed.testing import read_fake
from honed.types import Version

TESTS = Path(__file__).parents[1]
LINE = "support"


async def start(root: Path) -> asyncio.subprocess.Process:
    """The loop's process."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HONED_LOG": "off"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crash.fake_loop", str(root), stdout=asyncio.subprocess.PIPE, env=environment
    )


async def events(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """What the process tells, until it ends."""
    assert process.stdout is not None
    async for line in process.stdout:
        if line.endswith(b"\n"):
            yield json.loads(line)


class Kill(NamedTuple):
    """Whom to kill, after how many events of this life (or which event), and how many seconds later."""

    whom: str
    after: int | str
    later: float

    def is_due(self, seen: int, event: str, learner: int) -> bool:
        """Whether this event is the moment; a learner can only be killed while there is one."""
        if self.whom == "learner" and (not learner or event == "learner.lost"):
            return False
        return event == self.after if isinstance(self.after, str) else seen >= self.after


async def turn(root: Path, kills: list[Kill]) -> dict[str, Any]:
    """One turn, cut off by each of `kills` in their order."""
    left = list(kills)
    while True:
        process, seen, learner = await start(root), 0, 0
        async for told in events(process):
            if told["event"] == "report":
                assert not left, f"the turn ended before it was killed {len(left)} more times"
                await process.wait()
                assert process.returncode == 0
                return told
            if told["event"] == "learner.up":
                learner = told["pid"]
            seen += 1
            if left and left[0].is_due(seen, told["event"], learner):
                kill = left.pop(0)
                await asyncio.sleep(kill.later)
                os.kill(process.pid if kill.whom == "loop" else learner, signal.SIGKILL)
                seen, learner = 0, 0
        assert await process.wait() == -signal.SIGKILL


def moments(seed: int, whom: str) -> list[Kill]:
    """Random moments of a turn: while it begins and imitates, while it practises, and at the gate (or just after)."""
    draws = random.Random(seed)
    spans = ((2, 12), (4, 24), (20, 90))
    kills = [Kill(whom, draws.randint(*span), draws.random() * 0.03) for span in spans]
    return [*kills[:2], Kill(whom, "gate.decided", 0.0)] if (whom, seed) == ("loop", 2) else kills


def told_by(store: Store, run: str) -> dict[str, Any]:
    """All that a turn must produce, free of ids that depend on when it ran."""
    groups = store.groups.list(run)
    version = store.versions.get(LINE, 1)
    verdict = store.verdicts.list(version=version.id)[0]
    return {
        "groups": [(step, slot, group.task, scores(group.traces)) for step, slot, group in groups],
        "practised": Counter(group.task for _, _, group in groups),
        "states": {task.id: store.tasks.state(task.id) for task in store.tasks.list()},
        "digest": version.digest,
        "decision": verdict.decision,
        "suites": msgspec.to_builtins(verdict.suites),
        "num_evals": store.traces.count(origin="eval"),
        "num_rollouts": store.traces.count(origin="rollout"),
        "releases": [(row.version, row.kind) for row in store.releases.list(LINE)],
        "turn": store.jobs.get(LINE, "turn"),
    }


def scores(traces: tuple[Any, ...]) -> list[float]:
    return [trace.score.value for trace in traces]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a turn without a crash produces."""
    root = tmp_path_factory.mktemp("r")
    report = asyncio.run(turn(root, []))
    assert report["ended"] == "promoted"
    assert_paid(open_store(None, root))
    return told_by(open_store(None, root), report["run"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("whom", ["loop", "learner"])
async def test_a_turn_that_was_killed_ends_as_one_that_was_not(
    tmp_path_factory: pytest.TempPathFactory, reference: dict[str, Any], whom: str, seed: int
) -> None:
    root = tmp_path_factory.mktemp("c")  # a short name: sockets lie under it
    report = await turn(root, moments(seed, whom))
    store = open_store(None, root)
    found = told_by(store, report["run"])
    assert found == reference
    assert found["practised"] == reference["practised"]
    assert_whole(store, root)
    assert_paid(store)


def assert_paid(store: Store) -> None:
    """Every stored turn of the loop has its entry, and no turn two; what else was generated came to nothing."""
    entries = store.ledger.list(LINE)
    for origin, activity in (("rollout", "generate"), ("eval", "eval")):
        traces = store.traces.list(origin=origin, line=LINE, limit=None)
        turns = {f"turn:{turn.id}": turn for trace in traces for turn in trace.turns}
        paid = [entry for entry in entries if entry.activity == activity and entry.id.startswith("turn:")]
        assert {entry.id for entry in paid} == set(turns)
        used = [turn.usage for turn in turns.values() if turn.usage is not None]
        assert sum(entry.tokens for entry in paid) == sum(usage.prompt + usage.output for usage in used)
        others = [entry for entry in entries if entry.activity == activity and entry not in paid]
        assert {entry.outcome for entry in others} <= {"fault"}


def assert_whole(store: Store, root: Path) -> None:
    """Every stored version loads; every folder without a whole manifest refuses to."""
    for version in store.versions.list():
        assert read_fake(Path(version.uri), version.digest)
    half = root / "half"
    half.mkdir()
    (half / "skills.json").write_bytes(b'{"half": ')
    with pytest.raises(CorruptData, match=r"manifest\.json"):
        read_fake(half, Version(line=LINE, number=9).digest)
    assert not (root / "blobs" / "runs").exists() or not any((root / "blobs" / "runs").iterdir())
