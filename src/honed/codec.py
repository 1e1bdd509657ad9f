"""Bytes and digests of the nouns: msgpack with numpy arrays, and content hashes. Nothing here unpickles.

An array travels as an extension (code 1) holding dtype, shape and raw little-endian bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec
import numpy as np

from honed.errors import CorruptData
from honed.types import Message, Noun, Split, Task, Tool

T = TypeVar("T")
ARRAY = 1
DTYPES = ("int32", "int64", "float32", "float64", "uint8")


def encode(value: Any) -> bytes:
    """msgpack bytes of a noun, or of any tree of nouns, containers, scalars and numpy arrays."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, type: type[T]) -> T:
    """The inverse of `encode`. Raises CorruptData when the bytes are not that type."""
    try:
        return msgspec.msgpack.decode(data, type=type, ext_hook=_ext_hook, dec_hook=_dec_hook)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"cannot decode {type.__name__}: {error}") from error


def to_json(value: Any) -> bytes:
    """JSON bytes of a noun, for people and for `--json`."""
    return _json_encoder.encode(value)


def from_json(data: bytes | str, type: type[T]) -> T:
    """The inverse of `to_json`. Raises CorruptData when the text is not that type."""
    try:
        return msgspec.json.decode(data, type=type, strict=True)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"cannot decode {type.__name__}: {error}") from error


def digest(value: Any) -> str:
    """sha256 hex of a canonical JSON rendering (sorted keys), the same on every machine."""
    data = msgspec.json.encode(msgspec.to_builtins(value, enc_hook=_to_list), order="sorted")
    return hashlib.sha256(data).hexdigest()


def task_id(task: Task) -> str:
    """Content hash of what the attempt sees and how it is judged; the split, the weight and the source do not enter."""
    return "task_" + digest([task.prompt, task.tools, task.environment, task.spec, task.verifier])[:24]


def tools_digest(tools: tuple[Tool, ...]) -> str:
    """The digest that a Turn keeps of its tool list; empty for no tools."""
    return digest(tools)[:24] if tools else ""


def messages_digest(messages: tuple[Message, ...]) -> str:
    """Digest of a conversation's text, used to recognise that a request extends it."""
    return digest(messages)[:32]


def split_of(key: str, *, salt: str = "split-1", holdout: float = 0.25, dev: float = 0.15) -> Split:
    """The split a key falls in, for ever: sha256(salt, key) as a fraction of 1, holdout first, then dev, else train."""
    raw = hashlib.sha256(f"{salt}\0{key}".encode()).digest()
    fraction = int.from_bytes(raw[:8], "big") / 2**64
    return "holdout" if fraction < holdout else "dev" if fraction < holdout + dev else "train"


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    if value.dtype.name not in DTYPES:
        raise TypeError(f"cannot encode an array of {value.dtype}; use one of {', '.join(DTYPES)}")
    header = msgspec.msgpack.encode([value.dtype.name, value.shape])
    return msgspec.msgpack.Ext(ARRAY, len(header).to_bytes(4, "big") + header + np.ascontiguousarray(value).tobytes())


def _ext_hook(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise CorruptData(f"unknown msgpack extension {code}")
    size = int.from_bytes(data[:4], "big")
    dtype, shape = msgspec.msgpack.decode(data[4 : 4 + size], type=tuple[str, tuple[int, ...]])
    if dtype not in DTYPES:
        raise CorruptData(f"array of unknown dtype {dtype!r}")
    try:
        return np.frombuffer(data[4 + size :], dtype=dtype).reshape(shape).copy()
    except ValueError as error:
        raise CorruptData(f"array of shape {shape} does not fit its bytes: {error}") from error


def _dec_hook(type: type, value: Any) -> Any:
    if type is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise TypeError(f"expected {type.__name__}")  # msgspec makes it a ValidationError that names the field


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_to_list)

__all__ = [
    "Noun",
    "decode",
    "digest",
    "encode",
    "from_json",
    "messages_digest",
    "split_of",
    "task_id",
    "to_json",
    "tools_digest",
]
