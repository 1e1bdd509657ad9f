"""The price book: known prices by hand, unknown ones unpriced."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.economics.prices import PriceBook, load_book
from honed.errors import ConfigError
from honed.types import Entry, Usage

BOOK = """
basis = "list price"
[devices.cpu-core]
dollars_per_hour = 0.036
basis = "rented for a year"
[models."big"]
prompt = 1.0
cached = 0.1
output = 4.0
"""


def entry(device: str, seconds: float = 100.0, dollars: float | None = None) -> Entry:
    return Entry(id="e", activity="generate", device=device, seconds=seconds, dollars=dollars, at=0.0)


@pytest.fixture
def book(tmp_path: Path) -> PriceBook:
    path = tmp_path / "prices.toml"
    path.write_text(BOOK)
    return load_book(path)


def test_device_seconds_are_priced_by_the_hour(book: PriceBook) -> None:
    assert book.price(entry("cpu-core")) == pytest.approx(0.001)


def test_an_unknown_device_is_unpriced_and_not_free(book: PriceBook) -> None:
    assert book.price(entry("abacus")) is None


def test_what_has_its_own_dollars_keeps_them(book: PriceBook) -> None:
    assert book.price(entry("model:big", dollars=0.5)) == 0.5


def test_a_remote_call_is_priced_by_its_tokens(book: PriceBook) -> None:
    usage = Usage(prompt=3000, cached=1000, output=500, seconds=2.0)
    assert book.price_usage("big", usage) == pytest.approx((2000 * 1.0 + 1000 * 0.1 + 500 * 4.0) / 1e6)
    assert book.price_usage("bigger", usage) is None
    assert book.price_usage("big", None) is None


def test_the_default_book_names_its_basis_as_an_assumption() -> None:
    book = load_book()
    assert "assumption" in book.devices["cpu-core"].basis
    assert book.bases()["cpu-core"] == book.devices["cpu-core"].basis


@pytest.mark.parametrize("text", ["[devices.cpu-core]\ndollars_per_hour = 1.0", "[devices.x]\ndollars = 1\nbasis='b'"])
def test_a_price_without_basis_or_with_an_unknown_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError, match="devices"):
        load_book(tmp_path / "p.toml")
