"""The meter: entries, idle as the remainder, faults, and restating what a rejected candidate spent."""

from __future__ import annotations

import msgspec
import pytest

from honed.economics.meter import Meter, outcome_of, restate
from honed.economics.prices import DevicePrice, ModelPrice, PriceBook
from honed.economics.report import spend, total_dollars
from honed.types import Fault, Message, Sampling, Trace, Turn, Usage

BOOK = PriceBook(
    devices={"cpu-core": DevicePrice(dollars_per_hour=3.6, basis="test")},
    models={"remote": ModelPrice(prompt=1, cached=1, output=1)},
)


class FixedClock:
    def now(self) -> float:
        return 50.0

    async def sleep(self, seconds: float) -> None: ...


def turn(model: str = "m", usage: Usage | None = None, finish: str = "stop") -> Turn:
    reply = Message(role="assistant", content="hi")
    return Turn(id="u1", trace="t1", reply=reply, sampling=Sampling(), model=model, finish=finish, usage=usage, at=7.0)


@pytest.fixture
def meter() -> Meter:
    return Meter(BOOK, line="support", cores=2, clock=FixedClock())


def test_charge_prices_and_dates(meter: Meter) -> None:
    entry = meter.charge("train", 10.0, tokens=5, subject="run1", outcome="stale")
    assert (entry.dollars, entry.line, entry.stage, entry.at) == (pytest.approx(0.01), "support", "learn", 50.0)
    assert meter.drain() == [entry]
    assert meter.drain() == []


def test_an_unknown_device_stays_unpriced(meter: Meter) -> None:
    assert meter.charge("sync", 1.0, device="gpu").dollars is None


def test_idle_is_what_is_left_of_the_reservation(meter: Meter) -> None:
    meter.charge("generate", 3.0)
    meter.charge("train", 5.0)
    assert meter.busy() == 8.0
    assert meter.idle(10.0).seconds == pytest.approx(12.0)  # 10 s x 2 cores - 8
    assert meter.idle(10.0).seconds == pytest.approx(20.0)  # busy was counted once
    meter.charge("train", 100.0)
    assert meter.idle(1.0).seconds == 0.0


def test_others_use_what_is_then_not_reserved(meter: Meter) -> None:
    meter.charge("train", 3.0)
    assert meter.idle(10.0, machine=2, others=5.0).seconds == pytest.approx(12.0)  # 10 x 2 - 5 - 3
    assert meter.idle(10.0, cores=1, machine=4, others=5.0).seconds == pytest.approx(10.0)  # on the other cores
    assert meter.idle(10.0, machine=2, others=50.0).seconds == 0.0


def test_a_kept_turn_is_one_entry_and_each_lost_try_its_own(meter: Meter) -> None:
    usage = Usage(prompt=1, cached=0, output=1, seconds=1.0)
    one, again = turn(usage=usage), msgspec.structs.replace(turn(usage=usage), at=8.0)
    assert meter.charge_turn(one).id == meter.charge_turn(again).id == "turn:u1"
    assert len({meter.charge_turn(each, kept=False).id for each in (one, again, again)}) == 2


def test_a_turn_is_charged_by_its_usage(meter: Meter) -> None:
    entry = meter.charge_turn(turn(usage=Usage(prompt=30, cached=20, output=12, seconds=2.0)), stage="serve")
    assert (entry.tokens, entry.seconds, entry.subject, entry.stage) == (42, 2.0, "t1", "serve")
    assert entry.dollars == pytest.approx(0.002)


def test_unknown_usage_is_unpriced_and_a_remote_call_is_priced_by_token(meter: Meter) -> None:
    assert meter.charge_turn(turn()).dollars is None
    remote = meter.charge_turn(turn("remote", Usage(prompt=600_000, cached=0, output=400_000, seconds=9.0)))
    assert remote.dollars == pytest.approx(1.0)
    assert meter.busy() == 0.0


def test_a_trace_ends_used_truncated_or_as_a_fault(meter: Meter) -> None:
    usage = Usage(prompt=1, cached=0, output=1, seconds=1.0)
    whole = Trace(id="t1", origin="rollout", turns=(turn(usage=usage),), at=0.0)
    cut = Trace(id="t1", origin="rollout", turns=(turn(usage=usage, finish="length"),), at=0.0)
    fault = Fault(boundary="tool", kind="raised", message="x")
    broken = Trace(id="t1", origin="rollout", turns=(turn(usage=usage),), fault=fault, at=0.0)
    assert [outcome_of(trace) for trace in (whole, cut, broken)] == ["used", "truncated", "fault"]
    assert [entry.outcome for entry in meter.charge_trace(broken)] == ["fault"]


def test_measure_charges_cpu_seconds_and_faults(meter: Meter) -> None:
    with meter.measure("verify", subject="t1"):
        sum(i * i for i in range(100_000))
    with pytest.raises(RuntimeError), meter.measure("verify"):
        raise RuntimeError
    good, bad = meter.drain()
    assert good.seconds > 0
    assert (good.outcome, bad.outcome) == ("used", "fault")


def test_restating_moves_spend_and_keeps_the_sum(meter: Meter) -> None:
    meter.charge("train", 10.0, tokens=100, subject="v3")
    meter.charge("generate", 20.0, subject="v3", outcome="zero_variance")
    meter.charge("sync", 1.0, device="gpu")
    meter.idle(30.0)
    first = meter.drain()
    moved = restate(first, at=99.0)
    after = [*first, *moved]
    assert total_dollars(after) == pytest.approx(total_dollars(first))
    by = {(row.activity, row.outcome): row for row in spend(after)}
    assert by["train", "used"].dollars == pytest.approx(0.0)
    assert by["train", "used"].tokens == 0
    assert by["train", "rejected"].seconds == pytest.approx(10.0)
    assert ("generate", "rejected") not in by
    assert ("idle", "rejected") not in by
    assert {entry.at for entry in moved} == {99.0}
    assert by["sync", "used"].num_unpriced == 0
    assert by["sync", "rejected"].num_unpriced == 1


def test_restating_twice_adds_no_new_ids(meter: Meter) -> None:
    meter.charge("train", 10.0)
    first = meter.drain()
    moved = restate(first, at=1.0)
    again = restate([*first, *moved], at=2.0)
    assert {entry.id for entry in again} <= {entry.id for entry in moved}
