"""Reads a request's body strictly: JSON that every record can hold, or a BadRequest.

What Python's own parser lets through and a record can't hold (NaN, half a surrogate pair, integers of over 64 bits,
bottomless nesting) is refused here, once, so that nothing behind it has to think of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from honed.errors import BadRequest

CLIENT_GONE = 499
"""The status in the metrics of a request that nobody waits for."""
MAX_BODY_BYTES = 64 << 20
MAX_DEPTH = 64


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """The body's JSON. Raises BadRequest (code invalid_json), with status 413 for a body over `max_bytes` and 499
    for one whose sender left."""
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > max_bytes:
                raise BadRequest(f"the body is over {max_bytes} bytes.", code="body_too_large", status=413)
    except ClientDisconnect:
        raise BadRequest("the client hung up.", code="client_gone", status=CLIENT_GONE) from None
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    _check(value)
    return value


async def read_object(request: Request) -> dict[str, Any]:
    """The body as an object. Raises BadRequest for anything else."""
    value = await read_body(request)
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object.", code="invalid_json")
    return value


def _check(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise BadRequest("the body holds an integer of over 64 bits.", code="invalid_json")
        if not inner:
            return
        level = inner
    raise BadRequest(f"the body is nested over {MAX_DEPTH} levels deep.", code="invalid_json")
