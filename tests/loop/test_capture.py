"""Signals are pure functions of a trace; flagging writes them to the store and finds the failures."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from honed.errors import ConfigError
from honed.loop import capture
from honed.loop.capture import CaptureSettings, flag, signals_of
from honed.store import open_store
from honed.types import Feedback, Message, Sampling, Tool, ToolCall, Trace, Turn

TOOL = Tool(
    name="refund",
    parameters={
        "type": "object",
        "properties": {"order": {"type": "integer"}},
        "required": ["order"],
        "additionalProperties": False,
    },
)


def turn(
    number: int,
    content: str | None = "Done.",
    *,
    call: tuple[str, object] | None = None,
    tool: str | None = None,
    finish: str = "stop",
) -> Turn:
    """Turn `number` of trace "t": an optional tool result came in, an optional call goes out."""
    added = (Message(role="user", content="hi"),) if tool is None else (Message(role="tool", content=tool),)
    arguments = call[1] if call is not None and isinstance(call[1], str) else json.dumps(call[1]) if call else ""
    calls = (ToolCall(id="c", name=call[0], arguments=arguments),) if call else ()
    return Turn(
        id=f"turn{number}",
        trace="t",
        parent=f"turn{number - 1}" if number else None,
        added=added,
        reply=Message(role="assistant", content=content, tool_calls=calls),
        sampling=Sampling(),
        model="m",
        finish=finish,  # type: ignore[arg-type]
        at=float(number),
    )


def trace(*turns: Turn, id: str = "t") -> Trace:
    return Trace(id=id, origin="production", line="m", turns=turns, tools=(TOOL,), at=1.0)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (("refund", {"order": 3}), None),
        (("refund", {"order": "three"}), "bad_call"),
        (("refund", {}), "bad_call"),
        (("refund", {"order": 3, "why": 1}), "bad_call"),
        (("refunds", {"order": 3}), "bad_call"),
        (("refund", "{not json"), "bad_call"),
        (("refund", [3]), "bad_call"),
    ],
)
def test_a_call_that_its_schema_refuses_is_a_bad_call(call: tuple[str, object], found: str | None) -> None:
    assert capture.bad_call(trace(turn(0, None, call=call))) == found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "#/$defs/nothing"},
        {"$ref": "#"},
        {"properties": {"order": {"pattern": "("}}},
    ],
    ids=["type", "nowhere", "endless", "pattern"],
)
def test_a_broken_schema_is_not_the_models_fault(schema: dict[str, object]) -> None:
    odd = Tool(name="refund", parameters=schema)
    one = Trace(id="t", origin="production", turns=(turn(0, call=("refund", {"order": "x"})),), tools=(odd,), at=0.0)
    assert capture.bad_call(one) is None


def test_a_schema_that_names_an_address_is_never_fetched() -> None:
    asked = threading.Event()

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        odd = Tool(name="refund", parameters={"$ref": f"http://127.0.0.1:{server.server_port}/schema"})
        one = Trace(id="t", origin="production", turns=(turn(0, call=("refund", {})),), tools=(odd,), at=0.0)
        assert capture.bad_call(one) is None
        server.shutdown()
    assert not asked.is_set()


@pytest.mark.parametrize(
    ("said", "tools", "found"),
    [
        ('<tool_call>{"name": "refund", "arguments": {</tool_call>', "digest", "bad_call"),
        ("so: <tool_call>refund(3)", "digest", "bad_call"),
        ("<tool_call>refund(3)", "", None),  # no tool was offered: it is text
        ("tool_call", "digest", None),
    ],
)
def test_a_call_that_could_not_be_read_is_a_bad_call(said: str, tools: str, found: str | None) -> None:
    assert capture.bad_call(trace(msgspec.structs.replace(turn(0, said), tools=tools))) == found
    cut = msgspec.structs.replace(turn(0, said, finish="error"), tools=tools)
    assert capture.bad_call(trace(cut)) is None


def test_a_tool_error_that_was_mended_is_kept_apart_from_one_that_was_not() -> None:
    calls = turn(0, None, call=("refund", {"order": 1}))
    failed = turn(1, None, call=("refund", {"order": 2}), tool='{"error": "no such order"}')
    mended = turn(2, "Refunded.", tool='{"ok": true}')
    assert capture.tool_error(trace(calls, turn(1, "Sorry.", tool="Error: no such order"))) == "tool_error"
    assert capture.recovered_error(trace(calls, turn(1, "Sorry.", tool="Error: no such order"))) is None
    assert capture.tool_error(trace(calls, failed, mended)) is None
    assert capture.recovered_error(trace(calls, failed, mended)) == "recovered_error"
    assert capture.tool_error(trace(calls, turn(1, "ok", tool="the word error inside"))) is None


def test_empty_truncated_and_repeated_answers() -> None:
    assert capture.empty(trace(turn(0, "  "))) == "empty"
    assert [capture.empty(trace(turn(0, "", finish=cut))) for cut in ("cancelled", "error")] == [None, None]
    assert capture.empty(trace(turn(0, None, call=("refund", {"order": 1})))) is None
    assert capture.truncated(trace(turn(0, "long", finish="length"))) == "truncated"
    assert capture.repeated(trace(turn(0, "Again."), turn(1, "Again."))) == "repeated"
    assert capture.repeated(trace(turn(0, "One."), turn(1, "Two."))) is None
    assert capture.repeated(trace(turn(0, ""), turn(1, ""))) is None


def row(target: str, value: object, *, kind: str = "metric", at: float = 1.0, name: str = "success") -> Feedback:
    return Feedback(id=f"{target}{at}{kind}{name}", target=target, name=name, value=value, kind=kind, at=at)  # type: ignore[arg-type]


def test_the_newest_value_of_the_metric_counts_and_a_correction_is_negative() -> None:
    one, settings = trace(turn(0)), CaptureSettings()
    assert capture.negative([row("turn0", False)], settings)(one) == "negative_feedback"
    assert capture.negative([row("t", 0.0)], settings)(one) == "negative_feedback"
    assert capture.negative([row("turn0", False), row("turn0", True, at=2.0)], settings)(one) is None
    assert capture.negative([row("turn0", False, name="speed")], settings)(one) is None
    assert capture.negative([row("turn0", [], kind="correction")], settings)(one) == "negative_feedback"
    assert capture.negative([row("another", False)], settings)(one) is None


def test_only_the_newest_branch_is_looked_at() -> None:
    bad = turn(0, None, call=("refunds", {}))
    retried = Turn(**{**{f: getattr(turn(0), f) for f in turn(0).__struct_fields__}, "id": "again"})
    assert capture.bad_call(trace(bad, retried)) is None


def test_a_signal_that_raises_says_nothing_and_stops_nobody() -> None:
    def broken(_: Trace) -> str | None:
        raise RuntimeError("no")

    assert signals_of(trace(turn(0, "")), [broken, capture.empty]) == ("empty",)


def test_an_unknown_signal_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no signal is called 'emty'"):
        capture.resolve(["emty"])


def test_flagging_writes_signals_and_returns_failures_oldest_first(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    for index, content in enumerate(["fine", "", "fine", ""]):
        one = turn(0, content)
        id = f"t{index}"
        moved = Turn(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "id": f"{id}.0", "trace": id})
        store.traces.put(Trace(id=id, origin="production", line="m", turns=(moved,), at=10.0 + index))
    store.feedback.add([row("t2.0", False)])
    failures = flag(store, "m", since=11.0)
    assert [one.id for one in failures] == ["t1", "t2", "t3"]
    assert store.traces.get("t2").signals == ("negative_feedback",)
    assert [one.signals for one in failures] == [("empty",), ("negative_feedback",), ("empty",)]
    assert flag(store, "m", since=11.0) == failures


def test_a_recovered_error_is_noted_and_is_no_failure(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    calls = turn(0, None, call=("refund", {"order": 1}))
    failed = turn(1, None, call=("refund", {"order": 2}), tool='{"error": "no such order"}')
    store.traces.put(trace(calls, failed, turn(2, "Refunded.", tool='{"ok": true}')))
    assert flag(store, "m", since=0.0) == []
    assert store.traces.get("t").signals == ("recovered_error",)


def test_a_later_look_takes_new_traces_and_those_that_new_feedback_is_about(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)

    def put(id: str, content: str, at: float) -> None:
        one = turn(0, content)
        moved = Turn(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "id": f"{id}.0", "trace": id})
        store.traces.put(Trace(id=id, origin="production", line="m", turns=(moved,), at=at))

    put("trace_old", "fine", 10.0)
    put("trace_bad", "", 20.0)
    assert [one.id for one in flag(store, "m", since=0.0)] == ["trace_bad"]
    put("trace_new", "", 1000.0)
    store.feedback.add([row("trace_old.0", False, at=1000.0)])
    failures = flag(store, "m", since=0.0, looked=990.0)
    assert [one.id for one in failures] == ["trace_old", "trace_bad", "trace_new"]
    store.feedback.add([row("trace_old.0", True, at=1001.0), row("trace_new", True, at=1001.0)])
    assert [one.id for one in flag(store, "m", since=0.0, looked=1000.0)] == ["trace_bad", "trace_new"]
    assert [one.id for one in flag(store, "m", since=500.0, looked=1000.0)] == ["trace_new"]
