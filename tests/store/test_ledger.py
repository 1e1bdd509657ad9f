import pytest

from honed.errors import UserError
from honed.store import Store, Total

from .nouns import entry


def test_entries_are_idempotent_and_come_back(store: Store) -> None:
    rows = [entry("e1", at=2.0, dollars=0.5, tokens=7), entry("e2", at=1.0, stage="serve", subject="t1", line="other")]
    assert store.ledger.add(rows) == 2
    assert store.ledger.add(rows) == 0
    assert store.ledger.list() == [rows[1], rows[0]]
    assert store.ledger.list(line="support") == [rows[0]]
    assert store.ledger.list(stage="serve") == store.ledger.list(subject="t1") == [rows[1]]
    assert store.ledger.list(since=2.0) == [rows[0]]
    assert store.ledger.list(until=2.0) == store.ledger.list(limit=1) == [rows[1]]


def test_totals_count_the_unpriced_apart(store: Store) -> None:
    store.ledger.add(
        [
            entry("e1", seconds=1.0, dollars=0.25, tokens=10),
            entry("e2", seconds=2.0, dollars=None, tokens=20),
            entry("e3", seconds=4.0, dollars=0.5, outcome="stale"),
            entry("e4", seconds=8.0, dollars=None, activity="idle"),
            entry("e5", seconds=16.0, dollars=0.0, line="other"),
        ]
    )

    def total(group: dict[str, str], num: int, seconds: float, tokens: int, dollars: float | None, free: int) -> Total:
        return Total(group=group, num_entries=num, seconds=seconds, tokens=tokens, dollars=dollars, num_unpriced=free)

    assert store.ledger.totals("support") == [
        total({"activity": "idle", "outcome": "used"}, 1, 8.0, 0, None, 1),
        total({"activity": "train", "outcome": "stale"}, 1, 4.0, 0, 0.5, 0),
        total({"activity": "train", "outcome": "used"}, 2, 3.0, 30, 0.25, 1),
    ]
    assert store.ledger.totals(by=("line",)) == [
        total({"line": "other"}, 1, 16.0, 0, 0.0, 0),
        total({"line": "support"}, 4, 15.0, 30, 0.75, 2),
    ]
    assert store.ledger.totals(by=()) == [total({}, 5, 31.0, 30, 0.75, 2)]


def test_totals_refuse_a_column_that_is_none(store: Store) -> None:
    with pytest.raises(UserError, match="'seconds'"):
        store.ledger.totals(by=("seconds",))
