"""The price book: what an hour of a device and a million tokens of somebody's model cost, and on what basis.

An unknown device or model has no price (None): its spend is counted as unpriced and never taken for 0. One book prices
a whole report, so that figures of different days are compared on one basis.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from honed.config import Settings, parse, read_toml
from honed.types import Entry, Usage

SECONDS_PER_HOUR = 3600.0
DEFAULT_BOOK = Path(__file__).with_name("prices.toml")


class DevicePrice(Settings):
    """A core or an accelerator, by the hour."""

    dollars_per_hour: float = Field(ge=0)
    """Dollars per device-hour, reserved or busy."""
    basis: str = Field(min_length=1)
    """Where the price comes from: owned, rented for a year, on demand, an assumption."""


class ModelPrice(Settings):
    """A remote model, in dollars per million tokens."""

    prompt: float = Field(ge=0)
    """Dollars per million prompt tokens that were not cached."""
    cached: float = Field(ge=0)
    """Dollars per million prompt tokens found in the provider's cache."""
    output: float = Field(ge=0)
    """Dollars per million sampled tokens."""
    basis: str = Field(default="list price", min_length=1)
    """Where the price comes from."""


class PriceBook(Settings):
    """Prices by device and by remote model; `[devices.NAME]` and `[models."NAME"]` tables in TOML."""

    basis: str = "unnamed"
    """The basis that all prices share, printed with every report."""
    devices: dict[str, DevicePrice] = {}
    """Dollars per hour of each device."""
    models: dict[str, ModelPrice] = {}
    """Dollars per million tokens of each remote model."""

    def price(self, entry: Entry) -> float | None:
        """Dollars of an entry: its device-seconds at the device's price; what it already says for a remote model.

        None (unpriced) where the book has no such device.
        """
        device = self.devices.get(entry.device)
        if device is None:
            return entry.dollars
        return entry.seconds / SECONDS_PER_HOUR * device.dollars_per_hour

    def price_usage(self, model: str, usage: Usage | None) -> float | None:
        """Dollars of one call to a remote model; None where the usage or the model's price is unknown."""
        price = self.models.get(model)
        if price is None or usage is None:
            return None
        fresh = usage.prompt - usage.cached
        return (fresh * price.prompt + usage.cached * price.cached + usage.output * price.output) / 1e6

    def bases(self) -> dict[str, str]:
        """The basis of each device and model, to be printed beside figures."""
        named: dict[str, DevicePrice | ModelPrice] = {**self.devices, **self.models}
        return {name: price.basis for name, price in named.items()}


def load_book(path: str | Path | None = None) -> PriceBook:
    """The book in `path`, or the one that ships with honed (an assumption, and labelled as one)."""
    source = DEFAULT_BOOK if path is None else Path(path)
    return parse(PriceBook, read_toml(source), source=str(source))
