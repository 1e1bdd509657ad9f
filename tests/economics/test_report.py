"""Figures of the report against hand-computed values, and the cases that must print no ratio."""

from __future__ import annotations

import math

import numpy as np
import pytest

from honed import codec
from honed.economics.prices import load_book
from honed.economics.report import (
    NO_GAIN,
    LedgerReport,
    ledger_report,
    loop_entries,
    payback,
    spend,
    token_cost,
    version_cost,
)
from honed.economics.success import ServedRequest, rate_interval, served_requests, success_cost
from honed.types import Entry, Message, Sampling, Span, SuiteResult, Trace, Turn


def entry(activity: str = "generate", dollars: float | None = 1.0, **changes: object) -> Entry:
    fields = {"id": "e", "device": "cpu-core", "seconds": 10.0, "at": 5.0, **changes}
    return Entry(activity=activity, dollars=dollars, **fields)


def suite(gain: float, low: float, high: float, num_tasks: int = 64) -> SuiteResult:
    return SuiteResult(
        suite="changed",
        role="target",
        gain=gain,
        low=low,
        high=high,
        baseline=0.2,
        candidate=0.2 + gain,
        num_tasks=num_tasks,
        num_clusters=num_tasks,
        p_value=0.001,
    )


def served(num: int, success: float, dollars: float = 0.01) -> list[ServedRequest]:
    good = round(num * success)
    return [ServedRequest(dollars=dollars, success=float(i < good), session=f"s{i}") for i in range(num)]


def test_shares_of_spend_add_to_one_and_unpriced_is_counted() -> None:
    rows = spend([entry(dollars=3.0), entry("idle", 1.0), entry(outcome="fault", dollars=4.0), entry("sync", None)])
    assert [(row.activity, row.outcome, row.dollars, row.share) for row in rows[:3]] == [
        ("generate", "fault", 4.0, 0.5),
        ("generate", "used", 3.0, 0.375),
        ("idle", "used", 1.0, 0.125),
    ]
    assert math.fsum(row.share for row in rows) == pytest.approx(1.0)
    assert rows[3].num_unpriced == 1


def test_an_empty_ledger_has_no_shares() -> None:
    assert spend([]) == ()


def test_tokens_cost_their_busy_and_their_full_price() -> None:
    entries = [
        entry(stage="serve", dollars=0.2, tokens=100_000, seconds=20.0),
        entry(stage="serve", dollars=0.1, tokens=900, seconds=10.0, outcome="fault"),
        entry("idle", 0.3, stage="serve", seconds=30.0),
        entry("train", 9.0),
    ]
    cost = token_cost(entries)
    assert cost.tokens == 100_000  # what was thrown away is cost and no delivery
    assert cost.busy_per_million == pytest.approx(3.0)
    assert cost.full_per_million == pytest.approx(6.0)
    assert cost.utilisation == pytest.approx(0.5)
    assert cost.full_per_million == pytest.approx(cost.busy_per_million / cost.utilisation)
    assert token_cost([entry("train", 9.0)]).busy_per_million is None


def test_dollars_per_success_run_over_all_requests() -> None:
    cost = success_cost(served(200, 0.5), "m@1")
    assert cost.dollars_per_success == pytest.approx(0.02)
    assert cost.successes_per_dollar == pytest.approx(50.0)
    assert cost.success_rate == pytest.approx(0.5)
    variance = 0.25 * 200 / 199 / 0.25  # constant cost: s_y^2 / ybar^2
    assert cost.high == pytest.approx(0.02 * math.exp(1.96 * math.sqrt(variance / 200)))
    assert cost.low == pytest.approx(0.02 * math.exp(-1.96 * math.sqrt(variance / 200)))


def test_too_few_sessions_have_no_interval() -> None:
    cost = success_cost(served(99, 0.5))
    assert (cost.low, cost.high) == (None, None)
    assert "too few" in cost.note
    assert "too few" in success_cost(served(200, 0.04)).note
    one_session = [ServedRequest(dollars=0.01, success=1.0, session="s") for _ in range(500)]
    assert success_cost(one_session).low is None


def test_no_success_gives_a_lower_bound_only() -> None:
    cost = success_cost(served(150, 0.0))
    assert cost.dollars_per_success is None
    assert cost.low == pytest.approx(0.01 * 150 / 3)
    assert cost.high is None


def test_requests_that_nobody_looked_at_keep_their_cost() -> None:
    unknown = [ServedRequest(dollars=0.01, success=None, session=f"u{i}") for i in range(200)]
    cost = success_cost([*served(200, 0.5), *unknown])
    assert cost.dollars == pytest.approx(4.0)
    assert cost.num_successes == pytest.approx(200.0)
    assert cost.dollars_per_success == pytest.approx(0.02)
    nobody = success_cost(unknown)
    assert (nobody.dollars_per_success, nobody.low, nobody.success_rate) == (None, None, None)
    assert "nobody looked" in nobody.note
    assert success_cost([]).note == "too few"


def test_the_interval_covers_the_true_price() -> None:
    rng, hits, runs = np.random.default_rng(0), 0, 300
    for _ in range(runs):
        rows = [
            ServedRequest(dollars=c, success=float(y), session=str(i))
            for i, (c, y) in enumerate(zip(rng.lognormal(0, 0.8, 150), rng.random(150) < 0.6, strict=True))
        ]
        cost = success_cost(rows)
        hits += cost.low <= math.exp(0.32) / 0.6 <= cost.high
    assert hits / runs >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / runs)


def test_intelligence_per_dollar_carries_the_gains_interval() -> None:
    cost = version_cost("m@2", "m@1", suite(0.4, 0.3, 0.5), [entry("train", 1.5), entry(dollars=0.5)])
    assert cost.dollars == 2.0
    assert (cost.points_per_dollar_low, cost.points_per_dollar, cost.points_per_dollar_high) == pytest.approx(
        (15, 20, 25)
    )
    assert cost.successes_per_dollar == pytest.approx(0.4 * 64 / 2)
    assert cost.successes_per_dollar_low == pytest.approx(0.3 * 64 / 2)
    assert cost.dollars_per_point == pytest.approx(0.05)
    assert (cost.dollars_per_point_low, cost.dollars_per_point_high) == pytest.approx((2 / 50, 2 / 30))
    assert cost.note == ""


@pytest.mark.parametrize("gain", [suite(0.1, -0.01, 0.2), suite(-0.2, -0.3, -0.1), suite(0.0, 0.0, 0.0)])
def test_no_gain_has_no_ratio_and_no_rank(gain: SuiteResult) -> None:
    cost = version_cost(
        "m@2", "m@1", gain, [entry()], before=success_cost(served(200, 0.5)), after=success_cost(served(200, 0.9))
    )
    assert cost.note == NO_GAIN
    assert cost.points_per_dollar is None
    assert cost.successes_per_dollar is None
    assert cost.payback_requests is None


def test_an_unpriced_turn_is_said_to_cost_more() -> None:
    assert "no price" in version_cost("m@2", "m@1", suite(0.4, 0.3, 0.5), [entry(), entry("sync", None)]).note
    nothing = version_cost("m@2", "m@1", suite(0.4, 0.3, 0.5), [entry("sync", None)])
    assert nothing.points_per_dollar is None


def test_payback_counts_requests() -> None:
    assert payback(2.0, value_of_success=0.02, gain=0.4, extra_per_request=0.0) == pytest.approx(250)
    assert payback(2.0, value_of_success=0.02, gain=0.1, extra_per_request=0.002) is None
    before, after = success_cost(served(200, 0.5)), success_cost(served(200, 0.9))
    cost = version_cost("m@2", "m@1", suite(0.4, 0.3, 0.5), [entry(dollars=2.0)], before=before, after=after)
    assert cost.payback_requests == pytest.approx(2.0 / (0.02 * 0.4))
    reach = 1.96 * math.sqrt((0.25 + 0.09) / 200)
    assert cost.payback_low == pytest.approx(2.0 / (0.02 * (0.4 + reach)))
    assert cost.payback_high == pytest.approx(2.0 / (0.02 * (0.4 - reach)))
    assert (cost.served_before, cost.served_after) == (before, after)


def test_a_promotion_answers_for_everything_since_the_last_one() -> None:
    entries = [
        entry(at=1.0),
        entry(at=3.0, outcome="rejected"),
        entry(at=4.0),
        entry(at=4.0, stage="serve"),
        entry(at=9.0),
        entry(at=4.0, line="other"),
    ]
    assert [e.at for e in loop_entries(entries, promoted_at=4.0, previous_at=1.0, line="")] == [3.0, 4.0]


def test_the_report_adds_up_and_is_json() -> None:
    entries = [entry(dollars=2.0), entry(outcome="stale", dollars=1.0), entry("idle", 0.5), entry("sync", None)]
    report = ledger_report(entries, load_book(), versions=[version_cost("m@1", "m@0", suite(0.4, 0.3, 0.5), entries)])
    assert (report.dollars, report.waste_dollars, report.idle_dollars, report.num_unpriced) == (3.5, 1.0, 0.5, 1)
    assert "idle is what the learner reserved" in report.basis
    assert "assumption" in report.bases["cpu-core"]
    assert codec.from_json(codec.to_json(report), LedgerReport) == report


def test_rate_interval_is_clopper_pearson() -> None:
    assert rate_interval(0, 10) == pytest.approx((0.0, 1 - 0.025**0.1))
    assert rate_interval(10, 10) == pytest.approx((0.025**0.1, 1.0))
    assert rate_interval(0, 0) == (0.0, 1.0)


def test_requests_carry_all_that_was_charged_to_them() -> None:
    def trace(id: str, version: str, **tags: str) -> Trace:
        turn = Turn(
            id=f"turn-{id}",
            trace=id,
            reply=Message(role="assistant", content="hi"),
            sampling=Sampling(),
            model="m",
            versions=(Span(version=version, count=1),),
            finish="stop",
            at=0.0,
        )
        return Trace(id=id, origin="production", turns=(turn,), tags=tags, at=0.0)

    entries = [
        entry(stage="serve", subject="a", dollars=0.1),
        entry("verify", 0.2, stage="serve", subject="turn-a"),
        entry(stage="serve", subject="b", dollars=0.4),
        entry(stage="learn", subject="a", dollars=9.0),
        entry(stage="serve", subject="c", dollars=None),
    ]
    traces = [trace("a", "m@1", session="s1"), trace("b", "m@2"), trace("c", "m@2"), trace("d", "m@2")]
    by_version = served_requests(traces, entries, {"a": 1.0}, factor=2.0)
    (first,) = by_version["m@1"]
    assert (first.dollars, first.success, first.session) == (pytest.approx(0.6), 1.0, "s1")
    assert [(request.dollars, request.success) for request in by_version["m@2"]] == [
        (0.8, None),
        (None, None),
        (None, None),
    ]


def test_tokens_per_success_are_of_all_tokens_and_the_successes() -> None:
    assert success_cost(served(200, 0.5), tokens=5_000).tokens_per_success == pytest.approx(50.0)
    assert success_cost(served(200, 0.0), tokens=5_000).tokens_per_success is None
    assert success_cost(served(200, 0.5)).tokens_per_success is None


def test_a_request_without_price_leaves_no_ratio() -> None:
    cost = success_cost([*served(200, 0.5), ServedRequest(dollars=None, success=1.0, session="x")], tokens=303)
    assert cost.tokens_per_success == pytest.approx(3.0)
    assert (cost.dollars_per_success, cost.successes_per_dollar, cost.num_unpriced) == (None, None, 1)
    assert cost.success_rate == pytest.approx(101 / 201)
    assert "no price" in cost.note
