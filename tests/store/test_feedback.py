from honed.store import Store
from honed.types import Captured, Message, Span

from .nouns import captured, said, trace


def spans(version: str) -> tuple[Span, ...]:
    return (Span(version="support@0", count=1), Span(version=version, count=1))


def test_feedback_is_idempotent_by_id_and_by_tenant_and_key(store: Store) -> None:
    assert store.feedback.add([said("f1", key="k", tenant="x")]) == 1
    assert store.feedback.add([said("f1")]) == 0
    assert store.feedback.add([said("f2", key="k", tenant="x", value=False)]) == 0
    assert store.feedback.add([said("f3", key="k", tenant="y"), said("f4"), said("f5")]) == 3, "no key, no clash"
    assert [row.id for row in store.feedback.of(["trace1"])] == ["f1", "f3", "f4", "f5"]
    assert store.feedback.of(["trace1"])[0].value is True, "the first stays"


def test_values_of_every_kind_come_back(store: Store) -> None:
    messages = (Message(role="assistant", content="sorry"),)
    rows = [
        said("f1", value=0.5, at=1.0),
        said("f2", kind="comment", value="too slow", at=2.0),
        said("f3", kind="correction", value=messages, at=3.0),
        said("f4", kind="demonstration", value=[{"role": "assistant", "content": "sorry"}], at=4.0),
        said("f5", kind="correction", value="no list of messages", at=5.0),
    ]
    store.feedback.add(rows)
    assert [row.value for row in store.feedback.list()] == [0.5, "too slow", messages, messages, "no list of messages"]


def test_of_can_be_held_to_a_tenant(store: Store) -> None:
    store.feedback.add([said("f1", tenant="x"), said("f2", "t1", tenant="y")])
    assert [row.id for row in store.feedback.of(["trace1", "t1"])] == ["f1", "f2"]
    assert [row.id for row in store.feedback.of(["trace1", "t1"], tenant="y")] == ["f2"]
    assert store.feedback.of([]) == []


def test_list_by_line_needs_the_target_and_finds_it_late(store: Store) -> None:
    store.feedback.add([said("f1", "t1", at=1.0), said("f2", "trace1", at=2.0, kind="comment", value="hm")])
    assert store.feedback.list("support") == []
    store.traces.capture([captured("t1")], "log", 1)
    assert [row.id for row in store.feedback.list("support")] == ["f1", "f2"]
    assert [row.id for row in store.feedback.list("support", since=2.0)] == ["f2"]
    assert [row.id for row in store.feedback.list("support", kind="comment")] == ["f2"]
    assert [row.id for row in store.feedback.list(newest_first=True, limit=1)] == ["f2"]
    assert store.feedback.list("other") == []


def test_live_joins_a_metric_with_the_version_that_answered(store: Store) -> None:
    store.feedback.add([said("early", "t1", False, at=1.0)])
    store.traces.capture(
        [
            captured("t1", "a", versions=spans("support@1")),
            captured("t2", "a", parent="t1", versions=spans("support@2")),
            captured("t3", "b", versions=spans("support@3")),
            Captured(feedback=said("of-trace", "a", True, at=2.0)),
            Captured(feedback=said("of-turn", "t3", 0.25, at=3.0)),
        ],
        "log",
        1,
    )
    assert store.feedback.live("support") == [
        ("a", "support@1", 0.0, 1.0),
        ("a", "support@2", 1.0, 2.0),
        ("b", "support@3", 0.25, 3.0),
    ]
    assert store.feedback.live("support", "support@2") == [("a", "support@2", 1.0, 2.0)]
    assert store.feedback.live("support", since=3.0) == [("b", "support@3", 0.25, 3.0)]
    assert store.feedback.live("other") == []


def test_the_latest_word_on_a_target_counts(store: Store) -> None:
    store.traces.capture([captured("t1")], "log", 1)
    store.feedback.add(
        [said("f1", "t1", True, at=5.0), said("f2", "t1", False, at=9.0), said("f3", "t1", True, at=7.0)]
    )
    store.feedback.add([said("f4", "t1", True, name="polite", at=99.0)])
    assert store.feedback.live("support") == [("trace1", "support@1", 0.0, 9.0)]
    assert store.feedback.live("support", name="polite") == [("trace1", "support@1", 1.0, 99.0)]


def test_live_counts_neither_strangers_nor_words_nor_practice(store: Store) -> None:
    store.traces.capture([captured("t1", tenant="x")], "log", 1)
    store.traces.put(trace("practice"))
    store.feedback.add(
        [
            said("stranger", "t1", tenant="y"),
            said("words", "t1", "great", tenant="x"),
            said("comment", "t1", True, kind="comment", tenant="x"),
            said("practice", "practice"),
        ]
    )
    assert store.feedback.live("support") == []
    store.feedback.add([said("own", "t1", tenant="x")])
    assert len(store.feedback.live("support")) == 1
