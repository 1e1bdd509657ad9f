"""`honed ledger`: spend, blind spots and what they bought, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from honed.cli.ledger import _version
from honed.economics.report import version_cost
from honed.economics.success import ServedRequest, success_cost
from honed.types import Entry, SuiteResult

from .conftest import Run

Read = Callable[..., Any]


@pytest.mark.usefixtures("store")
def test_the_ledger_is_told_with_what_has_no_price(run: Run) -> None:
    text = run("ledger").stdout
    assert "learn: 0 generated tokens to divide the cost by" in text
    assert "spent $0.500000" in text
    assert "1 entry without a price: the sums are too small" in text
    assert "support@1: held-out gain over support@0 +40.0 points [+20.0, +60.0]" in text
    assert "support@0: 1 request, success 0.0 %, no price of a success" in text


@pytest.mark.usefixtures("store")
def test_the_ledger_has_its_fields_as_json(read: Read) -> None:
    told = read("ledger")
    assert (told["dollars"], told["num_entries"], told["num_unpriced"]) == (0.5, 2, 1)
    assert told["spend"][0]["activity"] == "train"
    (cost,) = told["versions"]
    assert (cost["version"], cost["parent"], cost["gain"]) == ("support@1", "support@0", 0.4)
    assert {row["version"] for row in told["successes"]} == {"support@0", "support@1"}


def test_an_empty_ledger_is_said(run: Run) -> None:
    assert "Nothing was spent yet." in run("ledger").stdout


def test_a_version_is_told_with_what_a_dollar_bought_before_and_after_and_its_tokens() -> None:
    gain = SuiteResult(
        suite="refunds", role="target", gain=0.4, low=0.3, high=0.5, baseline=0.2, candidate=0.6, num_tasks=64,
        num_clusters=64, p_value=0.001,
    )  # fmt: skip
    turn = Entry(id="e", activity="train", device="cpu-core", seconds=1.0, dollars=2.0, at=1.0)
    asked = [ServedRequest(dollars=0.01, success=float(at < 100), session=f"s{at}") for at in range(200)]
    before = success_cost(asked[50:], "m@1", tokens=5_000)
    after = success_cost(asked, "m@2", tokens=30_000)
    text = _version(version_cost("m@2", "m@1", gain, [turn], before=before, after=after))
    head, gained, one, two = text.splitlines()
    assert "m@2: held-out gain over m@1 +40.0 points [+30.0, +50.0]" in head
    assert "12.8 of 64 held-out successes [9.6, 16] (95 %), 20 points" in gained
    assert "served by m@1: 33.33 verified successes per dollar [" in one
    assert one.endswith("100 tokens per success")
    assert "served by m@2: 50 verified successes per dollar [" in two
    assert two.endswith("300 tokens per success")
