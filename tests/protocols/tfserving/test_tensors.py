"""Against TensorFlow's own `make_tensor_proto` and `make_ndarray`."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from servax.core.errors import InvalidInput
from servax.core.tensors import dtype_of
from servax.protocols.tfserving.grpc import schema
from servax.protocols.tfserving.names import DATA_TYPES
from servax.protocols.tfserving.tensors import MOST_REPEATED, read_tensor, write_tensor

Ours = schema()["tensorflow.TensorProto"]
NUMBERS = [dtype for dtype in DATA_TYPES if dtype != "string"]


def ours(theirs: tensor_pb2.TensorProto):
    return Ours.FromString(theirs.SerializeToString())


def values(dtype: str) -> np.ndarray:
    """Six values that every dtype of this kind holds, two of them at its limits where it is an integer."""
    kind = dtype_of(dtype)
    if dtype == "bool":
        return np.array([[True, False, True], [False, False, True]])
    if "int" in dtype:
        limits = ml_dtypes.iinfo(kind)
        return np.array([[int(limits.min), 0, 1], [2, 3, int(limits.max)]], object).astype(kind)
    if "complex" in dtype:
        return np.array([[1 + 2j, 0, -1], [0.5, 2j, 3]], kind)
    return np.array([[1, 0, -1], [0.5, 2, -3]], np.float32).astype(kind)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_and_names_are_tensorflows(dtype):
    name, number = DATA_TYPES[dtype]
    assert types_pb2.DataType.Value(name) == number
    assert tf.as_dtype(number).as_numpy_dtype == dtype_of(dtype)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_bytes_of_every_dtype(dtype):
    array = values(dtype)
    theirs = tf.make_tensor_proto(array)
    # TensorFlow packs the others only where it is told to, as `write_tensor` does.
    assert theirs.tensor_content or dtype in ("bool", "uint16", "int4", "uint4", "complex64", "complex128")
    read = read_tensor("x", ours(theirs))
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read.astype(np.complex128), array.astype(np.complex128))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_lists_of_every_dtype(dtype):
    array = values(dtype)
    # One element is never packed into bytes by TensorFlow.
    for element in array.ravel():
        theirs = tf.make_tensor_proto(element, dtype=array.dtype, shape=())
        assert not theirs.tensor_content
        read = read_tensor("x", ours(theirs))
        assert (read.dtype, read.shape) == (array.dtype, ())
        assert read.astype(np.complex128) == element.astype(np.complex128)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_tensorflow_reads_what_is_written(dtype):
    for array in (values(dtype), values(dtype)[0, 0], values(dtype)[:0], values(dtype)[:, ::2]):
        written = Ours()
        write_tensor("y", np.asarray(array), written)
        theirs = tensor_pb2.TensorProto.FromString(written.SerializeToString())
        back = tf.make_ndarray(theirs)
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back.astype(np.complex128), array.astype(np.complex128))
        assert theirs.HasField("tensor_shape")


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_list_that_is_too_short_goes_on_with_its_last_element(dtype):
    element = values(dtype)[1, 1]
    theirs = tf.make_tensor_proto(element, dtype=element.dtype, shape=())
    for size in (2, 3):
        theirs.tensor_shape.dim.add(size=size)
    read = read_tensor("x", ours(theirs))
    np.testing.assert_array_equal(read.astype(np.complex128), np.full((2, 3), element).astype(np.complex128))


def test_several_elements_are_followed_by_the_last_of_them():
    theirs = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[1, 2])
    theirs.tensor_shape.dim.add(size=5)
    assert tf.make_ndarray(theirs).tolist() == read_tensor("x", ours(theirs)).tolist() == [1, 2, 2, 2, 2]


def test_no_elements_are_zeros():
    theirs = tensor_pb2.TensorProto(dtype=types_pb2.DT_INT64)
    theirs.tensor_shape.dim.add(size=3)
    assert tf.constant(0, tf.int64, [3]).numpy().tolist() == read_tensor("x", ours(theirs)).tolist()


def test_strings_are_bytes():
    theirs = tf.make_tensor_proto([[b"a", "bé".encode()], [b"\xff", b""]])
    read = read_tensor("text", ours(theirs))
    assert read.tolist() == tf.make_ndarray(theirs).tolist() == [[b"a", "bé".encode()], [b"\xff", b""]]
    one = tf.make_tensor_proto("a", shape=[3])
    assert read_tensor("text", ours(one)).tolist() == [b"a", b"a", b"a"]


def test_a_large_tensor_is_a_view_of_the_message():
    array = np.arange(10_000, dtype=np.float32)
    read = read_tensor("x", ours(tf.make_tensor_proto(array)))
    np.testing.assert_array_equal(read, array)
    assert read.base is not None


def proto(dtype=types_pb2.DT_FLOAT, shape=(), **fields):
    message = Ours(dtype=dtype, **fields)
    message.tensor_shape.SetInParent()
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    return message


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        (proto(shape=[-1], float_val=[1]), "shape [-1]"),
        (proto(shape=[2**62, 2**62], float_val=[1]), "1 elements for shape [4611686018427387904, 4611686018427387904]"),
        (proto(shape=[2**62, 2**62], tensor_content=b"1234"), "4 bytes of tensor_content"),
        (proto(shape=[2**32, 2**32], tensor_content=b"1234"), "4 bytes of tensor_content"),
        (proto(shape=[MOST_REPEATED // 4 + 1], float_val=[1]), "1 elements for shape [16777217]"),
        (proto(shape=[2], tensor_content=b"123"), "3 bytes of tensor_content"),
        (proto(shape=[1], float_val=[1, 2]), "2 elements"),
        (proto(shape=[0], float_val=[1]), "1 elements"),
        (proto(shape=[0, 2**62, 2**62]), "shape [0, 4611686018427387904, 4611686018427387904]"),
        (proto(types_pb2.DT_STRING, [2**62, 0, 4]), "shape [4611686018427387904, 0, 4]"),
        (proto(shape=[1] * 65, float_val=[1]), "65 axes"),
        (proto(types_pb2.DT_INVALID), "dtype 0"),
        (proto(types_pb2.DT_RESOURCE), "dtype 20"),
        (proto(types_pb2.DT_FLOAT_REF), "dtype 101"),
        (proto(99), "dtype 99"),
        (proto(types_pb2.DT_STRING, [1], tensor_content=b"1"), "tensor_content"),
        (proto(types_pb2.DT_INT8, [1], int_val=[128]), "the value 128"),
        (proto(types_pb2.DT_UINT8, [1], int_val=[-1]), "the value -1"),
        (proto(types_pb2.DT_INT4, [1], int_val=[8]), "the value 8"),
        (proto(types_pb2.DT_HALF, [1], half_val=[70_000]), "the value 70000"),
        (proto(types_pb2.DT_BOOL, [1], tensor_content=b"\x02"), "the byte 2"),
        (proto(types_pb2.DT_COMPLEX64, [1], scomplex_val=[1, 2, 3]), "3 parts in scomplex_val"),
    ],
)
def test_hostile_tensors_are_refused_with_what_was_seen(message, seen):
    with pytest.raises(InvalidInput) as caught:
        read_tensor("x" * 1000, message)
    assert caught.value.seen == seen
    assert len(caught.value.where) <= 100


def test_an_unknown_rank_is_refused():
    message = Ours(dtype=1, float_val=[1])
    message.tensor_shape.unknown_rank = True
    with pytest.raises(InvalidInput, match="no tensor"):
        read_tensor("x", message)


def test_a_dtype_without_a_type_is_refused_when_written():
    with pytest.raises(InvalidInput, match="no type"):
        write_tensor("y", np.zeros(1, ml_dtypes.float8_e4m3b11fnuz), Ours())
