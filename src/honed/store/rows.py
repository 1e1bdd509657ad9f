"""Nouns to rows and back: which field is a column, which is packed, and how arrays are compressed. Runs no SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard

from honed import codec
from honed.errors import CorruptData
from honed.types import Fault, Message, Sampling, Score, Span, Tool, Trace, Turn, Usage


class TurnBody(msgspec.Struct, frozen=True):
    """What a turn holds beside its columns."""

    added: tuple[Message, ...]
    tools: str
    reply: Message
    sampling: Sampling
    versions: tuple[Span, ...]
    usage: Usage | None


class TraceBody(msgspec.Struct, frozen=True):
    """What a trace holds beside its columns."""

    score: Score | None
    fault: Fault | None
    tags: dict[str, str]


def turn_row(turn: Turn, trace: Trace, position: int) -> dict[str, Any]:
    """The row of a turn, the `position`th of its trace."""
    body = TurnBody(turn.added, turn.tools, turn.reply, turn.sampling, turn.versions, turn.usage)
    return {
        "id": turn.id,
        "trace": trace.id,
        "position": position,
        "parent": turn.parent,
        "tenant": trace.tenant,
        "line": trace.line,
        "model": turn.model,
        "version": turn.versions[-1].version if turn.versions else "",
        "finish": turn.finish,
        "fidelity": turn.fidelity,
        "body": compress(codec.encode(body)),
        "context": pack(turn.context, "<i4"),
        "output": pack(turn.output, "<i4"),
        "logprobs": pack(turn.logprobs, "<f4"),
        "raw_logprobs": pack(turn.raw_logprobs, "<f4"),
        "experts": None if turn.experts is None else compress(turn.experts),
        "at": turn.at,
    }


def turn_from(row: Mapping[Any, Any]) -> Turn:
    """The turn of a row. Raises CorruptData naming it when its bytes don't parse."""
    try:
        body = codec.decode(decompress(row["body"]), TurnBody)
        return Turn(
            id=row["id"],
            trace=row["trace"],
            parent=row["parent"],
            added=body.added,
            tools=body.tools,
            context=unpack(row["context"], "<i4"),
            reply=body.reply,
            output=unpack(row["output"], "<i4"),
            logprobs=unpack(row["logprobs"], "<f4"),
            raw_logprobs=unpack(row["raw_logprobs"], "<f4"),
            sampling=body.sampling,
            model=row["model"],
            versions=body.versions,
            experts=None if row["experts"] is None else decompress(row["experts"]),
            finish=row["finish"],
            usage=body.usage,
            fidelity=row["fidelity"],
            at=row["at"],
        )
    except CorruptData as error:
        raise CorruptData(f"the stored turn {row['id']!r} is damaged: {error}. Restore the database.") from error


def trace_row(trace: Trace) -> dict[str, Any]:
    """The row of a trace, without its turns, tools and signals."""
    return {
        "id": trace.id,
        "origin": trace.origin,
        "line": trace.line,
        "tenant": trace.tenant,
        "task": trace.task,
        "tools": codec.tools_digest(trace.tools),
        "score": None if trace.score is None else trace.score.value,
        "body": codec.encode(TraceBody(trace.score, trace.fault, trace.tags)),
        "at": trace.at,
    }


def trace_from(
    row: Mapping[Any, Any], tools: tuple[Tool, ...], signals: tuple[str, ...], turns: tuple[Turn, ...]
) -> Trace:
    """The trace of a row and of what other tables hold of it. Raises CorruptData naming it."""
    try:
        body = codec.decode(row["body"], TraceBody)
    except CorruptData as error:
        raise CorruptData(f"the stored trace {row['id']!r} is damaged: {error}. Restore the database.") from error
    return Trace(
        id=row["id"],
        origin=row["origin"],
        line=row["line"],
        task=row["task"],
        turns=turns,
        tools=tools,
        score=body.score,
        fault=body.fault,
        signals=signals,
        tags=body.tags,
        tenant=row["tenant"],
        at=row["at"],
    )


def pack(values: Sequence[float], dtype: str) -> bytes:
    """zstd of the values as little-endian `dtype`; empty bytes for none."""
    return compress(np.asarray(values, dtype=dtype).tobytes()) if len(values) else b""


def unpack(data: bytes, dtype: str) -> tuple[Any, ...]:
    """The inverse of `pack`, as Python numbers. Raises CorruptData."""
    raw = decompress(data) if data else b""
    if len(raw) % np.dtype(dtype).itemsize:
        raise CorruptData(f"{len(raw)} bytes are no array of {dtype}")
    return tuple(np.frombuffer(raw, dtype=dtype).tolist())


def compress(data: bytes) -> bytes:
    """zstd with a checksum, so that a damaged row is noticed."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def decompress(data: bytes) -> bytes:
    """The inverse of `compress`. Raises CorruptData."""
    try:
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptData(f"compressed bytes do not parse: {error}") from error
