"""Records what happens: the capture log, which survives kill -9, the drainer that empties it, and the Recorder.

Before a reply's last byte leaves, its Turn is in the log by one write call. The store may be slow, locked or away:
serving does not notice, and the log is the only spill path. Content never goes to the event log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from honed import codec
from honed.clock import new_id
from honed.errors import CorruptData, HonedError
from honed.log import log
from honed.protocols import Call, Delta, Model
from honed.store import Store
from honed.types import Captured, Message, Origin, Sampling, Tool, Turn

Fsync = Literal["never", "interval", "always"]
HEADER_BYTES = 8
MAX_RECORD_BYTES = 256 << 20
SYNC_SECONDS = 1.0


class CaptureLog:
    """An append-only file of this process: 4 bytes of length, 4 of crc32, a msgpack Captured.

    One write call a record, so kill -9 loses nothing that was appended; `fsync` decides what a power cut may lose. A
    new file begins at `rotate_bytes`. The file is locked for as long as it is written to, so that a drainer knows which
    ones nobody will add to. `dropped` counts records that could not be written (disk full): serving goes on.
    """

    def __init__(self, folder: Path, *, fsync: Fsync = "interval", rotate_bytes: int = 64 << 20) -> None:
        self.folder, self._fsync, self._rotate_bytes = Path(folder), fsync, rotate_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._synced = time.monotonic()
        self._file, self._size, self.dropped = -1, 0, 0
        self._open()

    def append(self, record: Captured) -> bool:
        """Writes one record; whether that worked. A failure is an event and a count, never the caller's."""
        with self._lock:
            try:
                data = codec.encode(record)
                if len(data) > MAX_RECORD_BYTES:
                    raise ValueError(f"a record of {len(data)} bytes is over the limit of {MAX_RECORD_BYTES}")
                self._write(len(data).to_bytes(4, "big") + zlib.crc32(data).to_bytes(4, "big") + data)
            except (OSError, ValueError, TypeError, OverflowError) as error:
                self.dropped += 1
                log("capture.dropped", error=type(error).__name__, dropped=self.dropped)
                return False
        return True

    def close(self) -> None:
        """Syncs and closes; the drainer finds the file by its name."""
        with self._lock, contextlib.suppress(OSError):
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1  # a late append fails instead of reaching whoever was given the number since

    def _open(self) -> None:
        path = self.folder / f"{os.getpid()}-{new_id('')}.log"
        hidden = path.with_suffix(".new")  # no drainer may meet the file before it is locked
        file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        hidden.rename(path)
        self.path, self._file, self._size = path, file, 0

    def _write(self, frame: bytes) -> None:
        if self._file < 0:
            raise OSError("the capture log is closed")
        if self._size and self._size + len(frame) > self._rotate_bytes:
            full = self._file
            self._open()
            os.close(full)
        written = os.write(self._file, frame)
        if written < len(frame):
            os.ftruncate(self._file, self._size)
            raise OSError("the disk took only part of a record")
        self._size += len(frame)
        now = time.monotonic()
        if self._fsync == "always" or (self._fsync == "interval" and now - self._synced >= SYNC_SECONDS):
            os.fsync(self._file)
            self._synced = now


def read_log(path: Path, offset: int = 0) -> Iterator[tuple[Captured, int]]:
    """Records from `offset` on, each with the offset behind it. Ends at a torn or damaged record."""
    with open(path, "rb") as file:
        file.seek(offset)
        while len(head := file.read(HEADER_BYTES)) == HEADER_BYTES:
            size = int.from_bytes(head[:4], "big")
            data = file.read(size) if size <= MAX_RECORD_BYTES else b""
            if len(data) < size or zlib.crc32(data) != int.from_bytes(head[4:], "big"):
                return
            offset += HEADER_BYTES + size
            yield codec.decode(data, Captured), offset


class Drainer:
    """Moves every capture log of a folder into the store, those of dead processes too, and deletes what is drained.

    The offset moves in the transaction that stores the records, so nothing is lost or doubled, by several drainers
    either. `damaged` counts the logs that ended in something that is no record: they are set aside under another name.
    """

    def __init__(self, folder: Path, store: Store, *, batch: int = 256) -> None:
        self._folder, self._store, self._batch = Path(folder), store, batch
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}
        self.failures = self.damaged = 0

    @property
    def backlog_bytes(self) -> int:
        """What waits in the logs, as far as this drainer knows."""
        return sum(max(0, _size(path) - self._offsets.get(path.name, 0)) for path in self._folder.glob("*.log"))

    def drain_once(self) -> int:
        """Stores what the logs hold; returns the number of new turns and feedback rows. Raises StoreError."""
        with self._lock:
            num = 0
            for path in sorted(self._folder.glob("*.log")):
                with contextlib.suppress(FileNotFoundError):  # another drainer finished it
                    num += self._drain(path)
            return num

    async def run(self, interval_seconds: float = 0.2) -> None:
        """Drains until cancelled; a store that is away is tried again, less and less often, and counted."""
        in_a_row = 0
        while True:
            try:
                await asyncio.to_thread(self.drain_once)
                in_a_row = 0
            except (HonedError, OSError) as error:
                self.failures, in_a_row = self.failures + 1, in_a_row + 1
                log("capture.waiting", error=str(error), failures=self.failures)
            await asyncio.sleep(min(10.0, interval_seconds * 2 ** min(in_a_row, 6)))

    def _drain(self, path: Path) -> int:
        with open(path, "rb") as file:
            finished = _nobody_writes(file.fileno())  # asked before reading: what is added meanwhile waits
            offset, num = self._store.traces.offset(path.name), 0
            self._offsets[path.name] = offset
            records = _readable(path, offset)
            while batch := list(itertools.islice(records, self._batch)):
                offset = batch[-1][1]
                num += self._store.traces.capture([record for record, _ in batch], path.name, offset)
                self._offsets[path.name] = offset
            if finished:
                self._finish(path, offset)
            return num

    def _finish(self, path: Path, offset: int) -> None:
        del self._offsets[path.name]
        left = _size(path) - offset
        if left <= 0:
            path.unlink()
            return
        self.damaged += 1
        path.rename(path.with_suffix(".damaged"))
        log("capture.damaged", log=path.name, bytes=left)


class Recorder:
    """A Model that captures: every Turn is in the log before its last Delta is handed on, a cut-off one too.
    `on_turn` is told of each, for the books."""

    def __init__(self, model: Model, capture: CaptureLog, on_turn: Callable[[Turn], None] | None = None) -> None:
        self._model, self._capture, self._on_turn = model, capture, on_turn

    async def stream(self, call: Call, on_cut: Callable[[Turn], None] | None = None) -> AsyncGenerator[Delta, None]:
        """Deltas of the reply; the last one carries the recorded Turn."""

        def keep(turn: Turn) -> None:
            self._capture.append(_captured(call, turn))
            for told in (self._on_turn, on_cut if turn.is_cut else None):
                if told is not None:
                    told(turn)

        async with contextlib.aclosing(self._model.stream(call, on_cut=keep)) as deltas:
            async for delta in deltas:
                if delta.turn is not None:
                    keep(delta.turn)
                yield delta

    async def reply(self, call: Call) -> Turn:
        """The whole reply, recorded."""
        async with contextlib.aclosing(self.stream(call)) as deltas:
            async for delta in deltas:
                if delta.turn is not None:
                    return delta.turn
        raise AssertionError("a stream ends with its turn")


class RecordedSession:
    """protocols.Session: a model bound to one attempt. It links each turn to the one before and keeps them.
    `unfinished` counts the tokens of replies that were cut off: they were sampled, and no turn tells of them."""

    def __init__(
        self,
        model: Model,
        *,
        trace: str,
        origin: Origin,
        line: str,
        version: str,
        sampling: Sampling,
        task: str | None = None,
        tenant: str = "",
    ) -> None:
        self.trace = trace
        self._model, self._sampling = model, sampling
        self._call = Call(
            id="", trace=trace, messages=(), sampling=sampling, line=line, version=version, tenant=tenant,
            origin=origin, task=task,
        )  # fmt: skip
        self._turns: list[Turn] = []
        self.unfinished = 0

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), sampling: Sampling | None = None
    ) -> Turn:
        """One turn. Its seed is the attempt's moved on by the number of turns, so that turns draw independently."""
        chosen = sampling or self._sampling
        if chosen.seed is not None:
            chosen = msgspec.structs.replace(chosen, seed=(chosen.seed + 0x9E3779B9 * len(self._turns)) % 2**63)
        call = msgspec.structs.replace(
            self._call,
            id=f"turn_{self.trace.removeprefix('trace_')}.{len(self._turns)}",
            messages=tuple(messages),
            tools=tuple(tools),
            sampling=chosen,
            parent=self._turns[-1].id if self._turns else None,
        )
        sampled = 0
        async with contextlib.aclosing(self._model.stream(call)) as deltas:
            async for delta in deltas:
                sampled += len(delta.ids)
                self.unfinished += len(delta.ids)
                if delta.turn is not None:
                    self._turns.append(delta.turn)
        self.unfinished -= sampled
        return self._turns[-1]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said so far."""
        return tuple(self._turns)


def _captured(call: Call, turn: Turn) -> Captured:
    return Captured(
        turn=turn,
        origin=call.origin,
        line=call.line,
        task=call.task,
        tools=call.tools,
        tags=call.tags,
        tenant=call.tenant,
    )


def _readable(path: Path, offset: int) -> Iterator[tuple[Captured, int]]:
    """`read_log` up to a record that is whole and yet no Captured."""
    try:
        yield from read_log(path, offset)
    except CorruptData as error:
        log("capture.unreadable", log=path.name, error=str(error))


def _nobody_writes(file: int) -> bool:
    """Whether the process that wrote a log has let go of it: closed it, or died. Another drainer's hold counts too."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int:
    """Bytes of a file; 0 for one that is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
