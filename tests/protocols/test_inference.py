"""Bodies in every form, written here by hand: what the specification says, byte by byte."""

import io
import json
import struct

import httpx2
import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from echo_servable import DTYPES, EchoServable
from servax.protocols.dataplane import DataPlane
from servax.server.background import serve

DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}
URL = "/v2/models/echo/infer"


@pytest.fixture(scope="module")
def echo():
    return EchoServable()


@pytest.fixture(scope="module")
def http(echo):
    with serve(DataPlane([echo]), port=0) as server, httpx2.Client(base_url=server.url) as client:
        yield client


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def send(http, head, *pieces, length=None, **headers):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if length is not None or pieces:
        named["inference-header-content-length"] = str(len(text) if length is None else length)
    return http.post(URL, content=text + b"".join(pieces), headers=named)


def parts(response):
    """The JSON of a binary answer and what follows it."""
    length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    return json.loads(response.content[:length]), response.content[length:]


def details(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["details"]


def test_golden_bytes_in_and_out(http):
    """The layout of the extension, written out: 1.0 and -2.5 in float32 are 3f800000 and c0200000, little-endian."""
    head = (
        b'{"id":"a","inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}],'
        b'"outputs":[{"name":"y","parameters":{"binary_data":true}}]}'
    )
    response = send(http, head, bytes.fromhex("0000803f000020c0"))
    message, rest = parts(response)
    assert rest == bytes.fromhex("0000803f000020c0")
    assert message == {
        "model_name": "echo",
        "model_version": "1",
        "id": "a",
        "parameters": {"function": "predict", "bucket": "batch=4"},
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}],
    }


def test_golden_bytes_of_texts(http):
    """Each text is four bytes of length, little-endian, and its UTF-8."""
    data = bytes.fromhex("02000000") + b"ab" + bytes(4) + bytes.fromhex("02000000") + "ü".encode()
    head = {
        "inputs": [{"name": "x", "shape": [3], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}],
        "parameters": {"function": "echo_string", "binary_data_output": True},
    }
    message, rest = parts(send(http, head, data))
    assert rest == data
    assert message["outputs"][0]["datatype"] == "BYTES"
    del head["parameters"]["binary_data_output"]
    assert send(http, head, data).json()["outputs"][0]["data"] == ["ab", "", "ü"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_every_dtype_comes_back_to_the_bit(http, data, dtype):
    shape = data.draw(arrays.array_shapes(min_dims=2, max_dims=2, max_side=5))
    kind = dtype_of(dtype)
    raw = data.draw(
        st.binary(min_size=kind.itemsize * shape[0] * shape[1], max_size=kind.itemsize * shape[0] * shape[1])
    )
    array = (
        np.frombuffer(raw, kind).reshape(shape) if dtype != "bool" else (np.frombuffer(raw, "u1") & 1).reshape(shape)
    )
    tensor = {"name": "x", "shape": list(shape), "datatype": DATATYPES[dtype]}
    head = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": array.nbytes}}],
        "parameters": {"function": f"echo_{dtype}", "binary_data_output": True},
    }
    message, rest = parts(send(http, head, array.tobytes()))
    assert rest == array.tobytes()
    assert message["outputs"] == [{**tensor, "name": "y", "parameters": {"binary_data_size": array.nbytes}}]
    packed = {"inputs": [{**tensor, "data": array.tobytes()}], "parameters": {"function": f"echo_{dtype}"}}
    answer = http.post(URL, content=msgpack.packb(packed), headers={"content-type": "application/msgpack"})
    assert answer.headers["content-type"] == "application/msgpack"
    assert msgpack.unpackb(answer.content)["outputs"] == [{**tensor, "name": "y", "data": array.tobytes()}]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in ("float16", "bfloat16")])
def test_every_dtype_of_json_comes_back(http, dtype):
    kind = np.dtype(dtype)
    limits = {"b": [False, True], "f": [-1.5, 0.1]}.get(kind.kind) or [
        int(np.iinfo(kind).min),
        int(np.iinfo(kind).max),
    ]
    values = np.array(limits, kind).tolist()
    for data in (values, [values]):
        for _ in range(2):  # the second time the numbers are read along with the message
            body = {
                "inputs": [{"name": "x", "shape": [1, 2], "datatype": DATATYPES[dtype], "data": data}],
                "parameters": {"function": f"echo_{dtype}"},
            }
            assert send(http, body).json()["outputs"][0]["data"] == values


def test_text_without_a_size_is_refused_before_it_takes_memory(http):
    """A hundred bytes that would be as many strings as they say."""
    body = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|S0', 'fortran_order': False, 'shape': (9999999999, ), }".ljust(
        0x76
    )
    answer = http.post(f"{URL}?function=echo_string", content=body, headers={"content-type": "application/x-npy"})
    assert details(answer)["seen"] == "dtype |S0"


def test_an_output_is_sent_once_however_often_it_is_asked_for(http):
    body = {
        "inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}],
        "outputs": [{"name": "y"}, {"name": "y"}],
    }
    assert [output["name"] for output in send(http, body).json()["outputs"]] == ["y"]


def test_json_and_binary_tensors_mix_in_both_directions(http):
    pair = np.array([[1, 2], [3, 4]], np.float32)
    head = {
        "inputs": [
            {"name": "b", "shape": [2], "datatype": "INT64", "data": [5, 6]},
            {"name": "a", "shape": [2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}},
        ],
        "outputs": [{"name": "b", "parameters": {"binary_data": True}}, {"name": "a"}],
        "parameters": {"function": "several"},
    }
    message, rest = parts(send(http, head, pair.tobytes()))
    assert np.frombuffer(rest, "<i8").tolist() == [5, 6]
    assert [output["name"] for output in message["outputs"]] == ["b", "a"]
    assert message["outputs"][1]["data"] == [1, 2, 3, 4]
    head["parameters"]["binary_data_output"] = True
    head["outputs"] = [{"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}]
    message, rest = parts(send(http, head, pair.tobytes()))
    assert (message["outputs"][0]["data"], rest) == ([5, 6], pair.tobytes())


def test_two_binary_tensors_follow_in_their_order(http):
    a, b = np.ones((1, 2), np.float32), np.array([7], np.int64)
    head = {
        "inputs": [
            {"name": "b", "shape": [1], "datatype": "INT64", "parameters": {"binary_data_size": 8}},
            {"name": "a", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        ],
        "parameters": {"function": "several", "binary_data_output": True},
    }
    message, rest = parts(send(http, head, b.tobytes(), a.tobytes()))
    assert [output["name"] for output in message["outputs"]] == ["a", "b"]
    assert rest == a.tobytes() + b.tobytes()


def test_a_body_without_json_is_the_one_tensor(http):
    values = np.arange(3, dtype=np.float32)
    message, rest = parts(send(http, b"", values.tobytes(), length=0))
    assert (message["outputs"][0]["shape"], rest) == ([1, 3], values.tobytes())
    refused = details(send(http, b"", values.tobytes() + b"x", length=0))
    assert (refused["where"], refused["seen"], refused["expected"]) == ("x", "13 bytes", "a whole number of 4 bytes")
    refused = details(
        http.post(f"{URL}?function=several", content=b"x", headers={"inference-header-content-length": "0"})
    )
    assert refused["expected"] == "a JSON header that names a, b"
    batch = http.post(
        f"{URL}?function=half&outputs=whole", content=values.tobytes(), headers={"inference-header-content-length": "0"}
    )
    message, rest = parts(batch)
    assert (message["outputs"][0]["shape"], rest) == ([3], values.tobytes())


def tensor(size=8, shape=(1, 2), datatype="FP32", **more):
    return {"name": "x", "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size}, **more}


@pytest.mark.parametrize(
    ("inputs", "sent", "fault"),
    [
        ([tensor()], (8, 10_000), ("header Inference-Header-Content-Length", "10000", "bytes of the body")),
        ([tensor()], (8, -1), ("header Inference-Header-Content-Length", "-1", "bytes of the body")),
        ([tensor()], (8, "9" * 300), ("header Inference-Header-Content-Length", "999...", "bytes of the body")),
        ([tensor()], (8, "1e1"), ("header Inference-Header-Content-Length", "1e1", "bytes of the body")),
        ([tensor()], (7, None), ("x", "7 bytes left for it", "8, as its binary_data_size says")),
        ([tensor()], (9, None), ("the body", "9 bytes after the JSON", "8, the sum of each binary_data_size")),
        ([tensor(10**30)], (8, None), ("x", "8 bytes left for it", "1000000")),
        ([tensor(-1)], (8, None), ("x", "-1", "an integer from 0")),
        ([tensor(True)], (8, None), ("x", "True", "an integer from 0")),
        ([tensor("8")], (8, None), ("x", "'8'", "an integer from 0")),
        ([tensor(7)], (7, None), ("x", "7 bytes", "8 for FP32 of shape [1, 2]")),
        ([tensor(shape=(2, 2))], (8, None), ("x", "8 bytes", "16 for FP32 of shape [2, 2]")),
        ([tensor(shape=(2**32, 2**32))], (8, None), ("x", "8 bytes", "73786976294838206464 for FP32")),
        ([tensor(shape=(2**63, 2))], (8, None), ("x", "shape [9223372036854775808, 2]", "sizes of at most")),
        ([tensor(shape=(-1, -2))], (8, None), ("x", "shape [-1, -2]", "sizes of at least 0")),
        ([tensor(shape=[1] * 70)], (8, None), ("x", "70 axes", "at most 64")),
        ([tensor(shape=(0, 2**62), size=0)], (0, None), ("x", "", "")),
        ([tensor(datatype="FP8")], (8, None), ("x", "FP8", "one of BOOL")),
        ([tensor(data=[1, 2])], (8, None), ("x", "both", "`data` or `binary_data_size`")),
        ([tensor(datatype="BYTES", shape=(1,))], (8, None), ("x", "", "")),
        ([tensor(), tensor()], (16, None), ("x", "two tensors of this name", "one")),
        ([{"name": "x", "shape": [1], "datatype": "FP32"}], (0, None), ("x", "no `data`", "a list of values")),
        (
            [{**tensor(), "parameters": {"shared_memory_region": "r"}}],
            (0, None),
            ("x", "shared_memory_region", "its data in the body"),
        ),
    ],
)
def test_bodies_whose_parts_do_not_fit_say_where(http, inputs, sent, fault):
    (size, length), (where, seen, expected) = sent, fault
    text = json.dumps({"inputs": inputs}).encode()
    refused = details(send(http, text, b"\x01" * size, length=len(text) if length is None else length))
    assert refused["where"] == where
    assert seen.rstrip(".") in refused["seen"]
    assert expected in refused["expected"]
    assert len(json.dumps(refused)) < 1500


def test_a_tensor_said_to_be_binary_needs_the_header(http):
    refused = details(send(http, {"inputs": [tensor()]}))
    assert (refused["where"], refused["expected"]) == ("x", "the header Inference-Header-Content-Length")


@pytest.mark.parametrize("size", [4, 5])
def test_a_truncated_text_is_refused(http, size):
    head = {"inputs": [tensor(size, (1,), "BYTES")], "parameters": {"function": "echo_string"}}
    assert details(send(http, head, b"\xff\xff\xff\x7f" + b"x" * (size - 4)))["where"] == "x"


@pytest.mark.parametrize("value", [1, "true", None, [True]])
def test_flags_are_true_or_false(http, value):
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    refused = details(send(http, {**body, "parameters": {"binary_data_output": value}}))
    assert refused["expected"] == "true or false"
    refused = details(send(http, {**body, "outputs": [{"name": "y", "parameters": {"binary_data": value}}]}))
    assert (refused["where"], refused["expected"]) == ("y", "true or false")


def test_what_outputs_cannot_be_is_said(http):
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    refused = details(send(http, {**body, "outputs": [{"name": "y", "parameters": {"classification": 3}}]}))
    assert "lax.top_k" in refused["remedy"]
    refused = details(send(http, {**body, "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}))
    assert refused["seen"] == "shared_memory_region"


def test_half_precision_travels_in_binary_only(http, echo):
    body = {
        "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1.0, -2.5]}],
        "parameters": {"function": "half"},
    }
    before = len(echo.requests)
    refused = details(send(http, body))
    assert (refused["where"], refused["seen"], refused["expected"]) == ("half", "BF16", "outputs among whole")
    assert '"binary_data_output": true' in refused["remedy"]
    assert '"outputs": [{"name": "whole"}]' in refused["remedy"]
    assert len(echo.requests) == before
    assert send(http, {**body, "outputs": [{"name": "whole"}]}).json()["outputs"][0]["data"] == [1.0, -2.5]
    body["outputs"] = [{"name": "half", "parameters": {"binary_data": True}}]
    assert parts(send(http, body))[1] == bytes.fromhex("803f20c0")  # the upper halves of 3f800000 and c0200000


def test_dtypes_without_a_name_say_what_to_do(http):
    body = {
        "inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}],
        "parameters": {"function": "odd", "binary_data_output": True},
    }
    refused = details(send(http, body))
    assert (refused["where"], refused["seen"]) == ("z", "complex64")
    assert "`x.real` and `x.imag`" in refused["remedy"]


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 1), np.float32)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npy_body_is_answered_with_one(http, array, order):
    response = http.post(
        URL, content=npy(np.asarray(array, order=order)), headers={"content-type": "application/x-npy"}
    )
    assert response.headers["content-type"] == "application/x-npy"
    back = np.load(io.BytesIO(response.content))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_accept_names_the_form_of_the_answer(http):
    array = np.array([[1.5, 2.0]], np.float32)
    body = npy(array)

    def answer(accept, content=body, content_type="application/x-npy"):
        return http.post(URL, content=content, headers={"content-type": content_type, "accept": accept})

    assert answer("application/json").json()["outputs"][0]["data"] == [1.5, 2.0]
    assert answer("text/html, application/json;q=0.9, */*").json()["outputs"][0]["data"] == [1.5, 2.0]
    assert answer("*/*").content == body
    packed = msgpack.unpackb(answer("application/msgpack").content)
    assert packed["outputs"][0]["data"] == array.tobytes()
    assert parts(answer("application/octet-stream"))[1] == array.tobytes()
    message = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.0]}]}
    assert answer("application/x-npy", json.dumps(message), "application/json").content == body
    assert answer("application/x-npy", msgpack.packb(message), "application/x-msgpack").content == body


def test_an_npy_answer_is_one_output(http):
    headers = {"content-type": "application/x-npy"}
    refused = details(http.post(f"{URL}?function=half", content=npy(np.ones(2, np.float32)), headers=headers))
    assert "?outputs=half" in refused["remedy"]
    chosen = http.post(f"{URL}?function=half&outputs=whole", content=npy(np.ones(2, np.float32)), headers=headers)
    assert np.load(io.BytesIO(chosen.content)).tolist() == [1, 1]
    half = http.post(f"{URL}?function=half&outputs=half", content=npy(np.ones(2, np.float32)), headers=headers)
    assert np.load(io.BytesIO(half.content)).view(ml_dtypes.bfloat16).tolist() == [1, 1]
    headers["accept"] = "application/json"
    refused = details(http.post(f"{URL}?function=several", content=npy(np.ones(2, np.float32)), headers=headers))
    assert refused["expected"] == "a, b"


def test_npy_bodies_of_other_dtypes(http):
    headers = {"content-type": "application/x-npy"}

    def answer(array, function):
        return http.post(f"{URL}?function={function}", content=npy(array), headers=headers)

    halves = np.array([[1, 2.5]], ml_dtypes.bfloat16)
    assert answer(halves, "echo_bfloat16").content == npy(halves)
    big = np.array([[1, 2]], ">i4")
    assert np.load(io.BytesIO(answer(big, "echo_int32").content)).tolist() == [[1, 2]]
    for texts in (np.array(["ab", "ü"]), np.array([b"ab", b"c"])):
        back = np.load(io.BytesIO(answer(texts, "echo_string").content))
        assert back.tolist() == texts.astype(str).tolist()


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b"", "magic"),
        (b"hello", ""),
        (npy(np.ones((1, 2), np.float32))[:-1], "7 bytes after the header"),
        (npy(np.ones((1, 2), np.float32)) + b"x", "9 bytes after the header"),
        (npy(np.ones((1, 2), np.float64).astype("c16")), "complex128"),
        (npy(np.zeros(2, [("a", "f4")])), "dtype"),
        (b"\x93NUMPY\x01\x00\xff\xff{", ""),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16, ""),
        (b"\x93NUMPY\x07\x00\x10\x00" + b"(" * 16, ""),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"(" * 16, ""),
        (
            b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(0x76),
            "object",
        ),
        (
            b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -2), }".ljust(0x76),
            "0 bytes",
        ),
        (
            b"\x93NUMPY\x01\x00\x76\x00"
            + b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999), }".ljust(0x76),
            "",
        ),
        (npy(np.array([b"\xff"])), ""),
        (npy(np.array(["ab"])), "<U2"),
        *(
            (
                b"\x93NUMPY\x01\x00\x76\x00"
                + f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (99999999999, ), }}".ljust(0x76).encode(),
                "dtype",
            )
            for dtype in ("|S0", "<U0", "|V0")
        ),
    ],
)
def test_npy_bodies_that_are_none_are_refused(http, body, seen):
    response = http.post(URL, content=body, headers={"content-type": "application/x-npy"})
    refused = details(response)
    assert refused["where"] == "x"
    assert seen in refused["seen"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "not MessagePack"),
        (b"\xc1", "not MessagePack"),
        (b"\xdd\xff\xff\xff\xff", ""),
        (b"\x91" * 100_000, ""),
        (msgpack.packb({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": "abcd"}]}), "not a list"),
        (msgpack.packb({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [True]}]}), "datatype"),
        (msgpack.packb({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": b"abc"}]}), "bytes"),
        (msgpack.packb({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32"}]}), "no data"),
    ],
)
def test_msgpack_bodies_that_are_none_are_refused(http, body, what):
    assert what in details(http.post(URL, content=body, headers={"content-type": "application/msgpack"}))["what"]


def test_msgpack_takes_lists_and_texts(http):
    def answer(function, **tensor):
        message = {"inputs": [{"name": "x", **tensor}], "parameters": {"function": function}, "id": "7"}
        response = http.post(URL, content=msgpack.packb(message), headers={"content-type": "application/msgpack"})
        message = msgpack.unpackb(response.content)
        assert message["id"] == "7"
        return message["outputs"][0]["data"]

    numbers = answer("predict", shape=[2, 1], datatype="FP32", data=[[1], [2.5]])
    assert numbers == struct.pack("<2f", 1, 2.5)
    assert answer("echo_float16", shape=[1, 2], datatype="FP16", data=[1.5, float("nan")]) == struct.pack(
        "<2e", 1.5, float("nan")
    )
    assert answer("echo_string", shape=[2], datatype="BYTES", data=["a", "ü"]) == ["a", "ü"]
    assert answer("echo_string", shape=[1], datatype="BYTES", data=b"\x01\0\0\0a") == ["a"]


@pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity", b"nan"])
def test_numbers_that_json_does_not_have_are_refused_with_the_way_to_send_them(http, token):
    body = b'{"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [' + token + b"]}]}"
    for _ in range(2):
        refused = details(send(http, body))
        assert token.decode() in refused["seen"]
        assert '"NaN", "Infinity"' in refused["expected"]
        good = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        assert send(http, good).status_code == 200


def test_the_way_numbers_are_read_does_not_show(http):
    """A model whose numbers were floats before gets the same answers and errors as one that is asked the first time."""
    fresh = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.1, 2]}]}
    for data, status in (([0.1, 2], 200), ([[0.1, 2]], 200), (["NaN", 2], 200), ([True, 2], 400), ([1e39, 2], 400)):
        assert send(http, fresh).status_code == 200
        body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": data}]}
        answers = [send(http, body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [status, status]
        told = [answer.json().get("details", answer.json().get("outputs")) for answer in answers]
        assert told[0] == told[1]
    integers = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT64", "data": [2**53 + 1]}]}
    integers["parameters"] = {"function": "echo_int64"}
    for _ in range(3):
        assert send(http, integers).json()["outputs"][0]["data"] == [2**53 + 1]
        assert send(http, fresh).status_code == 200


def test_numbers_are_rounded_once(http):
    """float32 values right between two neighbours, and a bit beside: as NumPy rounds them from float64."""
    halfway = 1 + 2**-24
    values = [halfway, np.nextafter(halfway, 2), np.nextafter(halfway, 0), 1e-46, 3.4028235e38, -0.0, 5e-324]
    body = {"inputs": [{"name": "x", "shape": [1, len(values)], "datatype": "FP32", "data": values}]}
    for _ in range(2):
        data = send(http, body).json()["outputs"][0]["data"]
        assert np.array(data, np.float32).tobytes() == np.array(values, np.float64).astype(np.float32).tobytes()


def test_parameters_of_the_request(http, echo):
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    parameters = {"priority": 7, "timeout": 60_000_000, "sequence_id": 3, "sequence_start": True, "mine": "x"}
    assert send(http, {**body, "parameters": parameters}).status_code == 200
    assert echo.requests[-1].priority == 7
    assert echo.requests[-1].deadline is not None
    assert send(http, body, request_priority="4").status_code == 200
    assert echo.requests[-1].priority == 4
    for name, value in (("priority", "high"), ("timeout", -1), ("timeout", True), ("timeout", 10**30), ("function", 3)):
        assert details(send(http, {**body, "parameters": {name: value}}))["where"] == f"parameters.{name}"
