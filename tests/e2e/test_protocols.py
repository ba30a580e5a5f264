"""One real server process, two versions of a model in a store, every protocol: each client gets the same numbers."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
import tensorflow as tf
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

import servax
from bundle_toys import INVERSE, LARGE, PARAMS, PREDICT, SMALL, STATIC, write_bundle

FUNCTIONS = {"predict": (PREDICT, (SMALL, LARGE)), "inverse": (INVERSE, (STATIC,))}
WEIGHTS = {
    "1": PARAMS,
    "2": {"dense": {"b": PARAMS["dense"]["b"] + np.float32(10), "w": -PARAMS["dense"]["w"]}},
}
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
MATRIX = np.array([[2, 0, 0], [0, 4, 1], [0, 0, 8]], np.float32)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Where the process listens, by wire."""
    store = tmp_path_factory.mktemp("store")
    (store / "toy").mkdir()
    for version, params in WEIGHTS.items():
        write_bundle(store / "toy" / version, FUNCTIONS, params, executables=True)
    ports = ("--http", "0", "--grpc", "0", "--tfserving-http", "0", "--tfserving-grpc", "0")
    labels = ("--policy", "all", "--label", "stable=1", "--label", "canary=2")
    command = [sys.executable, "-m", "servax", "serve", str(store), *ports, *labels, "--require", "aot", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = {}
            while "ready" not in told:
                line = process.stdout.readline()
                assert line, process.stderr.read()[-4000:]
                message = json.loads(line)
                told[message.pop("event")] = message
            yield told["listening"]
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log[-4000:]


def by_socket(url, path, body):
    """The answer to a POST that is written byte by byte as a program without any library would."""
    parts = urlsplit(url)
    text = json.dumps(body).encode()
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(head.encode() + text)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, answer = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), received[:2000]
    return json.loads(answer)


def triton_inputs(library, binary=None):
    x = library.InferInput("x", list(X.shape), "FP32")
    x.set_data_from_numpy(X, **({} if binary is None else {"binary_data": binary}))
    return [x]


def open_inference_by_socket(addresses, version):
    tensor = {"name": "x", "shape": list(X.shape), "datatype": "FP32", "data": X.tolist()}
    body = by_socket(addresses["http"], f"/v2/models/toy/versions/{version}/infer", {"inputs": [tensor]})
    assert body["model_version"] == version
    return {each["name"]: np.float32(each["data"]).reshape(each["shape"]) for each in body["outputs"]}


def triton_over_http(addresses, version, *, binary):
    with triton_http.InferenceServerClient(urlsplit(addresses["http"]).netloc) as client:
        outputs = [triton_http.InferRequestedOutput(name, binary_data=binary) for name in ("y", "double.y")]
        result = client.infer("toy", triton_inputs(triton_http, binary), model_version=version, outputs=outputs)
    return {name: result.as_numpy(name) for name in ("y", "double.y")}


def triton_over_grpc(addresses, version):
    with triton_grpc.InferenceServerClient(addresses["grpc"]) as client:
        result = client.infer("toy", triton_inputs(triton_grpc), model_version=version)
    return {name: result.as_numpy(name) for name in ("y", "double.y")}


def triton_on_an_event_loop(library, address, version):
    async def infer():
        async with library.InferenceServerClient(address) as client:
            return await client.infer("toy", triton_inputs(library), model_version=version)

    result = asyncio.run(infer())
    return {name: result.as_numpy(name) for name in ("y", "double.y")}


def tensorflow_serving_over_grpc(address, version, *, label):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "toy"
    if label:
        request.model_spec.version_label = {"1": "stable", "2": "canary"}[version]
    else:
        request.model_spec.version.value = int(version)
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(X))
    with grpc.insecure_channel(address) as channel:
        response = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=60)
    assert response.model_spec.version.value == int(version)
    return {"y": tf.make_ndarray(response.outputs["y"]), "double.y": tf.make_ndarray(response.outputs["double_y"])}


def tensorflow_serving_by_rows(url, version):
    path = f"/v1/models/toy/versions/{version}:predict"
    rows = by_socket(url, path, {"instances": X.tolist()})["predictions"]
    return {"y": np.float32([row["y"] for row in rows]), "double.y": np.float32([row["double_y"] for row in rows])}


def tensorflow_serving_by_columns(url, version):
    path = f"/v1/models/toy/labels/{'stable' if version == '1' else 'canary'}:predict"
    outputs = by_socket(url, path, {"inputs": {"x": X.tolist()}})["outputs"]
    return {"y": np.float32(outputs["y"]), "double.y": np.float32(outputs["double_y"])}


def of_servax(addresses, version):
    """Without a version, which means the newest."""
    with servax.load(addresses["http"]) as remote:
        return dict(remote.predict(x=X))


CLIENTS = {
    "OIP, socket": open_inference_by_socket,
    "tritonclient, HTTP, JSON": lambda told, version: triton_over_http(told, version, binary=False),
    "tritonclient, HTTP, binary": lambda told, version: triton_over_http(told, version, binary=True),
    "tritonclient, HTTP, aio": lambda told, version: triton_on_an_event_loop(
        triton_http_aio, urlsplit(told["http"]).netloc, version
    ),
    "tritonclient, gRPC": triton_over_grpc,
    "tritonclient, gRPC, aio": lambda told, version: triton_on_an_event_loop(triton_grpc_aio, told["grpc"], version),
    "TF Serving, gRPC": lambda told, version: tensorflow_serving_over_grpc(told["grpc"], version, label=False),
    "TF Serving, gRPC, its port": lambda told, version: tensorflow_serving_over_grpc(
        told["tfserving_grpc"], version, label=True
    ),
    "TF Serving, rows": lambda told, version: tensorflow_serving_by_rows(told["http"], version),
    "TF Serving, columns, its port": lambda told, version: tensorflow_serving_by_columns(
        told["tfserving_http"], version
    ),
    "servax": of_servax,
}


@pytest.fixture(scope="module")
def by_numpy():
    y = {version: X @ params["dense"]["w"] + params["dense"]["b"] for version, params in WEIGHTS.items()}
    return {version: {"y": array, "double.y": 2 * array} for version, array in y.items()}


@pytest.mark.parametrize("version", list(WEIGHTS))
def test_every_client_gets_the_same_numbers(addresses, by_numpy, version):
    answers = {
        name: client(addresses, version) for name, client in CLIENTS.items() if (name, version) != ("servax", "1")
    }
    first = next(iter(answers.values()))
    for name, wanted in by_numpy[version].items():
        np.testing.assert_allclose(first[name], wanted, rtol=1e-5, atol=1e-5)
    for client, answer in answers.items():
        for name, array in first.items():
            assert answer[name].dtype == np.float32, client
            np.testing.assert_array_equal(answer[name], array, err_msg=client)


def test_another_function_over_every_protocol(addresses):
    tensor = {"name": "x", "shape": [3, 3], "datatype": "FP32", "data": MATRIX.tolist()}
    body = {"inputs": [tensor], "parameters": {"function": "inverse"}}
    by_rest = by_socket(addresses["http"], "/v2/models/toy/infer", body)["outputs"][0]["data"]
    body = {"inputs": MATRIX.tolist(), "signature_name": "inverse"}
    by_tensorflow_serving = by_socket(addresses["tfserving_http"], "/v1/models/toy:predict", body)["outputs"]
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "toy", "inverse"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(MATRIX))
    with grpc.insecure_channel(addresses["tfserving_grpc"]) as channel:
        response = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=60)
    with triton_grpc.InferenceServerClient(addresses["grpc"]) as client:
        x = triton_grpc.InferInput("x", [3, 3], "FP32")
        x.set_data_from_numpy(MATRIX)
        by_triton = client.infer("toy", [x], parameters={"function": "inverse"}).as_numpy("y")
    np.testing.assert_allclose(by_triton, np.linalg.inv(MATRIX), rtol=1e-6)
    for answer in (np.float32(by_rest).reshape(3, 3), np.float32(by_tensorflow_serving)):
        np.testing.assert_array_equal(answer, by_triton)
    np.testing.assert_array_equal(tf.make_ndarray(response.outputs["y"]), by_triton)
