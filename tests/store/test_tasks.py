import pytest

from honed.errors import NotFound, UserError
from honed.store import Store

from .nouns import task


def test_tasks_are_idempotent_by_id_and_keep_their_order_and_state(store: Store) -> None:
    assert store.tasks.put([task("b"), task("a")], "waiting", "a probe is due") == 2
    store.tasks.set_state("b", "always", "8 of 8")
    assert store.tasks.put([task("b"), task("c")]) == 1
    assert [one.id for one in store.tasks.list()] == ["b", "a", "c"]
    assert [store.tasks.state(id) for id in "bac"] == ["always", "waiting", "ready"]
    assert store.tasks.reason("b") == "8 of 8"


def test_list_filters(store: Store) -> None:
    store.tasks.put([task("a", suite="s", kind="refund"), task("b", split="holdout", source="trace9")])
    assert [one.id for one in store.tasks.list(split="holdout")] == ["b"]
    assert [one.id for one in store.tasks.list(suite="s")] == ["a"]
    assert [one.id for one in store.tasks.list(kind="refund", state="ready")] == ["a"]
    assert [one.id for one in store.tasks.list(source="trace9")] == ["b"]
    assert store.tasks.list(state="never") == []
    assert len(store.tasks.list(limit=1)) == 1
    assert store.tasks.counts() == {("", "holdout", "ready"): 1, ("refund", "train", "ready"): 1}


def test_get_and_find(store: Store) -> None:
    whole = task("a", spec={"order": [1, 2.5, None]}, weight=2.0)
    store.tasks.put([whole])
    assert store.tasks.get("a") == whole
    assert store.tasks.find(["a", "b"]) == {"a": whole}


def test_what_is_not_there_and_what_is_no_state(store: Store) -> None:
    for read in (store.tasks.get, store.tasks.state, store.tasks.reason):
        with pytest.raises(NotFound, match="'nothing'"):
            read("nothing")
    with pytest.raises(NotFound):
        store.tasks.set_state("nothing", "ready")
    with pytest.raises(UserError, match="'redy' is no state"):
        store.tasks.put([task()], "redy")
