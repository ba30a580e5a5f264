"""Whatever a client of TensorFlow Serving's protocols sends is read as NumPy reads it, or refused as wrong input."""

import json
import math

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.tfserving.grpc import schema
from servax.protocols.tfserving.inputs import from_inputs, from_instances, read
from servax.protocols.tfserving.outputs import write_outputs
from servax.protocols.tfserving.tensors import read_tensor, write_tensor

Tensor = schema()["tensorflow.TensorProto"]
SIGNATURES = [
    (Signature((TensorSpec.parse("x", "float32[batch, length]"),)), {}),
    (Signature((TensorSpec.parse("tokens", "int32[batch, length]"),)), {"text": "tokens"}),
    (Signature((TensorSpec.parse("scale", "bfloat16[batch] = 1.0"), TensorSpec.parse("x", "bool[batch, 2]"))), {}),
    (Signature((TensorSpec.parse("x", "int4[]"),), batch=None), {}),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
NAMES = st.sampled_from(["x", "tokens", "text", "scale", "b64", "instances", ""])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)


def refused_in_few_words(error):
    assert len(str(error)) < 2000


@given(VALUES, st.sampled_from(SIGNATURES))
@settings(max_examples=400, deadline=None)
def test_any_json_is_read_or_refused(value, signature):
    sent = read(json.dumps(value).encode())  # with bare NaN and Infinity
    for form in (from_instances, from_inputs):
        try:
            tensors = form(sent, *signature)
        except InvalidInput as error:
            refused_in_few_words(error)
            continue
        for name, tensor in tensors.items():
            assert name in ("x", "tokens", "text", "scale")
            assert name == "text" or tensor.size


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from(["float32", "float64", "float16", "int8", "int64", "uint64", "bool"]),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_rows_columns_and_answers_are_numpy_s_own(shape, dtype, data):
    limits = {"b": (0, 1), "f": (-1000, 1000)}.get(np.dtype(dtype).kind)
    low, high = limits or (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    count = math.prod(shape)
    array = np.array(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype).reshape(shape)
    signature = Signature((TensorSpec("x", dtype, ("batch", *shape[1:])),))
    text = write_outputs({"x": array}).decode().removeprefix('{"outputs":').removesuffix("}")
    for tensors in (
        from_instances(read(f'{{"instances": {text}}}'.encode())["instances"], signature, {}),
        from_inputs(read(f'{{"inputs": {{"x": {text}}}}}'.encode())["inputs"], signature, {}),
    ):
        assert tensors["x"].dtype == array.dtype
        np.testing.assert_array_equal(tensors["x"], array)
    message = Tensor()
    write_tensor("x", array, message)
    np.testing.assert_array_equal(read_tensor("x", message), array)


@given(
    st.integers(-(2**31), 2**31 - 1) | st.integers(0, 30),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=4),
    st.binary(max_size=40),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    st.binary(max_size=40),
)
@settings(max_examples=400, deadline=None)
def test_any_tensor_proto_is_read_or_refused(dtype, shape, content, integers, noise):
    message = Tensor(
        dtype=dtype, tensor_content=content, int_val=integers, half_val=integers, float_val=[1.0] * len(noise)
    )
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    try:
        message.MergeFromString(noise)
    except DecodeError:
        return
    try:
        array = read_tensor("x", message)
    except InvalidInput as error:
        refused_in_few_words(error)
    else:
        assert array.nbytes <= max(64 * 1024 * 1024, len(content) + len(noise))
