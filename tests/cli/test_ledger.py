"""`honed ledger`: spend, blind spots and what they bought, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
