import json
import math

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from servax.core.errors import InvalidInput
from servax.protocols.open_inference.codec import DATATYPES, MSGPACK, datatype_of, decode, encode


def sent(data: object) -> bytes:
    return json.dumps(data).encode()


def test_datatype_names_are_the_specification_s():
    assert DATATYPES == {
        "bool": "BOOL",
        "int8": "INT8",
        "int16": "INT16",
        "int32": "INT32",
        "int64": "INT64",
        "uint8": "UINT8",
        "uint16": "UINT16",
        "uint32": "UINT32",
        "uint64": "UINT64",
        "float16": "FP16",
        "bfloat16": "BF16",
        "float32": "FP32",
        "float64": "FP64",
        "string": "BYTES",
    }
    assert datatype_of("complex64") == "complex64"


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]])
@pytest.mark.parametrize(("datatype", "dtype"), [("FP32", "float32"), ("INT64", "int64"), ("UINT8", "uint8")])
def test_flat_and_nested_data_are_the_same(data, datatype, dtype):
    array = decode("x", datatype, [2, 3], sent(data))
    assert array.dtype.name == dtype
    np.testing.assert_array_equal(array, np.arange(1, 7).reshape(2, 3))


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "expected"),
    [
        ("BOOL", [2], [True, False], np.array([True, False])),
        ("FP64", [], [0.5], np.float64(0.5)),
        ("FP32", [0, 3], [], np.zeros((0, 3), np.float32)),
        ("INT32", [2, 1, 2], [[[1, 2]], [[3, 4]]], np.array([[[1, 2]], [[3, 4]]])),
        ("BYTES", [2], ["a", "ü"], np.array(["a", "ü"], object)),
        ("BYTES", [2, 1], [["a"], ["b"]], np.array([["a"], ["b"]], object)),
        ("UINT64", [1], [2**64 - 1], np.array([2**64 - 1], np.uint64)),
    ],
)
def test_each_kind_is_read(datatype, shape, data, expected):
    array = decode("x", datatype, shape, sent(data))
    assert array.shape == np.shape(expected)
    np.testing.assert_array_equal(array, expected)


def test_non_finite_values_travel_as_strings():
    values = np.array([1.5, math.nan, math.inf, -math.inf], np.float32)
    data = encode("y", values)
    assert data == [1.5, "NaN", "Infinity", "-Infinity"]
    np.testing.assert_array_equal(decode("y", "FP32", [4], sent(data)), values)
    np.testing.assert_array_equal(decode("y", "FP32", [2, 2], sent([data[:2], data[2:]])), values.reshape(2, 2))


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "faults"),
    [
        ("FP99", [1], [1], ("unknown datatype", "FP99", "BOOL")),
        ("FP32", [2], [1], ("wrong number of values", "1 values", "2 for shape [2]")),
        ("FP32", [-1], [1], ("negative size", "shape [-1]", None)),
        ("FP32", [2, 2], [[1, 2], [3]], ("not nested as its shape says", "1 values at axis 1", "2 for shape [2, 2]")),
        ("FP32", [2, 2], [[1, 2]], ("not nested as its shape says", "1 values at axis 0", "2 for shape [2, 2]")),
        ("FP32", [1], {"a": 1}, ("not a list", "dict", "a list")),
        ("FP32", [1], ["one"], ("not of its datatype", "'one'", "FP32: numbers")),
        ("FP32", [1], [None], ("not of its datatype", "null", "FP32: numbers")),
        ("FP32", [1], [True], ("not of its datatype", "True", "FP32: numbers")),
        ("INT32", [1], [1.5], ("not of its datatype", "1.5", "INT32: integers")),
        ("INT32", [1], ["NaN"], ("not of its datatype", "'NaN'", "INT32: integers")),
        ("BOOL", [1], [1], ("not of its datatype", "1", "BOOL: true or false")),
        ("BYTES", [1], [1], ("not of its datatype", "1", "BYTES: strings")),
        ("INT8", [2], [1, 300], ("out of the range", "300", "INT8")),
        ("UINT8", [4], [-1, 2, 3, 4], ("out of the range", "-1", "UINT8")),
        ("INT8", [3], [127, -128, -129], ("out of the range", "-129", "INT8")),
        ("FP32", [3], ["Infinity", 1e3, -1e300], ("out of the range", "-1e+300", "FP32")),
        ("FP64", [1], [10**400], ("out of the range", "1000", "FP64")),
        ("FP32", [1], [1e300], ("out of the range", "1e+300", "FP32")),
    ],
)
def test_faults_name_the_tensor_what_was_seen_and_expected(datatype, shape, data, faults):
    what, seen, expected = faults
    with pytest.raises(InvalidInput) as caught:
        decode("pixels", datatype, shape, sent(data))
    assert what in caught.value.what
    assert "'pixels'" in caught.value.what
    assert caught.value.where == "pixels"
    assert seen in caught.value.seen
    assert expected is None or expected in caught.value.expected


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "faults"),
    [
        ("FP32", [1], DEEP, ("nested too deeply", "deeper than can be read", "lists nested 1 deep")),
        ("FP32", [1], b"[" + b"[" * 500 + b"]" * 500 + b"]", ("not of its datatype", "a list", "FP32: numbers")),
        ("FP32", [1], b'["a", {"a": 1}]', ("not of its datatype", "'a'", "FP32: numbers")),
        ("FP32", [1], b'[{"a": 1}]', ("not of its datatype", "an object", "FP32: numbers")),
        ("FP32", [2], b"[1e400, 1]", ("cannot be read", "out of range at [0]", "FP32: numbers")),
        ("INT32", [1], b"[" + b"9" * 5000 + b"]", ("cannot be read", "out of range at [0]", "INT32: integers")),
        ("INT32", [1], b"[" + b"9" * 4000 + b"]", ("out of the range", "9...", "INT32")),
        ("BYTES", [1], b'["\\ud800"]', ("cannot be read", "", "BYTES: strings")),
        ("BYTES", [1], b'["\xff"]', ("cannot be read", "", "BYTES: strings")),
        ("FP32", [0, 2**62], b"[]", ("shape that no array has", f"[0, {2**62}]", "sizes of an array")),
        ("FP32", [0, 2**70], b"[]", ("shape that no array has", f"[0, {2**70}]", f"at most {2**63 - 1}")),
        ("FP32", [1] * 100, b"[1]", ("too many axes", "100 axes", "at most 64")),
        ("FP32", [0] * 100_000, b"[]", ("too many axes", "100000 axes", "at most 64")),
        ("FP32", [-(10**4000)], b"[]", ("negative size", "shape [-1000", "at least 0")),
        ("FP32", [2**62] * 64, b"[]", ("wrong number of values", "0 values", "...")),
        ("X" * 1000, [1], b"[1]", ("unknown datatype", "XXX...", "FP32")),
        ("FP32", [1], b'["' + b"y" * 10_000 + b'"]', ("not of its datatype", "yyy...", "FP32: numbers")),
    ],
)
def test_hostile_data_are_refused_as_any_other_and_repeated_in_short(datatype, shape, data, faults):
    what, seen, expected = faults
    for name in ("pixels", "p" * 100_000):
        with pytest.raises(InvalidInput) as caught:
            decode(name, datatype, shape, data)
        error = caught.value
        assert what in error.what
        assert error.where == name if name == "pixels" else error.where == "p" * 97 + "..."
        assert seen in error.seen
        assert expected in error.expected
        assert len(str(error)) < 700


@pytest.mark.parametrize(("dtype", "datatype"), [(np.float16, "FP16"), (ml_dtypes.bfloat16, "BF16")])
def test_half_precision_says_what_to_do(dtype, datatype):
    with pytest.raises(InvalidInput) as read:
        decode("x", datatype, [1], sent([1]))
    with pytest.raises(InvalidInput) as written:
        encode("x", np.ones(1, dtype))
    for error in (read.value, written.value):
        assert datatype in error.what
        assert "does not carry in JSON" in error.what
        assert "astype(jnp.float32)" in error.remedy


@pytest.mark.parametrize("dtype", [object, "U3", "S3"])
def test_text_is_written_as_strings(dtype):
    assert encode("t", np.array(["ab", "c"]).astype(dtype)) == ["ab", "c"]


def test_dtypes_without_a_name_are_refused():
    with pytest.raises(InvalidInput) as caught:
        encode("z", np.ones(1, np.complex64))
    assert (caught.value.where, caught.value.seen) == ("z", "complex64")


@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.int8, np.int64, np.uint64, np.bool_]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_what_is_written_is_read_back_to_the_bit(array):
    text = json.dumps(encode("x", array), allow_nan=False).encode()
    back = decode("x", datatype_of(array.dtype.name), list(array.shape), text)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


LONG = np.random.default_rng(5).normal(size=(500, 300))


@pytest.mark.parametrize(("datatype", "dtype"), [("FP64", "float64"), ("FP32", "float32")])
def test_long_data_are_read_piece_by_piece(datatype, dtype):
    for nested in (LONG.ravel().tolist(), LONG.tolist()):
        text = sent(nested)
        assert len(text) > 2 << 20
        array = decode("x", datatype, LONG.shape, text)
        np.testing.assert_array_equal(array, LONG.astype(dtype))


def test_long_data_may_hold_what_json_has_no_number_for():
    values = LONG.ravel().tolist()
    values[777] = "NaN"
    array = decode("x", "FP64", [len(values)], sent(values))
    assert math.isnan(array[777])
    np.testing.assert_array_equal(np.delete(array, 777), np.delete(LONG.ravel(), 777))


@pytest.mark.parametrize("shape", [[500, 301], [149_999], [150_001], [2**40]])
def test_long_data_of_another_number_are_counted_before_they_are_read(shape):
    with pytest.raises(InvalidInput) as caught:
        decode("x", "FP64", shape, sent(LONG.ravel().tolist()))
    assert caught.value.seen == "150000 values in 1 lists"


@pytest.mark.parametrize("wrong", [True, "a", None, [1], {"a": 1}])
def test_long_data_that_are_wrong_say_where(wrong):
    values = LONG.ravel().tolist()
    values[777] = wrong
    with pytest.raises(InvalidInput) as caught:
        decode("x", "FP64", [len(values)], sent(values))
    assert caught.value.where == "x"


def test_what_bfloat16_does_not_hold_is_refused():
    """Its largest number is (2 - 2**-7) * 2**127, about 3.39e38; float32's is larger."""
    assert decode("x", "BF16", [2], msgspec.msgpack.encode([3.38e38, math.inf]), MSGPACK)[1] == math.inf
    with pytest.raises(InvalidInput) as caught:
        decode("x", "BF16", [2], msgspec.msgpack.encode([1.0, 3.4e38]), MSGPACK)
    assert (caught.value.seen, caught.value.expected) == ("3.4e+38", "BF16")
