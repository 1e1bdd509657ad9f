"""Small nouns for the store's tests: every required field has a plain value that a test can override."""

from typing import Any

from honed.types import Captured, Entry, Feedback, Message, Release, Sampling, Span, Task, Trace, Turn


def turn(id: str, trace: str = "trace1", **fields: Any) -> Turn:
    plain = {
        "added": (Message(role="user", content="where is my order?"),),
        "context": (1, 2, 3),
        "reply": Message(role="assistant", content="on its way"),
        "output": (4, 5),
        "logprobs": (-0.5, -0.25),
        "sampling": Sampling(),
        "model": "support",
        "versions": (Span(version="support@1", count=2),),
        "finish": "stop",
        "at": 10.0,
    }
    return Turn(id=id, trace=trace, **{**plain, **fields})


def captured(id: str, trace: str = "trace1", *, line: str = "support", tenant: str = "", **fields: Any) -> Captured:
    return Captured(turn=turn(id, trace, **fields), line=line, tenant=tenant)


def trace(id: str = "trace1", **fields: Any) -> Trace:
    plain: dict[str, Any] = {"origin": "rollout", "line": "support", "at": 10.0, "turns": (turn(f"{id}-turn", id),)}
    return Trace(id=id, **{**plain, **fields})


def said(id: str, target: str = "trace1", value: Any = True, **fields: Any) -> Feedback:
    return Feedback(id=id, target=target, value=value, **{"name": "success", "at": 20.0, **fields})


def task(id: str = "task1", **fields: Any) -> Task:
    plain = {
        "prompt": (Message(role="user", content="where is my order?"),),
        "environment": "support",
        "verifier": "support",
        "split": "train",
        "split_key": id,
    }
    return Task(id=id, **{**plain, **fields})


def release(id: str, version: str = "support@1", **fields: Any) -> Release:
    return Release(id=id, version=version, **{"line": "support", "kind": "promote", "at": 1.0, **fields})


def entry(id: str, **fields: Any) -> Entry:
    plain = {"activity": "train", "device": "cpu-core", "seconds": 1.0, "line": "support", "at": 1.0}
    return Entry(id=id, **{**plain, **fields})
