"""Tensors in gRPC messages; expected values from Triton's client and from Protocol Buffers' own reader."""

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.open_inference.contents import field, read_tensors, require_plain, write_response
from servax.protocols.open_inference.grpc import schema

SIGNATURE = Signature((TensorSpec.parse("x", "float32[batch]"),))
NUMBERS = {
    "BOOL": [True, False],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "UINT8": [0, 255],
    "UINT16": [0, 2**16 - 1],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "FP32": [0.5, float("-inf")],
    "FP64": [1e300, 2.0**-1074],
}
FIELD = {
    "BOOL": "bool",
    "INT8": "int",
    "INT16": "int",
    "INT32": "int",
    "INT64": "int64",
    "UINT8": "uint",
    "UINT16": "uint",
    "UINT32": "uint",
    "UINT64": "uint64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}
"""As the protocol's specification assigns them."""


def received(sent):
    """A message of Triton's as our own class reads it."""
    return schema()["inference.ModelInferRequest"].FromString(sent.SerializeToString())


def typed(datatype, values, shape, name="x"):
    contents = service_pb2.InferTensorContents(**{f"{FIELD.get(datatype, 'fp32')}_contents": values})
    tensor = service_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=contents
    )
    return received(service_pb2.ModelInferRequest(inputs=[tensor]))


def packed(array, datatype):
    tensor = triton.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    message = service_pb2.ModelInferRequest(inputs=[tensor._get_tensor()])
    message.raw_input_contents.append(tensor._get_content())
    return received(message)


@pytest.mark.parametrize(("datatype", "values"), NUMBERS.items())
def test_numbers_in_typed_contents_and_as_triton_packs_them(datatype, values):
    name = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}.get(datatype, datatype.lower())
    expected = np.array(values, name)
    for request in (typed(datatype, values, [2, 1]), packed(expected.reshape(2, 1), datatype)):
        array = read_tensors(request, SIGNATURE)["x"]
        assert array.dtype == expected.dtype
        assert array.tolist() == expected.reshape(2, 1).tolist()


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_half_precision_travels_in_raw_contents_alone(datatype, dtype):
    request = schema()["inference.ModelInferRequest"]()
    request.inputs.add(name="x", datatype=datatype, shape=[2])
    request.raw_input_contents.append(np.array([1.5, -2], dtype).tobytes())
    array = read_tensors(request, SIGNATURE)["x"]
    assert array.dtype == dtype
    assert array.tolist() == [1.5, -2]
    with pytest.raises(InvalidInput, match="which typed contents do not carry"):
        read_tensors(typed(datatype, [1.5], [1]), SIGNATURE)


def test_text_in_typed_contents_and_as_triton_packs_it():
    texts = np.array(["snow ☃", ""], object)
    for request in (typed("BYTES", [text.encode() for text in texts], [2]), packed(texts, "BYTES")):
        assert read_tensors(request, SIGNATURE)["x"].tolist() == texts.tolist()


@pytest.mark.parametrize(
    ("request_", "what", "seen"),
    [
        (typed("INT8", [1, 300], [2]), "out of the range", "300"),
        (typed("UINT16", [2**16], [1]), "out of the range", str(2**16)),
        (typed("FP32", [1], [2]), "wrong number of values", "1 values"),
        (typed("FP32", [], [-1]), "negative size", "shape [-1]"),
        (typed("FP32", [], [0, 2**62, 2**62]), "a shape that no array has", None),
        (typed("FP31", [1], [1]), "unknown datatype", "FP31"),
        (typed("BYTES", [b"\xff"], [1]), "not UTF-8", "invalid start byte"),
    ],
)
def test_typed_contents_that_do_not_fit(request_, what, seen):
    with pytest.raises(InvalidInput, match=what) as caught:
        read_tensors(request_, SIGNATURE)
    assert caught.value.where == "x"
    assert seen is None or caught.value.seen == seen


def test_values_in_the_field_of_another_datatype():
    request = typed("FP32", [1], [1])
    request.inputs[0].datatype = "INT32"
    with pytest.raises(InvalidInput, match="a field of another datatype") as caught:
        read_tensors(request, SIGNATURE)
    assert (caught.value.seen, caught.value.expected) == ("fp32_contents", "int_contents for INT32")


def test_names_that_an_error_repeats_are_cut():
    with pytest.raises(InvalidInput) as caught:
        read_tensors(typed("FP32", [1], [2], name="n" * 300), SIGNATURE)
    assert caught.value.where == "n" * 97 + "..."


def test_shared_memory_is_refused_by_name():
    tensor = triton.InferInput("x", [1], "FP32")
    tensor.set_shared_memory("region", 4)
    request = received(service_pb2.ModelInferRequest(inputs=[tensor._get_tensor()]))
    with pytest.raises(InvalidInput, match="shared memory"):
        read_tensors(request, SIGNATURE)
    output = triton.InferRequestedOutput("y")
    output.set_shared_memory("region", 4)
    with pytest.raises(InvalidInput, match="shared memory"):
        require_plain([output._get_tensor()])


def test_an_answer_is_what_protocol_buffers_reads():
    tensors = {
        "a": np.float32([[1, 2]]),
        "large": np.arange(1 << 16, dtype=np.int64)[::2],
        "b": np.array(["x", "y"], object),
        "c": np.array([1.5], ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), np.uint8),
    }
    data = write_response(
        schema()["inference.ModelInferResponse"], ("toy", "3"), (("bucket", "batch=1"), ("last", True)), "id", tensors
    )
    read = service_pb2.ModelInferResponse.FromString(data)
    result = triton.InferResult(read)
    assert (read.model_name, read.model_version, read.id) == ("toy", "3", "id")
    assert (read.parameters["bucket"].string_param, read.parameters["last"].bool_param) == ("batch=1", True)
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in read.outputs] == [
        ("a", "FP32", [1, 2]),
        ("large", "INT64", [1 << 15]),
        ("b", "BYTES", [2]),
        ("c", "BF16", [1]),
        ("none", "UINT8", [0, 3]),
    ]
    for name in ("a", "large", "none"):
        np.testing.assert_array_equal(result.as_numpy(name), tensors[name])
    assert deserialize_bytes_tensor(read.raw_output_contents[2]).tolist() == [b"x", b"y"]
    assert read.raw_output_contents[3] == bytes.fromhex("c03f")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2_097_152])
def test_a_field_is_written_as_protocol_buffers_writes_it(size):
    message = service_pb2.ModelInferResponse(raw_output_contents=[b"z" * size])
    assert b"".join(field(0x32, b"z" * size)) == message.SerializeToString()
