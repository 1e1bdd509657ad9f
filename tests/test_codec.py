import contextlib
import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from honed import codec
from honed.errors import CorruptData
from honed.types import Message, Sample, Task, Tool, ToolCall

MESSAGE = Message(role="assistant", tool_calls=(ToolCall(id="c", name="track", arguments="{not json"),))


def task(**fields: object) -> Task:
    plain = {
        "id": "",
        "prompt": (Message(role="user", content="hi"),),
        "environment": "e",
        "verifier": "v",
        "split": "train",
        "split_key": "k",
    }
    return Task(**{**plain, **fields})  # type: ignore[arg-type]


def test_nouns_round_trip_in_both_forms() -> None:
    assert codec.decode(codec.encode(MESSAGE), Message) == MESSAGE
    assert codec.from_json(codec.to_json(MESSAGE), Message) == MESSAGE


@given(
    hnp.arrays(
        st.sampled_from(codec.DTYPES).map(np.dtype),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_arrays_round_trip_exactly(array: np.ndarray) -> None:
    found = codec.decode(codec.encode({"x": [array]}), dict)["x"][0]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert found.flags.writeable


def test_a_sample_round_trips() -> None:
    sample = Sample(
        tokens=np.array([1, 2], np.int32), weights=np.array([0.0, 0.5], np.float32), versions=("support@1",)
    )
    found = codec.decode(codec.encode(sample), Sample)
    assert found.tokens.tolist() == [1, 2]
    assert found.weights.dtype == np.float32
    assert (found.versions, found.advantages) == (("support@1",), None)


def test_arrays_that_are_not_contiguous_and_numpy_scalars_are_encoded() -> None:
    turned = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert np.array_equal(codec.decode(codec.encode(turned), np.ndarray), turned)
    assert codec.decode(codec.encode({"x": np.float32(0.5)}), dict) == {"x": 0.5}
    assert codec.to_json({"x": np.arange(2), "y": np.int64(3)}) == b'{"x":[0,1],"y":3}'


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([object()]), np.array([1 + 2j]), object()])
def test_what_cannot_travel_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot encode"):
        codec.encode(value)


def extension(code: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


def array_bytes(dtype: str, shape: list[int], data: bytes) -> bytes:
    header = msgspec.msgpack.encode([dtype, shape])
    return extension(codec.ARRAY, len(header).to_bytes(4, "big") + header + data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        codec.encode(MESSAGE)[:-1],
        codec.encode({"role": "nobody"}),
        extension(7, b"x"),
        extension(codec.ARRAY, b""),
        extension(codec.ARRAY, b"\xff\xff\xff\xffjunk"),
        array_bytes("object", [1], b"12345678"),
        array_bytes("int32", [3], b"1234"),
        array_bytes("int32", [1], b"123"),
        array_bytes("int32", [-1, 0], b""),
    ],
    ids=range(11),
)
def test_bytes_that_are_no_noun_are_corrupt_data(data: bytes) -> None:
    for type in (Message, Sample):
        with pytest.raises(CorruptData):
            codec.decode(data, type)
    if data[:1] in (b"\xc7", b"\xc8", b"\xd4", b"\xd5", b"\xd6", b"\xd7", b"\xd8"):
        with pytest.raises(CorruptData):
            codec.decode(data, np.ndarray)


def test_a_list_where_an_array_belongs_is_corrupt_data() -> None:
    with pytest.raises(CorruptData):
        codec.decode(codec.encode({"tokens": [1], "weights": [1.0]}), Sample)


@given(st.binary(max_size=40))
def test_any_bytes_decode_or_are_corrupt_data(data: bytes) -> None:
    for type in (Message, Sample, dict):
        with contextlib.suppress(CorruptData):
            codec.decode(data, type)


def test_json_that_is_no_noun_is_corrupt_data() -> None:
    for text in ("", "{", '{"role": 1}', '{"role": "user", "content": 1}'):
        with pytest.raises(CorruptData):
            codec.from_json(text, Message)


def test_the_digest_is_that_of_sorted_json() -> None:
    expected = hashlib.sha256(b'{"a":[1,2],"b":{"x":null,"y":0.5}}').hexdigest()
    assert codec.digest({"b": {"y": 0.5, "x": None}, "a": np.array([1, 2])}) == expected


def test_a_tasks_id_is_what_is_attempted_and_how_it_is_judged() -> None:
    first = codec.task_id(task())
    assert first.startswith("task_")
    assert len(first) == 29
    for same in ({"weight": 2.0}, {"split": "holdout"}, {"source": "t"}, {"kind": "k"}, {"suite": "s"}, {"id": "x"}):
        assert codec.task_id(task(**same)) == first, same
    for other in (
        {"spec": {"a": 1}},
        {"verifier": "w"},
        {"environment": "f"},
        {"tools": (Tool(name="t"),)},
        {"prompt": ()},
    ):
        assert codec.task_id(task(**other)) != first, other


def test_tools_have_a_digest_and_no_tools_have_none() -> None:
    assert codec.tools_digest(()) == ""
    assert len(codec.tools_digest((Tool(name="a"),))) == 24
    assert codec.tools_digest((Tool(name="a"),)) != codec.tools_digest((Tool(name="b"),))


def test_a_split_is_a_matter_of_its_key() -> None:
    key = "conversation-1"
    fraction = int.from_bytes(hashlib.sha256(b"split-1\0" + key.encode()).digest()[:8], "big") / 2**64
    assert codec.split_of(key, holdout=fraction + 1e-9) == "holdout"
    assert codec.split_of(key, holdout=fraction - 1e-9, dev=1e-6) == "dev"
    assert codec.split_of(key, holdout=0.0, dev=fraction - 1e-9) == "train"
    counts = [codec.split_of(str(i)) for i in range(4000)]
    assert abs(counts.count("holdout") / 4000 - 0.25) < 0.03
    assert abs(counts.count("dev") / 4000 - 0.15) < 0.03


def test_a_weight_that_nobody_gave_enters_no_digest() -> None:
    plain = Message(role="assistant", content="x")
    assert "weight" not in codec.to_json(plain).decode()
    assert plain.emphasis == 1.0
    heavy = msgspec.structs.replace(plain, weight=2.0)
    assert codec.digest(heavy) != codec.digest(plain)
    assert codec.decode(codec.encode(heavy), Message) == heavy
    assert codec.decode(codec.encode(plain), Message) == plain
