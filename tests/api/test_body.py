"""A request's body: read strictly, once, so that nothing behind it meets what a record can't hold."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request

from honed import codec
from honed.api.body import read_body, read_object
from honed.errors import BadRequest


def request(*pieces: bytes) -> Request:
    """A request whose body comes in pieces."""
    events = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    waiting = iter([*events, {"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(waiting)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_json_comes_back_as_it_is_and_every_record_can_hold_it() -> None:
    value = await read_body(
        request(b'{"a": [1, -9223372036854775808, 1.5e300, null, true, "\\ud83c\\udf89"],', b'"b": {}}')
    )
    assert value == {"a": [1, -(2**63), 1.5e300, None, True, "🎉"], "b": {}}
    assert codec.decode(codec.encode(value), dict) == value
    assert await read_object(request(b"{}")) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"NaN",
        b"[Infinity]",
        b"1e400",
        b'"\\ud800"',
        b'"\\udc00x"',
        b"9223372036854775808",
        b'{"a": {"b": [-9223372036854775809]}}',
        b"[" * 65 + b"]" * 65,
        b"[" * 100_000,
        b"{} {}",
    ],
)
async def test_what_is_not_strict_json_or_no_record_can_hold_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        await read_body(request(body))
    assert (caught.value.code, caught.value.status) == ("invalid_json", 400)


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"x"'])
async def test_where_an_object_is_wanted_nothing_else_will_do(body: bytes) -> None:
    with pytest.raises(BadRequest, match="object"):
        await read_object(request(body))


async def test_a_body_over_the_limit_is_refused_before_it_is_read_to_its_end() -> None:
    assert await read_body(request(b" " * 9, b"1"), max_bytes=10) == 1
    with pytest.raises(BadRequest) as caught:
        await read_body(request(b" " * 9, b"12", b"]"), max_bytes=10)
    assert (caught.value.code, caught.value.status) == ("body_too_large", 413)
