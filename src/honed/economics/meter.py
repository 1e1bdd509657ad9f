"""The meter: turns what was spent into priced ledger Entries, idle and waste included. It writes nothing to a store.

Busy seconds are measured (CPU seconds); idle is what is left of the reserved wall clock. What was spent on a candidate
that was never released is restated as "rejected" with dated reversing entries, so the ledger is append-only and its
shares still add to 1. The entry of a turn that is kept bears the turn's name: charging it again adds nothing to a
ledger that is idempotent by id.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from honed.clock import Clock, WallClock, new_id
from honed.economics.prices import PriceBook
from honed.types import Activity, Entry, Spend, Trace, Turn

CORE = "cpu-core"
Stage = Literal["serve", "learn"]


class Meter:
    """Collects Entries and prices them with `book`; `drain` hands them over once. Safe to use from several threads.

    `line` and `stage` are what entries carry unless a call says otherwise.
    """

    def __init__(
        self, book: PriceBook, *, line: str = "", stage: Stage = "learn", cores: int = 1, clock: Clock | None = None
    ) -> None:
        self.book, self.line, self.stage, self.cores = book, line, stage, cores
        self.clock = clock or WallClock()
        self._pending: list[Entry] = []
        self._busy: dict[str, float] = {}
        self._lock = threading.Lock()

    def charge(
        self,
        activity: Activity,
        seconds: float,
        *,
        device: str = CORE,
        tokens: int = 0,
        subject: str = "",
        line: str | None = None,
        stage: Stage | None = None,
        outcome: Spend = "used",
        dollars: float | None = None,
        at: float | None = None,
    ) -> Entry:
        """Records that `device` was busy for `seconds` on `subject`; returns the priced Entry.

        `dollars` is for what the book can't price by the second (a remote model's bill).
        """
        entry = Entry(
            id=new_id("entry_"),
            activity=activity,
            device=device,
            seconds=seconds,
            tokens=tokens,
            dollars=dollars,
            subject=subject,
            line=self.line if line is None else line,
            stage=stage or self.stage,
            outcome=outcome,
            at=self.clock.now() if at is None else at,
        )
        return self.add(self._priced(entry))

    def add(self, entry: Entry) -> Entry:
        """Takes an entry made elsewhere as it is."""
        with self._lock:
            self._pending.append(entry)
            if entry.activity != "idle":
                self._busy[entry.device] = self._busy.get(entry.device, 0.0) + entry.seconds
        return entry

    def charge_turn(
        self,
        turn: Turn,
        *,
        activity: Activity = "generate",
        device: str = CORE,
        line: str | None = None,
        stage: Stage | None = None,
        outcome: Spend = "used",
        kept: bool = True,
    ) -> Entry:
        """One model call: its busy seconds and the tokens it read (cached ones too) and sampled.

        A turn whose usage is unknown becomes an unpriced entry with the tokens that it is known to have added; a remote
        model's is priced by its tokens. `kept` False is for a turn that is made again under the same name: each of its
        tries is an entry of its own.
        """
        entry = self._entry_of(turn, activity, device, self.line if line is None else line, stage, outcome)
        return self.add(entry if kept else msgspec.structs.replace(entry, id=f"lost:{turn.id}:{turn.at!r}"))

    def charge_trace(self, trace: Trace, *, stage: Stage | None = None, activity: Activity = "generate") -> list[Entry]:
        """All calls of one attempt or conversation, outcome "fault" or "truncated" where it ended so."""
        outcome = outcome_of(trace)
        return [
            self.charge_turn(turn, activity=activity, line=trace.line, stage=stage, outcome=outcome)
            for turn in trace.turns
        ]

    def quote(self, trace: Trace) -> float | None:
        """What charge_trace would charge for an attempt, in dollars; None when a call of it is unpriced."""
        outcome = outcome_of(trace)
        prices = [self._entry_of(turn, "eval", CORE, trace.line, None, outcome).dollars for turn in trace.turns]
        return None if None in prices else sum(price for price in prices if price is not None)

    @contextlib.contextmanager
    def measure(
        self, activity: Activity, *, subject: str = "", tokens: int = 0, outcome: Spend = "used"
    ) -> Iterator[None]:
        """Charges the CPU seconds of this process that the block took; an exception makes the outcome "fault"."""
        start, seen = time.process_time(), outcome
        try:
            yield
        except BaseException:
            seen = "fault"
            raise
        finally:
            self.charge(activity, time.process_time() - start, tokens=tokens, subject=subject, outcome=seen)

    def busy(self, device: str = CORE) -> float:
        """Busy device-seconds since the last `idle`."""
        with self._lock:
            return self._busy.get(device, 0.0)

    def idle(
        self,
        wall_seconds: float,
        *,
        cores: int | None = None,
        machine: int | None = None,
        others: float = 0.0,
        device: str = CORE,
        subject: str = "",
    ) -> Entry:
        """Charges what was reserved and not used: `wall_seconds` x cores - busy seconds since the last call, or 0.

        Where `machine` (cores) is given, what `others` used of it in that time (busy seconds) was not reserved: all
        that is charged together never exceeds the machine's wall clock, unless more was used.
        """
        with self._lock:
            busy = self._busy.pop(device, 0.0)
        reserved = wall_seconds * (self.cores if cores is None else cores)
        if machine is not None:
            reserved = min(reserved, wall_seconds * machine - others)
        return self.charge("idle", max(0.0, reserved - busy), device=device, subject=subject)

    def _entry_of(
        self, turn: Turn, activity: Activity, device: str, line: str, stage: Stage | None, outcome: Spend
    ) -> Entry:
        usage = turn.usage
        if usage is None:
            device, seconds, dollars = f"unknown:{turn.model}", 0.0, None
            tokens = len(turn.context) + len(turn.output)
        else:
            seconds, tokens = usage.seconds, usage.prompt + usage.output
            dollars = self.book.price_usage(turn.model, usage)
            device = f"model:{turn.model}" if dollars is not None else device
        entry = Entry(
            id=turn_entry(turn.id), activity=activity, device=device, seconds=seconds, tokens=tokens, dollars=dollars,
            subject=turn.trace, line=line, stage=stage or self.stage, outcome=outcome, at=turn.at,
        )  # fmt: skip
        return self._priced(entry)

    def _priced(self, entry: Entry) -> Entry:
        return msgspec.structs.replace(entry, dollars=self.book.price(entry))

    def drain(self) -> list[Entry]:
        """The entries since the last call, oldest first; the caller writes them to the ledger."""
        with self._lock:
            pending, self._pending = self._pending, []
        return pending

    def undrain(self, entries: Sequence[Entry]) -> None:
        """Takes back what `drain` gave and could not be written; the next call gives it again."""
        with self._lock:
            self._pending[:0] = entries


def turn_entry(turn: str) -> str:
    """The id of the entry that pays for a turn."""
    return f"turn:{turn}"


def restate(entries: Iterable[Entry], outcome: Spend = "rejected", *, at: float, only: Spend = "used") -> list[Entry]:
    """Moves the `only` entries (idle excepted) to `outcome`: each is reversed and entered again, dated
    `at`. Returns the new entries, to be added to the ledger as they are.

    Ids are derived from the original's, so that restating twice adds nothing to a ledger that is idempotent by id.
    Entries that were themselves made by a restatement are left alone.
    """
    moved: list[Entry] = []
    for entry in entries:
        if entry.outcome != only or entry.activity == "idle" or entry.id.startswith(("reverse:", "restate:")):
            continue
        moved.append(
            msgspec.structs.replace(
                entry,
                id=f"reverse:{entry.id}",
                seconds=-entry.seconds,
                tokens=-entry.tokens,
                dollars=None if entry.dollars is None else -entry.dollars,
                at=at,
            )
        )
        moved.append(msgspec.structs.replace(entry, id=f"restate:{entry.id}", outcome=outcome, at=at))
    return moved


def outcome_of(trace: Trace) -> Spend:
    """What an attempt's spend became: "fault", "truncated" (a reply cut by its token limit) or "used"."""
    if trace.fault is not None:
        return "fault"
    return "truncated" if any(turn.finish == "length" for turn in trace.turns) else "used"
