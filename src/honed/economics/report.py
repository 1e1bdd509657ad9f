"""What it cost and what it bought: pure functions from ledger entries, outcomes and verdicts to figures.

Every figure carries its interval or says why it has none. Dollars are of one price basis; what has no price is counted
beside the sum and never taken for 0. Sums are divided, ratios are never averaged.

The cost of a point follows from the gain's own interval, since a turn's spend is known exactly. What a success costs in
serving is economics/success.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from honed.economics.prices import PriceBook
from honed.economics.success import SuccessCost
from honed.types import Entry, Noun, SuiteResult

IDLE_BASIS = "idle is what the learner reserved (its threads) and neither it nor serving used"
NO_GAIN = "not distinguishable from no gain"


class SpendRow(Noun, frozen=True, kw_only=True):
    """Spend of one activity with one outcome; `share` is of all priced dollars, `num_unpriced` its blind spot."""

    activity: str
    outcome: str
    stage: str
    seconds: float
    tokens: int
    dollars: float
    share: float
    num_unpriced: int


class TokenCost(Noun, frozen=True, kw_only=True):
    """Dollars per million tokens: busy (generation only) and full (idle and the stage's rest); None without tokens."""

    stage: str
    tokens: int
    busy_dollars: float
    full_dollars: float
    busy_per_million: float | None
    full_per_million: float | None
    utilisation: float | None
    num_unpriced: int


class VersionCost(Noun, frozen=True, kw_only=True):
    """The price of a version's intelligence: held-out successes that a dollar of post-training bought.

    `gain`, `low`, `high`: held-out success against its parent, as a rate with a 95 % interval, on `num_tasks` tasks.
    `basis` "gate" is the estimate that promoted it (chosen because it was high, hence optimistic), "confirmed" a fresh
    one. `dollars` is all of the turn: curation, practice, verifying, training, sync, gate, idle, and every candidate
    since the last promotion. Per dollar: `successes` = gain x num_tasks / dollars, `points` = 100 gain / dollars.
    Where the gain can't be told from none there is no ratio, and `note` says so.
    """

    version: str
    parent: str
    gain: float
    low: float
    high: float
    num_tasks: int
    basis: Literal["gate", "confirmed"] = "gate"
    dollars: float
    num_unpriced: int = 0
    successes_per_dollar: float | None = None
    successes_per_dollar_low: float | None = None
    successes_per_dollar_high: float | None = None
    points_per_dollar: float | None = None
    points_per_dollar_low: float | None = None
    points_per_dollar_high: float | None = None
    dollars_per_point: float | None = None
    dollars_per_point_low: float | None = None
    dollars_per_point_high: float | None = None
    payback_requests: float | None = None
    payback_low: float | None = None
    payback_high: float | None = None
    served_before: SuccessCost | None = None
    served_after: SuccessCost | None = None
    note: str = ""


class LedgerReport(Noun, frozen=True, kw_only=True):
    """Everything `honed ledger` and the report page show, on one price basis."""

    basis: str
    bases: dict[str, str]
    dollars: float
    waste_dollars: float
    idle_dollars: float
    num_entries: int
    num_unpriced: int
    spend: tuple[SpendRow, ...]
    tokens: tuple[TokenCost, ...]
    successes: tuple[SuccessCost, ...] = ()
    versions: tuple[VersionCost, ...] = ()


def spend(entries: Iterable[Entry]) -> tuple[SpendRow, ...]:
    """Seconds, tokens and dollars by stage, activity and outcome, dearest first; the shares add to 1 (or are all 0)."""
    rows: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        rows.setdefault((entry.stage, entry.activity, entry.outcome), []).append(entry)
    sums = {key: total_dollars(group) for key, group in rows.items()}
    everything = math.fsum(dollars for dollars, _ in sums.values())
    table = [
        SpendRow(
            stage=stage,
            activity=activity,
            outcome=outcome,
            seconds=math.fsum(entry.seconds for entry in group),
            tokens=sum(entry.tokens for entry in group),
            dollars=sums[stage, activity, outcome][0],
            share=sums[stage, activity, outcome][0] / everything if everything > 0 else 0.0,
            num_unpriced=sums[stage, activity, outcome][1],
        )
        for (stage, activity, outcome), group in rows.items()
    ]
    return tuple(sorted(table, key=lambda row: (-row.dollars, row.stage, row.activity, row.outcome)))


def total_dollars(entries: Iterable[Entry]) -> tuple[float, int]:
    """The sum of what has a price, and how many entries have none (a reversal takes one away)."""
    entries = list(entries)
    priced = math.fsum(entry.dollars for entry in entries if entry.dollars is not None)
    unpriced = sum(-1 if entry.id.startswith("reverse:") else 1 for entry in entries if entry.dollars is None)
    return priced, unpriced


def token_cost(entries: Iterable[Entry], stage: Literal["serve", "learn"] = "serve") -> TokenCost:
    """Dollars per million tokens of a stage. Aborted or rejected work is cost; only used tokens count as delivered.

    utilisation = busy device-seconds of everything but idle / all device-seconds, so full = busy / utilisation when
    generation is the only busy activity.
    """
    mine = [entry for entry in entries if entry.stage == stage]
    tokens = sum(entry.tokens for entry in mine if entry.activity == "generate" and entry.outcome == "used")
    busy, _ = total_dollars(entry for entry in mine if entry.activity == "generate")
    full, unpriced = total_dollars(mine)
    seconds = math.fsum(entry.seconds for entry in mine)
    idle = math.fsum(entry.seconds for entry in mine if entry.activity == "idle")
    return TokenCost(
        stage=stage,
        tokens=tokens,
        busy_dollars=busy,
        full_dollars=full,
        busy_per_million=1e6 * busy / tokens if tokens else None,
        full_per_million=1e6 * full / tokens if tokens else None,
        utilisation=(seconds - idle) / seconds if seconds > 0 else None,
        num_unpriced=unpriced,
    )


def version_cost(
    version: str,
    parent: str,
    gain: SuiteResult,
    turn: Iterable[Entry],
    *,
    basis: Literal["gate", "confirmed"] = "gate",
    before: SuccessCost | None = None,
    after: SuccessCost | None = None,
    value_of_success: float | None = None,
) -> VersionCost:
    """Intelligence per dollar of a version: its held-out `gain` against the dollars of the turn that made it.

    `turn` are the learn entries since the last promotion, those of rejected candidates included (`loop_entries`).
    `before` and `after` are what the parent and the version cost per success while serving: they give the payback,
    with `value_of_success` dollars for one more success (default: today's price of one, the parent's).
    """
    dollars, unpriced = total_dollars(turn)
    cost = VersionCost(
        version=version,
        parent=parent,
        gain=gain.gain,
        low=gain.low,
        high=gain.high,
        num_tasks=gain.num_tasks,
        basis=basis,
        dollars=dollars,
        num_unpriced=unpriced,
        served_before=before,
        served_after=after,
    )
    if gain.gain <= 0 or gain.low <= 0:
        return _with(cost, note=NO_GAIN)
    if dollars <= 0:
        return _with(cost, note="nothing of its turn has a price")
    mean, low, high = (value / dollars for value in (gain.gain, gain.low, gain.high))
    cost = _with(
        cost,
        successes_per_dollar=mean * gain.num_tasks,
        successes_per_dollar_low=low * gain.num_tasks,
        successes_per_dollar_high=high * gain.num_tasks,
        points_per_dollar=100 * mean,
        points_per_dollar_low=100 * low,
        points_per_dollar_high=100 * high,
        dollars_per_point=0.01 / mean,
        dollars_per_point_low=0.01 / high,
        dollars_per_point_high=0.01 / low,
        note="" if not unpriced else f"{unpriced} entries of its turn have no price: it cost more than this",
    )
    return _with(cost, **_payback(cost, value_of_success))


def payback(dollars: float, value_of_success: float, gain: float, extra_per_request: float) -> float | None:
    """Requests after which a turn has paid for itself: N* = C / b, b = v dp - dkappa; None where b <= 0 (never)."""
    worth = value_of_success * gain - extra_per_request
    return dollars / worth if worth > 0 else None


def loop_entries(
    entries: Iterable[Entry], promoted_at: float, previous_at: float = 0.0, line: str | None = None
) -> list[Entry]:
    """The learn entries that a promotion must answer for: all of (previous promotion, this one], rejected ones too."""
    return [
        entry
        for entry in entries
        if entry.stage == "learn" and previous_at < entry.at <= promoted_at and line in (None, entry.line)
    ]


def ledger_report(
    entries: Sequence[Entry],
    book: PriceBook,
    *,
    successes: Sequence[SuccessCost] = (),
    versions: Sequence[VersionCost] = (),
) -> LedgerReport:
    """Joins the figures. Waste is what was spent with any outcome but "used"; idle is counted on its own."""
    dollars, unpriced = total_dollars(entries)
    return LedgerReport(
        basis=f"{book.basis}; {IDLE_BASIS}",
        bases=book.bases(),
        dollars=dollars,
        waste_dollars=total_dollars(e for e in entries if e.outcome != "used" and e.activity != "idle")[0],
        idle_dollars=total_dollars(e for e in entries if e.activity == "idle")[0],
        num_entries=len(entries),
        num_unpriced=unpriced,
        spend=spend(entries),
        tokens=tuple(
            token_cost(entries, stage) for stage in ("serve", "learn") if any(e.stage == stage for e in entries)
        ),
        successes=tuple(successes),
        versions=tuple(versions),
    )


def _payback(cost: VersionCost, value: float | None) -> Mapping[str, float | None]:
    before, after = cost.served_before, cost.served_after
    if before is None or after is None or not before.num_requests or not after.num_requests:
        return {}
    value = before.dollars_per_success if value is None else value
    if value is None or before.success_rate is None or after.success_rate is None:
        return {}
    extra = after.dollars / after.num_requests - before.dollars / before.num_requests
    gain = after.success_rate - before.success_rate
    reach = 1.96 * math.sqrt(
        sum(
            side.success_rate * (1 - side.success_rate) / side.num_sessions
            for side in (before, after)
            if side.success_rate
        )
    )
    return {
        "payback_requests": payback(cost.dollars, value, gain, extra),
        "payback_low": payback(cost.dollars, value, gain + reach, extra),
        "payback_high": payback(cost.dollars, value, gain - reach, extra),
    }


def _with(cost: VersionCost, **changes: object) -> VersionCost:
    return msgspec.structs.replace(cost, **changes)
