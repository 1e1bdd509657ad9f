"""The capture log and its drainer: nothing answered is lost, nothing is doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from honed.errors import EngineError, StoreError
from honed.protocols import Call, Delta
from honed.record import CaptureLog, Drainer, RecordedSession, Recorder, read_log
from honed.store import Store, open_store
from honed.types import Captured, Feedback, Message, Sampling, Tool, Turn

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
            # a write that the kill cut at a page's end was never acknowledged: it is set aside, as any tail is
            assert list((tmp_path / f"capture-{rounds}").glob("*.log")) == []


def test_a_full_disk_is_counted_and_does_not_reach_the_caller(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path)
    log._file = -1  # a descriptor that refuses every write, as a full disk does
    log.append(captured(0))
    assert log.dropped == 1


def ids_in(store: Store) -> list[str]:
    return sorted(turn.id for trace in store.traces.list(limit=None) for turn in trace.turns)


def test_a_new_file_begins_when_one_is_full_and_full_ones_go_once_they_are_drained(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path / "capture", rotate_bytes=1000)
    for number in range(30):
        assert log.append(captured(number))
    files = sorted(path.name for path in (tmp_path / "capture").iterdir())
    assert len(files) > 3
    assert all(os.path.getsize(tmp_path / "capture" / name) <= 1000 for name in files)
    with open_store(None, tmp_path) as store:
        assert Drainer(tmp_path / "capture", store, batch=4).drain_once() == 30
        assert list((tmp_path / "capture").iterdir()) == [log.path]  # the one that is written to
        assert log.append(captured(30))
        assert ids_in(store) == sorted(f"chatcmpl-{number}" for number in range(30))


def test_a_closed_log_refuses_what_comes_late_and_is_deleted_when_drained(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path / "capture", rotate_bytes=100)
    log.append(captured(0))
    log.close()
    assert not log.append(captured(1))
    assert log.dropped == 1
    with open_store(None, tmp_path) as store:
        assert Drainer(tmp_path / "capture", store).drain_once() == 1
        assert list((tmp_path / "capture").iterdir()) == []


def test_what_no_record_can_hold_is_dropped_and_counted(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path)
    said = Feedback(id="f", target="t", name="n", value="\ud800", kind="comment", at=1.0)
    assert not log.append(Captured(feedback=said))
    assert log.append(captured(0))
    assert (log.dropped, len(list(read_log(log.path)))) == (1, 1)


@pytest.mark.parametrize("policy", ["never", "interval", "always"])
def test_every_sync_policy_writes_at_once(tmp_path: Path, policy: str) -> None:
    log = CaptureLog(tmp_path, fsync=policy)  # type: ignore[arg-type]
    log.append(captured(0))
    assert len(list(read_log(log.path))) == 1


def damage_a_byte(whole: bytes) -> bytes:
    return whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]


def write_no_record(whole: bytes) -> bytes:
    data = b"\xc1"  # whole and sound, and yet nothing of ours
    return whole + len(data).to_bytes(4, "big") + zlib.crc32(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("damage", "num_kept"),
    [(lambda whole: whole[:-1], 1), (damage_a_byte, 1), (write_no_record, 2), (lambda whole: whole + bytes(64), 2)],
    ids=["torn", "flipped", "foreign", "zeros"],
)
def test_a_damaged_log_gives_what_is_sound_is_set_aside_and_stops_no_other(
    tmp_path: Path, damage: Callable[[bytes], bytes], num_kept: int
) -> None:
    bad, good = (CaptureLog(tmp_path / "capture") for _ in range(2))
    for number in range(2):
        bad.append(captured(number))
    bad.close()
    bad.path.write_bytes(damage(bad.path.read_bytes()))
    good.append(captured(7))
    with open_store(None, tmp_path) as store:
        drainer = Drainer(tmp_path / "capture", store)
        assert drainer.drain_once() == num_kept + 1
        assert "chatcmpl-7" in ids_in(store)
        assert (drainer.damaged, drainer.backlog_bytes, drainer.drain_once()) == (1, 0, 0)
    assert bad.path.with_suffix(".damaged").exists()


def test_drainers_of_several_processes_share_the_work_without_doubling_it(tmp_path: Path) -> None:
    for first in range(0, 200, 50):
        log = CaptureLog(tmp_path / "capture")
        for number in range(first, first + 50):
            log.append(captured(number))
        log.close()
    with open_store(None, tmp_path) as store:
        counts: list[int] = []
        threads = [
            threading.Thread(target=lambda: counts.append(Drainer(tmp_path / "capture", store, batch=7).drain_once()))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        Drainer(tmp_path / "capture", store).drain_once()
        assert len(counts) == 4
        assert ids_in(store) == sorted(f"chatcmpl-{number}" for number in range(200))
        assert list((tmp_path / "capture").iterdir()) == []


async def test_a_store_that_is_away_is_waited_for_and_counted(tmp_path: Path) -> None:
    log = CaptureLog(tmp_path / "capture")
    with open_store(None, tmp_path) as store:
        broken = Drainer(tmp_path / "capture", Broken(store, num_failures=2))  # type: ignore[arg-type]
        log.append(captured(0))
        draining = asyncio.create_task(broken.run(0.005))
        while broken.backlog_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        draining.cancel()
        assert broken.failures == 2
        assert ids_in(store) == ["chatcmpl-0"]


class Broken:
    """A store whose traces cannot be reached a few times."""

    def __init__(self, store: Store, num_failures: int) -> None:
        self._store, self._left = store, num_failures

    @property
    def traces(self) -> object:
        """The store's, when it is there."""
        if self._left:
            self._left -= 1
            raise StoreError("the disk is away")
        return self._store.traces


class Parrot:
    """A model that says what it was asked, a word a delta."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def stream(self, call: Call, on_cut: Callable[[Turn], None] | None = None) -> AsyncGenerator[Delta, None]:
        """The words, then the turn."""
        self.calls.append(call)
        text = call.messages[-1].content or ""
        try:
            for word in text.split():
                if word == "die":
                    raise EngineError("killed")
                yield Delta(text=word)
        except (GeneratorExit, EngineError) as error:
            assert on_cut is not None
            on_cut(self._turn(call, "error" if isinstance(error, EngineError) else "cancelled"))
            raise
        yield Delta(turn=self._turn(call, "stop"))

    async def reply(self, call: Call) -> Turn:
        """The turn."""
        return [delta async for delta in self.stream(call)][-1].turn  # type: ignore[return-value]

    @staticmethod
    def _turn(call: Call, finish: str) -> Turn:
        return Turn(
            id=call.id, trace=call.trace or "trace_new", reply=Message(role="assistant", content="x"),
            sampling=call.sampling, model=call.line, finish=finish, at=1.0,
        )  # type: ignore[arg-type]  # fmt: skip


def asked(text: str = "one two") -> Call:
    return Call(
        id="chatcmpl-1", messages=(Message(role="user", content=text),), sampling=Sampling(), line="m", tenant="A",
        tools=(Tool(name="f"),), tags={"case": "7"}, origin="production",
    )  # fmt: skip


async def test_a_turn_is_in_the_log_before_its_last_delta_is_handed_on(tmp_path: Path) -> None:
    log, told = CaptureLog(tmp_path), list[Turn]()
    recorder = Recorder(Parrot(), log, on_turn=told.append)
    seen = []
    async for delta in recorder.stream(asked()):
        seen.append((delta.text, len(list(read_log(log.path)))))
    assert seen == [("one", 0), ("two", 0), ("", 1)]
    ((record, _),) = read_log(log.path)
    assert record.turn == told[0]
    assert (record.line, record.tenant, record.tags, record.tools) == ("m", "A", {"case": "7"}, (Tool(name="f"),))
    assert (await recorder.reply(asked())).id == "chatcmpl-1"
    assert len(list(read_log(log.path))) == 2


async def test_a_turn_that_was_cut_off_is_recorded_once_as_cancelled(tmp_path: Path) -> None:
    log, cut = CaptureLog(tmp_path), list[Turn]()
    stream = Recorder(Parrot(), log).stream(asked(), on_cut=cut.append)
    async with contextlib.aclosing(stream):
        await anext(stream)
    ((record, _),) = read_log(log.path)
    assert record.turn is not None
    assert record.turn.finish == "cancelled"
    assert cut == [record.turn]


async def test_a_turn_that_its_engine_did_not_end_is_recorded_and_told_of_and_the_error_goes_on(tmp_path: Path) -> None:
    log, cut, told = CaptureLog(tmp_path), list[Turn](), list[Turn]()
    with pytest.raises(EngineError):
        [delta async for delta in Recorder(Parrot(), log, told.append).stream(asked("one die"), on_cut=cut.append)]
    ((record, _),) = read_log(log.path)
    assert record.turn is not None
    assert record.turn.finish == "error"
    assert cut == told == [record.turn]


async def test_a_session_names_links_and_keeps_the_turns_of_its_attempt() -> None:
    model = Parrot()
    session = RecordedSession(
        model, trace="trace_7", origin="rollout", line="m", version="m@2.5", sampling=Sampling(seed=5, max_tokens=9),
        task="task_1", tenant="A",
    )  # fmt: skip
    say = (Message(role="user", content="hi"),)
    turns = [await session.reply(say), await session.reply(say, (Tool(name="f"),)), await session.reply(say)]
    assert session.turns == tuple(turns)
    assert [call.id for call in model.calls] == ["turn_7.0", "turn_7.1", "turn_7.2"]
    assert [call.parent for call in model.calls] == [None, "turn_7.0", "turn_7.1"]
    assert {(c.trace, c.origin, c.line, c.version, c.task, c.tenant) for c in model.calls} == {
        ("trace_7", "rollout", "m", "m@2.5", "task_1", "A")
    }
    assert model.calls[1].tools == (Tool(name="f"),)
    seeds = [call.sampling.seed for call in model.calls]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert {msgspec.structs.replace(call.sampling, seed=5) for call in model.calls} == {Sampling(seed=5, max_tokens=9)}
    await session.reply(say, sampling=Sampling(temperature=0.0))
    assert model.calls[-1].sampling == Sampling(temperature=0.0)
