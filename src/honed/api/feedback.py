"""POST /v1/feedback: what is said of a turn or a trace; one or many, early or late, idempotent by key."""

from __future__ import annotations

import json
import math
import time
from typing import Any, get_args

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from honed import codec
from honed.api.body import read_body
from honed.api.gateway import Gateway
from honed.clock import new_id
from honed.errors import BadRequest, StoreError
from honed.types import Captured, Feedback, FeedbackKind

FIELDS = frozenset({"target", "id", "name", "value", "kind", "source", "key"})
MAX_ROWS, MAX_VALUE_BYTES = 1000, 1 << 20


async def post_feedback(gateway: Gateway, request: Request) -> Response:
    """Captures feedback; answered when it is in the capture log. Raises StoreError where it can't be kept."""
    body = await read_body(request)
    rows = body if isinstance(body, list) else [body]
    if not rows or len(rows) > MAX_ROWS:
        raise BadRequest(f"send 1 to {MAX_ROWS} rows of feedback, not {len(rows)}.")
    read = [read_feedback(row, f"[{index}]." if isinstance(body, list) else "") for index, row in enumerate(rows)]
    for row in read:
        if not gateway.capture.append(Captured(feedback=row, line=gateway.fleet.line)):
            raise StoreError("the feedback could not be kept: the capture log can't be written. Send it again later.")
    ids = [{"id": row.id, "target": row.target} for row in read]
    return JSONResponse(ids if isinstance(body, list) else ids[0])


def read_feedback(body: Any, at: str = "") -> Feedback:
    """One row. Raises BadRequest naming the field. A row with a key has an id made of it, so that repeats are one."""
    if not isinstance(body, dict):
        raise BadRequest("feedback must be a JSON object, or a list of them.", param=at or None)
    if unknown := sorted(set(body) - FIELDS):
        raise BadRequest(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(FIELDS))}.", param=at + unknown[0])
    kind = body.get("kind", "metric")
    if kind not in get_args(FeedbackKind):
        raise BadRequest(f"'kind' must be one of {', '.join(get_args(FeedbackKind))}.", param=at + "kind")
    value = body.get("value")
    _check_value(kind, value, at + "value")
    key = None if body.get("key") is None else _name(body["key"], at + "key")
    return Feedback(
        id=new_id("feedback_") if key is None else "feedback_" + codec.digest(["key", key])[:32],
        target=_name(body.get("target") or body.get("id"), at + "target"),
        name=_name(body.get("name"), at + "name"),
        value=value,
        kind=kind,
        source=_name(body.get("source", "user"), at + "source"),
        key=key,
        at=time.time(),
    )


def _check_value(kind: str, value: Any, at: str) -> None:
    if kind == "metric":
        if not isinstance(value, bool | int | float) or not math.isfinite(value) or abs(value) > 1e15:
            raise BadRequest("a metric's 'value' must be a finite number or a boolean.", param=at)
    elif kind == "comment":
        if not isinstance(value, str):
            raise BadRequest("a comment's 'value' must be a string.", param=at)
    else:
        _check_messages(kind, value, at)
    if len(json.dumps(value)) > MAX_VALUE_BYTES:
        raise BadRequest(f"'value' is over {MAX_VALUE_BYTES} bytes.", param=at)


def _check_messages(kind: str, value: Any, at: str) -> None:
    """What should have been said: nobody could learn from anything else, and later there is nobody to tell."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"a {kind}'s 'value' must be a list of messages.", param=at)
    for index, item in enumerate(value):
        if item.get("role") not in ("assistant", "tool"):
            raise BadRequest(
                f"a {kind} holds the assistant's and the tools' messages only.", param=f"{at}[{index}].role"
            )
        if not isinstance(item.get("content"), str) and not (item.get("content") is None and item.get("tool_calls")):
            raise BadRequest("a message needs content, a string, or tool calls.", param=f"{at}[{index}].content")
        weight = item.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise BadRequest("a message's weight must be a number from 0 on.", param=f"{at}[{index}].weight")
    if value[-1]["role"] != "assistant":
        raise BadRequest(f"a {kind} must end with the assistant's message.", param=at)
    if not any(item.get("weight", 1) for item in value if item["role"] == "assistant"):
        raise BadRequest(f"every message of the {kind} weighs 0: nothing could be learned from it.", param=at)


def _name(value: Any, at: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 512:
        raise BadRequest(f"'{at}' must be a string of 1 to 512 characters.", param=at)
    return value
