"""What a verified success costs in serving: all accepted requests, whatever became of them, with an interval.

The interval of a ratio of two sums is the delta method on its logarithm, with sessions as the random unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from scipy import stats

from honed.economics.meter import turn_entry
from honed.types import Entry, Noun, Trace

MIN_SESSIONS, MIN_SUCCESSES = 100, 10
TOO_FEW = "too few"


class ServedRequest(Noun, frozen=True, kw_only=True):
    """One accepted request: all that it cost (every try; None: unpriced), whether it succeeded (None: nobody looked),
    and its session."""

    dollars: float | None
    success: float | None
    session: str


class SuccessCost(Noun, frozen=True, kw_only=True):
    """Dollars per verified success over all requests, and its inverse; `low`, `high`: 95 %, None with `note` why.

    Without any success `low` is a one-sided 95 % bound and `dollars_per_success` None. `tokens` are what the version
    read and sampled in serving, its turns in conversations that another version ended included.
    """

    version: str = ""
    num_requests: int
    num_sessions: int
    num_successes: float
    success_rate: float | None
    dollars: float
    num_unpriced: int = 0
    dollars_per_success: float | None
    low: float | None
    high: float | None
    successes_per_dollar: float | None
    tokens: int | None = None
    tokens_per_success: float | None = None
    note: str = ""


def served_requests(
    traces: Iterable[Trace], entries: Iterable[Entry], successes: Mapping[str, float], *, factor: float = 1.0
) -> dict[str, list[ServedRequest]]:
    """Served conversations by the version that answered last, each with everything that the ledger charged to it.

    `entries` are serving's, charged to a trace or to one of its turns; `successes` maps trace ids to what was found
    (absent: nobody looked). `factor` turns busy into full dollars (full_dollars / busy_dollars of the token cost). A
    request with an unpriced entry, or with none, has no price. The session is the tag "session", else the trace.
    """
    spent: dict[str, list[float | None]] = {}
    for entry in entries:
        if entry.stage == "serve":
            spent.setdefault(entry.subject, []).append(entry.dollars)
    by_version: dict[str, list[ServedRequest]] = {}
    for trace in traces:
        costs = [cost for name in (trace.id, *(turn.id for turn in trace.turns)) for cost in spent.get(name, [])]
        priced = [cost for cost in costs if cost is not None]
        spans = [span for turn in trace.turns for span in turn.versions]
        request = ServedRequest(
            dollars=factor * math.fsum(priced) if costs and len(priced) == len(costs) else None,
            success=successes.get(trace.id),
            session=trace.tags.get("session", trace.id),
        )
        by_version.setdefault(spans[-1].version if spans else "", []).append(request)
    return by_version


def served_tokens(traces: Iterable[Trace], entries: Iterable[Entry]) -> dict[str, int]:
    """Tokens that each version read and sampled in serving, from the entries of the turns that it answered itself."""
    answered = {
        turn_entry(turn.id): turn.versions[-1].version if turn.versions else ""
        for trace in traces
        for turn in trace.turns
    }
    tokens: dict[str, int] = {}
    for entry in entries:
        if entry.stage == "serve" and (version := answered.get(entry.id)) is not None:
            tokens[version] = tokens.get(version, 0) + entry.tokens
    return tokens


def success_cost(requests: Sequence[ServedRequest], version: str = "", *, tokens: int | None = None) -> SuccessCost:
    """Dollars per verified success with a 95 % interval, sessions as the random unit.

    r = sum cost / sum y; V = s_c^2/(m c^2) + s_y^2/(m y^2) - 2 s_cy/(m c y) over m sessions (c, y: means);
    r exp(+- 1.96 sqrt V). Fewer than 100 sessions or 10 successes: no interval; a request without price: no
    ratio. Requests that nobody looked at count with their cost; the successes seen are scaled up by the share looked
    at, right when that was drawn at random. `tokens` are what the version served (`served_tokens`).
    """
    known = [request for request in requests if request.success is not None]
    scale = len(requests) / len(known) if known else 0.0
    sums: dict[str, list[float]] = {}
    for request in requests:
        pair = sums.setdefault(request.session, [0.0, 0.0])
        pair[0] += request.dollars or 0.0
        pair[1] += scale * (request.success or 0.0)
    table = np.array(list(sums.values())).reshape(-1, 2)
    dollars, successes = (float(value) for value in table.sum(axis=0))
    ratio = dollars / successes if successes > 0 else None
    unpriced = sum(request.dollars is None for request in requests)
    each = tokens / successes if tokens is not None and successes > 0 else None
    if unpriced:
        cost = _unpriced(version, requests, len(table), successes, dollars, unpriced)
        return msgspec.structs.replace(cost, tokens=tokens, tokens_per_success=each)
    low, high, note = (
        _success_interval(table, ratio, sum(request.success or 0.0 for request in known))
        if known or not requests
        else (None, None, "nobody looked at any request")
    )
    return SuccessCost(
        version=version,
        num_requests=len(requests),
        num_sessions=len(table),
        num_successes=successes,
        success_rate=successes / len(requests) if known else None,
        dollars=dollars,
        dollars_per_success=ratio,
        low=low,
        high=high,
        successes_per_dollar=successes / dollars if dollars > 0 and known else None,
        tokens=tokens,
        tokens_per_success=each,
        note=note,
    )


def rate_interval(successes: float, num: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of a success rate (Clopper and Pearson 1934); (0, 1) where nothing was seen."""
    if num <= 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = float(stats.beta.ppf(tail, successes, num - successes + 1)) if successes > 0 else 0.0
    high = float(stats.beta.isf(tail, successes + 1, num - successes)) if successes < num else 1.0
    return low, high


def _success_interval(table: np.ndarray, ratio: float | None, seen: float) -> tuple[float | None, float | None, str]:
    sessions = len(table)
    if ratio is None:
        bound = float(table[:, 0].sum()) / 3 if sessions else None
        return bound, None, "no success: a lower bound" if sessions else TOO_FEW
    if sessions < MIN_SESSIONS or seen < MIN_SUCCESSES or ratio == 0:
        return None, None, f"{TOO_FEW} ({sessions} sessions, {seen:g} successes) for an interval"
    (cost, success), spread = table.mean(axis=0), np.cov(table.T, ddof=1)
    variance = spread[0, 0] / cost**2 + spread[1, 1] / success**2 - 2 * spread[0, 1] / (cost * success)
    reach = 1.96 * math.sqrt(max(0.0, float(variance)) / sessions)
    return ratio * math.exp(-reach), ratio * math.exp(reach), ""


def _unpriced(
    version: str, requests: Sequence[ServedRequest], sessions: int, successes: float, dollars: float, unpriced: int
) -> SuccessCost:
    """A figure without ratio: what has no price is never taken for 0."""
    return SuccessCost(
        version=version,
        num_requests=len(requests),
        num_sessions=sessions,
        num_successes=successes,
        success_rate=successes / len(requests) if any(r.success is not None for r in requests) else None,
        dollars=dollars,
        num_unpriced=unpriced,
        dollars_per_success=None,
        low=None,
        high=None,
        successes_per_dollar=None,
        note=f"{unpriced} of {len(requests)} requests have no price",
    )
