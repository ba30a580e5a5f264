"""Triton's own HTTP clients, unchanged, sync and aio."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from echo_servable import EchoServable
from servax.protocols.dataplane import DataPlane
from servax.server.background import serve

DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}


@pytest.fixture(scope="module")
def echo():
    return EchoServable()


@pytest.fixture(scope="module")
def address(echo):
    with serve(DataPlane([echo]), port=0) as server:
        yield server.url.removeprefix("http://")


@pytest.fixture(scope="module")
def client(address):
    with triton.InferenceServerClient(address) as connected:
        yield connected


def tensor(array, datatype, *, binary=True):
    sent = triton.InferInput("x", list(array.shape), datatype)
    sent.set_data_from_numpy(array, binary_data=binary)
    return sent


def sample(dtype):
    values = np.arange(6).reshape(2, 3)
    return values % 2 == 0 if dtype == "bool" else values.astype(dtype)


def function(name):
    return {"parameters": {"function": name}}


@pytest.mark.parametrize("dtype", DATATYPES)
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("answer", [True, False])
def test_every_dtype(client, dtype, binary, answer):
    if dtype == "float16" and not (binary and answer):
        return  # half precision travels in binary only
    array = sample(dtype)
    asked = [triton.InferRequestedOutput("y", binary_data=answer)]
    result = client.infer(
        "echo", [tensor(array, DATATYPES[dtype], binary=binary)], outputs=asked, **function(f"echo_{dtype}")
    )
    back = result.as_numpy("y")
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert ("parameters" in result.get_output("y")) is answer


def test_bfloat16(client):
    array = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    result = client.infer("echo", [tensor(array, "BF16")], **function("echo_bfloat16"))
    np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_texts(client):
    array = np.array(["a", "", "ü"], object)
    for binary in (True, False):
        result = client.infer("echo", [tensor(array, "BYTES", binary=binary)], **function("echo_string"))
        assert [text.decode() for text in result.as_numpy("y")] == ["a", "", "ü"]


@pytest.mark.parametrize("request_packing", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_packing", [None, "gzip", "deflate"])
def test_compression(client, request_packing, response_packing):
    array = np.zeros((50, 50), np.float32)
    for binary in (True, False):
        result = client.infer(
            "echo",
            [tensor(array, "FP32", binary=binary)],
            outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
            request_compression_algorithm=request_packing,
            response_compression_algorithm=response_packing,
        )
        np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_requests_in_the_background(client):
    waiting = [client.async_infer("echo", [tensor(np.full((1, 2), each, np.float32), "FP32")]) for each in range(8)]
    assert [each.get_result().as_numpy("y")[0, 0] for each in waiting] == list(range(8))


def test_ids_priorities_and_deadlines(client, echo):
    array = np.ones((1, 1), np.float32)
    result = client.infer(
        "echo", [tensor(array, "FP32")], model_version="1", request_id="seven", priority=3, timeout=60_000_000
    )
    assert (result.get_response()["id"], result.get_response()["model_version"]) == ("seven", "1")
    assert (echo.requests[-1].priority, echo.requests[-1].deadline is None) == (3, False)


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1")
    assert not client.is_model_ready("nope")
    server = client.get_server_metadata()
    assert {"binary_tensor_data", "model_configuration", "statistics"} <= set(server["extensions"])
    model = client.get_model_metadata("echo")
    assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert client.get_model_repository_index()[0]["state"] == "READY"
    config = client.get_model_config("echo")
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["name"] == "echo"


def test_statistics(client):
    for each in (
        client.get_inference_statistics(),
        client.get_inference_statistics("echo"),
        client.get_inference_statistics("echo", "1"),
    ):
        (model,) = each["model_stats"]
        assert (model["name"], model["version"]) == ("echo", "1")
        for step in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit"):
            assert set(model["inference_stats"][step]) == {"count", "ns"}
    with pytest.raises(InferenceServerException, match="no model 'nope'"):
        client.get_inference_statistics("nope")


def test_errors_are_triton_s_exceptions(client):
    with pytest.raises(InferenceServerException, match="length=0") as caught:
        client.infer("echo", [tensor(np.ones((1, 0), np.float32), "FP32")])
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match=r"float32\[batch, length\]"):
        client.infer("echo", [tensor(np.ones((1, 1), np.int32), "INT32")])
    with pytest.raises(InferenceServerException, match="no model 'nope'") as caught:
        client.infer("nope", [tensor(np.ones((1, 1), np.float32), "FP32")])
    assert caught.value.status() == "404"
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="loads and unloads nothing"):
            call("echo")
    for call in (client.get_system_shared_memory_status, client.get_trace_settings, client.get_log_settings):
        with pytest.raises(InferenceServerException, match="servax has no"):
            call()


def test_the_aio_client(address):
    async def scene():
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("echo"))["name"] == "echo"
            array = np.arange(4, dtype=np.float32).reshape(2, 2)
            for binary in (True, False):
                asked = [triton_aio.InferRequestedOutput("y", binary_data=binary)]
                results = await asyncio.gather(
                    *(
                        client.infer(
                            "echo",
                            [tensor(array + each, "FP32", binary=binary)],
                            outputs=asked,
                            request_compression_algorithm="gzip",
                            response_compression_algorithm="gzip",
                        )
                        for each in range(4)
                    )
                )
                for each, result in enumerate(results):
                    np.testing.assert_array_equal(result.as_numpy("y"), array + each)
            with pytest.raises(InferenceServerException, match="no model"):
                await client.infer("nope", [tensor(array, "FP32")])

    asyncio.run(asyncio.wait_for(scene(), 60))
