import struct

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from honed import codec
from honed.clock import new_id
from honed.errors import CorruptData, NotFound, Refused
from honed.store import Store, open_store
from honed.types import Captured, Fault, Message, Score, Span, Tool, ToolCall, Trace, Turn, Usage

from .nouns import captured, said, trace, turn

TOOL = Tool(name="track", description="finds an order", parameters={"type": "object", "properties": {}})


def single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_capture_makes_the_trace_on_its_first_turn_and_appends_the_next(store: Store) -> None:
    first = captured("t1", at=10.0)
    second = captured("t2", parent="t1", at=11.0)
    assert store.traces.capture([first], "log", 100) == 1
    assert store.traces.capture([second], "log", 200) == 1
    found = store.traces.get("trace1")
    assert found == Trace(id="trace1", origin="production", line="support", at=10.0, turns=(first.turn, second.turn))
    assert store.traces.offset("log") == 200


def test_replaying_a_log_changes_nothing(store: Store) -> None:
    records = [captured("t1"), captured("t2", parent="t1"), Captured(feedback=said("f1", key="k"))]
    assert store.traces.capture(records, "log", 300) == 3
    before = store.traces.get("trace1"), store.feedback.list()
    assert store.traces.capture(records[:2], "log", 200) == 0
    assert store.traces.capture(records, "log", 300) == 0
    assert (store.traces.get("trace1"), store.feedback.list()) == before
    assert store.traces.offset("log") == 300, "an offset never moves back"


def test_a_turn_that_is_twice_in_one_batch_is_stored_once(store: Store) -> None:
    assert store.traces.capture([captured("t1"), captured("t1")], "log", 1) == 1
    assert len(store.traces.get("trace1").turns) == 1


def test_offsets_are_kept_by_log(store: Store) -> None:
    store.traces.capture([], "a", 5)
    assert (store.traces.offset("a"), store.traces.offset("b")) == (5, 0)


def test_a_batch_that_fails_leaves_neither_rows_nor_offset(store: Store) -> None:
    broken = captured("t2", at=float("nan"))
    with pytest.raises(Exception, match="NOT NULL"):
        store.traces.capture([captured("t1"), broken], "log", 100)
    assert store.traces.count() == 0
    assert store.traces.offset("log") == 0


def test_capture_keeps_tools_that_come_after_the_first_turn(store: Store) -> None:
    late = Captured(turn=turn("t2", tools=codec.tools_digest((TOOL,))), tools=(TOOL,), line="support")
    store.traces.capture([captured("t1")], "log", 1)
    store.traces.capture([late], "log", 2)
    found = store.traces.get("trace1")
    assert found.tools == (TOOL,)
    assert store.traces.tools(found.turns[1].tools) == (TOOL,)
    assert store.traces.tools("") == ()
    with pytest.raises(NotFound):
        store.traces.tools("nothing")


def test_capture_after_put_does_not_undo_the_score(store: Store) -> None:
    scored = trace(turns=(turn("t1"),), score=Score(value=1.0))
    store.traces.put(scored)
    store.traces.capture([captured("t1"), captured("t2", parent="t1")], "log", 1)
    found = store.traces.get("trace1")
    assert (found.score, found.origin, [t.id for t in found.turns]) == (scored.score, "rollout", ["t1", "t2"])


def test_put_brings_a_captured_trace_up_to_date(store: Store) -> None:
    store.traces.capture([captured("t1")], "log", 1)
    fault = Fault(boundary="verifier", kind="timeout", message="60 seconds")
    store.traces.put(trace(turns=(turn("t1"), turn("t2", parent="t1")), fault=fault, signals=("odd", "empty")))
    found = store.traces.get("trace1")
    assert (found.fault, found.signals, len(found.turns)) == (fault, ("odd", "empty"), 2)


def test_put_refuses_a_turn_of_another_trace(store: Store) -> None:
    with pytest.raises(Refused, match="belongs to the trace 'elsewhere'"):
        store.traces.put(trace(turns=(turn("t1", "elsewhere"),)))


def test_logprobs_come_back_as_the_nearest_float32(store: Store) -> None:
    store.traces.put(trace(turns=(turn("t1", logprobs=(-0.1, float("-inf")), raw_logprobs=(-1e-8, -3.0)),)))
    found = store.traces.turn("t1")
    assert found.logprobs == (single(-0.1), float("-inf"))
    assert found.raw_logprobs == (single(-1e-8), -3.0)


def test_path_walks_a_branch_root_first(store: Store) -> None:
    store.traces.capture([captured("a"), captured("b", parent="a"), captured("side", parent="a")], "log", 1)
    store.traces.capture([captured("c", parent="b")], "log", 2)
    assert [t.id for t in store.traces.path("c")] == ["a", "b", "c"]
    assert [t.id for t in store.traces.path("side")] == ["a", "side"]


def test_path_with_a_missing_ancestor_is_not_found(store: Store) -> None:
    store.traces.capture([captured("b", parent="a")], "log", 1)
    with pytest.raises(NotFound, match="'a'"):
        store.traces.path("b")


def test_path_that_loops_ends(store: Store) -> None:
    store.traces.capture([captured("a", parent="a")], "log", 1)
    with pytest.raises(NotFound):
        store.traces.path("a")


@pytest.mark.parametrize("read", ["get", "turn", "path"])
def test_unknown_ids_are_not_found(store: Store, read: str) -> None:
    with pytest.raises(NotFound, match="'nothing'"):
        getattr(store.traces, read)("nothing")


def test_list_filters_and_sorts(store: Store) -> None:
    store.traces.put(trace("a", at=1.0, tenant="x", task="task1", signals=("odd",)))
    store.traces.put(trace("b", at=2.0, tenant="y", line="other"))
    store.traces.put(trace("c", at=3.0, origin="eval", signals=("odd", "empty")))

    def ids(**filters: object) -> list[str]:
        found = [one.id for one in store.traces.list(**filters)]  # type: ignore[arg-type]
        if "limit" not in filters and "newest_first" not in filters:
            assert store.traces.count(**filters) == len(found)  # type: ignore[arg-type]
        return found

    assert ids() == ["c", "b", "a"]
    assert ids(newest_first=False) == ["a", "b", "c"]
    assert ids(limit=1) == ["c"]
    assert ids(tenant="") == ["c"], "a tenant is exact, the empty one too"
    assert ids(tenant="x") == ["a"]
    assert ids(line="other") == ["b"]
    assert ids(origin="eval") == ["c"]
    assert ids(task="task1") == ["a"]
    assert ids(signal="odd") == ["c", "a"]
    assert ids(signal="empty") == ["c"]
    assert ids(since=2.0) == ["c", "b"]
    assert ids(until=2.0) == ["a"]
    assert [one.turns for one in store.traces.list(with_turns=False)] == [(), (), ()]


def test_list_goes_beyond_one_chunk_of_ids(store: Store) -> None:
    store.traces.capture([captured(f"t{i}", f"trace{i:04}") for i in range(1200)], "log", 1)
    found = store.traces.list(limit=None)
    assert len(found) == 1200
    assert all(len(one.turns) == 1 for one in found)


def test_set_signals_replaces(store: Store) -> None:
    store.traces.put(trace(signals=("odd",)))
    store.traces.set_signals("trace1", ["empty", "repeated", "empty"])
    assert store.traces.get("trace1").signals == ("empty", "repeated")
    with pytest.raises(NotFound):
        store.traces.set_signals("nothing", [])


def test_a_damaged_turn_is_named(store: Store) -> None:
    store.traces.capture([captured("t1")], "log", 1)
    database = sa.create_engine(f"sqlite:///{store.root / 'honed.db'}")
    with database.begin() as connection:
        connection.execute(sa.text("UPDATE turns SET output = substr(output, 1, length(output) - 1)"))
    with pytest.raises(CorruptData, match="turn 't1' is damaged"):
        store.traces.get("trace1")


ids = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.none() | words,
    tool_calls=st.lists(st.builds(ToolCall, id=words, name=words, arguments=words), max_size=2).map(tuple),
)
turns = st.builds(
    turn,
    st.just("turn"),
    parent=st.none() | words,
    added=st.lists(messages, max_size=2).map(tuple),
    context=st.lists(ids, max_size=9).map(tuple),
    reply=messages,
    output=st.lists(ids, max_size=9).map(tuple),
    logprobs=st.lists(floats, max_size=9).map(tuple),
    raw_logprobs=st.lists(floats, max_size=9).map(tuple),
    versions=st.lists(st.builds(Span, version=words, count=st.integers(1, 9)), max_size=2).map(tuple),
    experts=st.none() | st.binary(max_size=9),
    finish=st.sampled_from(["stop", "length", "tool_calls", "cancelled", "error"]),
    usage=st.none() | st.builds(Usage, prompt=ids, cached=ids, output=ids, seconds=st.floats(0, 9)),
    fidelity=st.sampled_from(["tokens", "text", "redacted"]),
    at=st.floats(0, 2e9),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(turns, max_size=3).map(tuple),
    tags=st.dictionaries(words, words, max_size=2),
    score=st.none() | st.builds(Score, value=st.floats(-9, 9), parts=st.dictionaries(words, floats, max_size=2)),
)
def test_any_trace_round_trips(store: Store, said: tuple[Turn, ...], tags: dict[str, str], score: Score | None) -> None:
    id = new_id("trace_")  # the store outlives the example: every example needs ids of its own
    own = tuple(msgspec.structs.replace(one, id=new_id("turn_"), trace=id) for one in said)
    whole = trace(id, turns=own, tags=tags, score=score)
    store.traces.put(whole)
    assert store.traces.get(id) == whole


def test_a_store_is_read_back_by_another_opening(store: Store) -> None:
    store.traces.put(trace())
    with open_store(None, store.root) as again:
        assert again.traces.get("trace1") == store.traces.get("trace1") == trace()
