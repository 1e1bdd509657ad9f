"""Damage, several writers, several drainers, and sessions: what else can happen to the capture log."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from honed.engine.scripted import ByteRenderer, ScriptedEngine
from honed.engine.token_model import TokenModel
from honed.record import CaptureLog, Drainer, RecordedSession, Recorder, read_log
from honed.store import open_store
from honed.types import Captured, Message, Sampling, Turn

WRITER = """
import sys
from pathlib import Path
from test_record_logs import captured
from honed.record import CaptureLog
log = CaptureLog(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    log.append(captured(number))
print("written", flush=True)
sys.stdin.read()
"""


def captured(number: int) -> Captured:
    turn = Turn(
        id=f"t{number}", trace=f"trace_{number}", reply=Message(role="assistant", content="x"), output=(1,),
        logprobs=(-0.5,), sampling=Sampling(), model="m", finish="stop", at=1.0 + number,
    )  # fmt: skip
    return Captured(turn=turn, line="m")


def filled(folder: Path, count: int, **settings: object) -> CaptureLog:
    log = CaptureLog(folder, **settings)  # type: ignore[arg-type]
    for number in range(count):
        assert log.append(captured(number))
    return log


def test_a_damaged_record_ends_what_is_stored_and_the_log_is_kept_aside(tmp_path: Path) -> None:
    log = filled(tmp_path / "c", 3)
    log.close()
    ends = [end for _, end in read_log(log.path)]
    data = bytearray(log.path.read_bytes())
    data[ends[0] + 12] ^= 1  # a bit of the second record
    log.path.write_bytes(data)
    with open_store(None, tmp_path) as store:
        drainer = Drainer(tmp_path / "c", store)
        assert [drainer.drain_once(), drainer.drain_once()] == [1, 0]
        assert [trace.id for trace in store.traces.list()] == ["trace_0"]
        assert (drainer.damaged, drainer.backlog_bytes) == (1, 0)
        (aside,) = (tmp_path / "c").iterdir()
        assert aside.suffix == ".damaged"
        assert aside.read_bytes() == bytes(data)


def test_a_length_that_is_nonsense_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "1-x.log"
    path.write_bytes(b"\xff" * 64)
    assert list(read_log(path)) == []


def test_two_processes_logs_are_drained_together_and_deleted_when_their_writers_are_dead(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "c"), str(first), str(first + 20)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent,
        )
        for first in (0, 20)
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
    with open_store(None, tmp_path) as store:
        drainer = Drainer(tmp_path / "c", store, batch=7)
        assert drainer.drain_once() == 40
        assert len(list((tmp_path / "c").iterdir())) == 2  # they live, and may write more
        children[0].kill()
        children[0].wait()
        assert drainer.drain_once() == 0
        assert len(list((tmp_path / "c").iterdir())) == 1
        children[1].communicate()
        assert drainer.drain_once() == 0
        assert list((tmp_path / "c").iterdir()) == []
        assert store.traces.count() == 40


async def test_two_drainers_at_once_store_everything_once(tmp_path: Path) -> None:
    filled(tmp_path / "c", 200).close()
    with open_store(None, tmp_path) as store:
        drainers = [Drainer(tmp_path / "c", store, batch=10) for _ in range(2)]
        await asyncio.gather(*(asyncio.to_thread(drainer.drain_once) for drainer in drainers))
        for drainer in drainers:
            drainer.drain_once()
        assert store.traces.count() == 200
        assert all(len(trace.turns) == 1 for trace in store.traces.list(limit=None))
        assert list((tmp_path / "c").iterdir()) == []


def test_a_full_log_is_followed_by_a_new_one_and_nothing_is_lost(tmp_path: Path) -> None:
    log = filled(tmp_path / "c", 50, rotate_bytes=2000)
    assert len(list((tmp_path / "c").glob("*.log"))) > 1
    with open_store(None, tmp_path) as store:
        assert Drainer(tmp_path / "c", store).drain_once() == 50
        assert list((tmp_path / "c").iterdir()) == [log.path]  # only what is still written to


def test_what_cannot_be_encoded_is_counted(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path)
    bad = Captured(turn=captured(0).turn, tags={"a": object()})  # type: ignore[dict-item]
    assert log.append(bad) is False
    assert log.append(captured(1)) is True
    assert log.dropped == 1
    assert [record for record, _ in read_log(log.path)] == [captured(1)]


async def test_a_turn_is_in_the_log_before_its_last_delta_is_handed_on(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path)
    recorder = Recorder(TokenModel(ScriptedEngine(), ByteRenderer()), log)
    session = RecordedSession(
        recorder, trace="trace_1", origin="rollout", line="m", version="", sampling=Sampling(max_tokens=20, seed=7)
    )
    first = await session.reply([Message(role="user", content="a")])
    assert [record.turn for record, _ in read_log(log.path)] == [first]
    second = await session.reply([Message(role="user", content="a"), first.reply, Message(role="user", content="b")])
    kept = [record for record, _ in read_log(log.path)]
    assert [record.turn for record in kept] == [first, second] == list(session.turns)
    assert {record.origin for record in kept} == {"rollout"}
    assert (second.parent, second.trace) == (first.id, "trace_1")
    assert first.sampling.seed != second.sampling.seed
