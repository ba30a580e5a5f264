import ml_dtypes
import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from servax.core.errors import InvalidInput
from servax.protocols.open_inference.raw import decode_raw, encode_raw


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
def test_numbers_are_little_endian_and_row_major(kind):
    dtype = np.dtype(kind)
    datatype = {"i": "INT", "u": "UINT", "f": "FP"}[dtype.kind] + str(dtype.itemsize * 8)
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    data = bytes(encode_raw("x", array))
    assert data == array.astype(dtype.newbyteorder("<")).tobytes()
    assert bytes(encode_raw("x", array.astype(dtype.newbyteorder(">")))) == data
    assert bytes(encode_raw("x", np.asfortranarray(array))) == data
    back = decode_raw("x", datatype, [2, 3], data)
    assert back.dtype == dtype
    assert back.tolist() == array.tolist()


def test_bfloat16_is_the_upper_half_of_a_float():
    data = bytes(encode_raw("x", np.array([1.5, -2.0], ml_dtypes.bfloat16)))
    assert data == bytes.fromhex("c03f00c0")
    assert decode_raw("x", "BF16", [2], data).tolist() == [1.5, -2.0]


def test_booleans_are_bytes():
    assert bytes(encode_raw("x", np.array([True, False]))) == b"\1\0"
    assert decode_raw("x", "BOOL", [2], b"\1\0").tolist() == [True, False]


def test_scalars_and_arrays_without_elements():
    assert decode_raw("x", "FP32", [], b"\0\0\x80?").tolist() == 1.0
    assert decode_raw("x", "FP32", [2, 0], b"").shape == (2, 0)
    assert decode_raw("x", "BYTES", [0], b"").shape == (0,)
    assert bytes(encode_raw("x", np.zeros((0, 4), np.float32))) == b""
    assert bytes(encode_raw("x", np.float32(1.0).reshape(()))) == b"\0\0\x80?"


def test_strings_as_triton_writes_them():
    texts = np.array([["a", "grün"], ["", "雪"]], object)
    assert bytes(encode_raw("t", texts)) == serialize_byte_tensor(texts).item()
    assert [each.decode() for each in deserialize_bytes_tensor(bytes(encode_raw("t", texts)))] == texts.ravel().tolist()
    assert decode_raw("t", "BYTES", [2, 2], serialize_byte_tensor(texts).item()).tolist() == texts.tolist()


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "what", "seen"),
    [
        ("FP32", [2, 2], b"1234", "wrong number of bytes", "4 bytes"),
        ("FP32", [1], b"12345678", "wrong number of bytes", "8 bytes"),
        ("FP32", [2, -3], b"", "negative size", "shape [2, -3]"),
        ("FP32", [-1], b"1234", "negative size", "shape [-1]"),
        ("FP32", [-1, -1], b"1234", "negative size", "shape [-1, -1]"),
        ("FP32", [2**40, 2**40], b"", "wrong number of bytes", "0 bytes"),
        ("FP32", [0, 2**64], b"", "a shape that no array has", "shape [0, 18446744073709551616]"),
        ("FP32", [0, 2**62, 8], b"", "a shape that no array has", "shape [0, 4611686018427387904, 8]"),
        ("FP32", [1] * 65, b"1234", "too many axes", "65 axes"),
        ("BOOL", [1], b"\2", "neither true nor false", "2"),
        ("FP8", [1], b"1", "unknown datatype", "FP8"),
        ("BYTES", [-1], b"", "negative size", "shape [-1]"),
        ("BYTES", [2**62], b"", "wrong number of strings", "0 strings"),
        ("BYTES", [1], b"\0\0\0\0" * 9, "wrong number of strings", "more than 1"),
        ("BYTES", [1], b"\5\0\0\0abc", "end too early", "7 bytes for string 0"),
        ("BYTES", [2], b"\0\0\0\0\1\0", "end too early", "2 bytes for string 1"),
        ("BYTES", [1], b"\1\0\0\0\xff", "is not UTF-8", "invalid start byte"),
    ],
)
def test_errors_name_the_tensor_and_what_was_seen(datatype, shape, data, what, seen):
    with pytest.raises(InvalidInput, match=what) as caught:
        decode_raw("x", datatype, shape, data)
    assert caught.value.where == "x"
    assert caught.value.seen == seen


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(InvalidInput, match="unknown datatype"):
        encode_raw("x", np.zeros(1, np.complex64))
