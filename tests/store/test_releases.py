import pytest

from honed.errors import Refused
from honed.store import Store

from .nouns import release


def test_the_last_committed_release_serves_whatever_its_clock_says(store: Store) -> None:
    assert store.releases.current("support") is None
    store.releases.put(release("r1", "support@1", at=9.0))
    store.releases.put(release("r2", "support@2", at=1.0, previous="support@1"))
    store.releases.put(release("r1", "support@1", at=9.0))
    store.releases.put(release("r3", "other@1", line="other"))
    assert store.releases.current("support") == release("r2", "support@2", at=1.0, previous="support@1")
    assert [one.id for one in store.releases.list("support")] == ["r1", "r2"]
    assert [one.id for one in store.releases.list()] == ["r1", "r2", "r3"]


def test_of_two_writers_one_is_refused(store: Store) -> None:
    store.releases.put(release("r1", "support@1"))
    store.releases.put(release("r2", "support@2"), replaces="support@1")
    store.releases.put(release("r2", "support@2"), replaces="support@1")
    with pytest.raises(Refused, match="served by support@2, not by support@1"):
        store.releases.put(release("r3", "support@3"), replaces="support@1")
    with pytest.raises(Refused, match="served by nothing"):
        store.releases.put(release("r4", "new@1", line="new"), replaces="new@0")
    assert [one.id for one in store.releases.list()] == ["r1", "r2"]


def test_replicas_acknowledge(store: Store) -> None:
    store.releases.ack("engine-b", "r1", "support@1")
    store.releases.ack("engine-a", "r1", "support@0")
    store.releases.ack("engine-a", "r1", "support@1")
    assert store.releases.acks("r1") == {"engine-a": "support@1", "engine-b": "support@1"}
    assert store.releases.acks("r2") == {}
