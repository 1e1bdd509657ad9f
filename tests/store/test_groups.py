import pytest

from honed.errors import NotFound, Refused
from honed.store import Store
from honed.types import Group, Score

from .nouns import trace, turn


def group(id: str, *traces: str) -> Group:
    return Group(id=id, task="task1", traces=tuple(trace(one, score=Score(value=1.0)) for one in traces))


def test_groups_come_back_whole_and_in_order(store: Store) -> None:
    first, second = group("g1", "b", "a"), group("g2", "c")
    assert store.groups.put("run", 1, 0, second)
    assert store.groups.put("run", 0, 3, first)
    assert store.groups.list("run") == [(0, 3, first), (1, 0, second)]
    assert store.groups.list("run", step=1) == [(1, 0, second)]
    assert store.groups.list("other") == []
    assert (store.groups.count("run"), store.groups.count("run", "task1"), store.groups.count("run", "x")) == (2, 2, 0)


def test_the_first_group_of_a_place_stays(store: Store) -> None:
    assert store.groups.put("run", 0, 0, group("g1", "a"))
    assert not store.groups.put("run", 0, 0, group("g1", "a"))
    assert not store.groups.put("run", 0, 0, group("g2", "b"))
    assert [found.id for _, _, found in store.groups.list("run")] == ["g1"]
    with pytest.raises(NotFound):
        store.traces.get("b")


def test_a_group_that_cannot_be_stored_whole_is_not_stored(store: Store) -> None:
    broken = Group(id="g", task="task1", traces=(trace("a"), trace("b", turns=(turn("t", "elsewhere"),))))
    with pytest.raises(Refused):
        store.groups.put("run", 0, 0, broken)
    assert store.groups.list("run") == []
    assert store.traces.count() == 0
