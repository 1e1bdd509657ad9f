"""The capture log and its drainer: nothing answered is lost, nothing is doubled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from honed.record import CaptureLog, Drainer, read_log
from honed.store import open_store
from honed.types import Captured, Message, Sampling, Turn

WRITER = """
import sys
from pathlib import Path
from test_record import captured
from honed.record import CaptureLog
log = CaptureLog(Path(sys.argv[1]))
for number in range(10_000):
    log.append(captured(number))
    print(number, flush=True)
"""


def captured(number: int) -> Captured:
    turn = Turn(
        id=f"chatcmpl-{number}", trace=f"trace_{number}", reply=Message(role="assistant", content="x"), output=(1, 2),
        logprobs=(-0.5, -0.25), sampling=Sampling(), model="m", finish="stop", at=1.0 + number,
    )  # fmt: skip
    return Captured(turn=turn, line="m")


def test_records_come_back_and_a_torn_tail_ends_the_log(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path)
    for number in range(3):
        log.append(captured(number))
    log.close()
    whole = log.path.read_bytes()
    assert [record for record, _ in read_log(log.path)] == [captured(number) for number in range(3)]
    log.path.write_bytes(whole[:-5])
    assert [record for record, _ in read_log(log.path)] == [captured(0), captured(1)]
    log.path.write_bytes(whole[:-5] + b"\0\0\0\0\0")
    assert [record for record, _ in read_log(log.path)] == [captured(0), captured(1)]


def test_draining_twice_stores_once_and_goes_on_where_it_was(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path / "capture")
    with open_store(None, tmp_path) as store:
        drainer = Drainer(tmp_path / "capture", store, batch=2)
        for number in range(5):
            log.append(captured(number))
        assert (drainer.drain_once(), drainer.drain_once(), drainer.backlog_bytes) == (5, 0, 0)
        log.append(captured(5))
        assert drainer.drain_once() == 1
        assert log.path.exists()  # its writer lives


def test_a_writer_killed_at_any_moment_loses_and_doubles_nothing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    acknowledged = []
    for rounds in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / f"capture-{rounds}")],
            stdout=subprocess.PIPE,
            cwd=here,
            text=True,
        )
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(50 + 31 * rounds)]
        child.kill()
        child.wait()
        with open_store(None, tmp_path / f"store-{rounds}") as store:
            drainer = Drainer(tmp_path / f"capture-{rounds}", store)
            drainer.drain_once()
            drainer.drain_once()
            stored = {trace.id for trace in store.traces.list(limit=None)}
            assert {f"trace_{number}" for number in acknowledged} <= stored
            assert list((tmp_path / f"capture-{rounds}").iterdir()) == []


def test_a_full_disk_is_counted_and_does_not_reach_the_caller(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path)
    log._file = -1  # a descriptor that refuses every write, as a full disk does
    log.append(captured(0))
    assert log.dropped == 1
