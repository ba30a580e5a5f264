"""A client written for a SavedModel of ours gets the same numbers when TensorFlow Serving gives way to servax."""

import json

import grpc
import httpx2
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2, prediction_service_pb2_grpc

import servax
from bundle_toys import PARAMS, make_function, predict_by_numpy, write_bundle
from servax.stages.buckets import Bucket
from servax.targets import savedmodel

# Names that TensorFlow does not take as they are.
DOTTED = make_function(
    "predict",
    {"image.left": "float32[batch, length, 4]", "_scale": "float32[batch]"},
    {"y": "float32[batch, length, 4]", "sum.of": "float32[batch]"},
    lambda params, state, inputs: (
        None,
        {
            "y": (y := inputs["image.left"] @ params["dense"]["w"] + params["dense"]["b"]),
            "sum.of": y.sum((1, 2)) * inputs["_scale"],
        },
    ),
)
# A length that has to be known, so that the SavedModel has a signature for one bucket alone.
PAIRS = make_function(
    "pairs",
    {"x": "float32[batch, length]"},
    {"y": "float32[batch]"},
    lambda params, state, inputs: (
        None,
        {"y": jnp.sum(inputs["x"][:, ::2] if inputs["x"].shape[1] > 4 else inputs["x"], 1) + params["dense"]["b"][1]},
    ),
)
BUCKETS = (Bucket.of(batch=2, length=3), Bucket.of(batch=4, length=8))
FUNCTIONS = {
    "predict": (DOTTED, BUCKETS),
    "pairs": (PAIRS, (Bucket.of(batch=2, length=4), Bucket.of(batch=2, length=8))),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    written = write_bundle(
        tmp_path_factory.mktemp("bundles") / "toy.bundle", FUNCTIONS, PARAMS, symbolic=True, executables=True
    )
    savedmodel.write(written, written.root / savedmodel.DIRECTORY)
    return written


@pytest.fixture(scope="module")
def signatures(bundle):
    loaded = tf.saved_model.load(str(bundle.root / savedmodel.DIRECTORY))
    return loaded.signatures


@pytest.fixture(scope="module")
def server(bundle):
    with servax.load(bundle.root, name="toy") as servable, servax.serve(servable, port=0, grpc_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def requests(bundle):
    """The warm-up requests of the SavedModel, and after them the same with other numbers."""
    path = bundle.root / savedmodel.DIRECTORY / "assets.extra" / "tf_serving_warmup_requests"
    random = np.random.default_rng(0)
    found = []
    for record in tf.data.TFRecordDataset(str(path)):
        request = prediction_log_pb2.PredictionLog.FromString(record.numpy()).predict_log.request
        found.append(request)
        other = type(request)()
        other.CopyFrom(request)
        for name, tensor in request.inputs.items():
            shape = tf.make_ndarray(tensor).shape
            other.inputs[name].CopyFrom(tf.make_tensor_proto(random.normal(size=shape).astype(np.float32)))
        found.append(other)
    return found


def test_the_requests_reach_every_signature(requests, signatures):
    asked = {request.model_spec.signature_name for request in requests}
    assert asked == set(signatures) - {"serving_default"}
    assert asked == {"predict", "pairs", "pairs_batch_2_length_4"}


def expected(request, signatures):
    inputs = {name: tf.constant(tf.make_ndarray(tensor)) for name, tensor in request.inputs.items()}
    outputs = signatures[request.model_spec.signature_name](**inputs)
    return {name: tensor.numpy() for name, tensor in outputs.items()}


def same(answer, wanted):
    assert set(answer) == set(wanted)
    for name, array in wanted.items():
        assert np.shape(answer[name]) == array.shape
        np.testing.assert_allclose(answer[name], array, rtol=1e-5, atol=1e-5)


def test_over_grpc(server, requests, signatures):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for request in requests:
            response = stub.Predict(request, timeout=60)
            assert response.model_spec.signature_name == request.model_spec.signature_name
            same(
                {name: tf.make_ndarray(tensor) for name, tensor in response.outputs.items()},
                expected(request, signatures),
            )


def test_over_rest(server, requests, signatures):
    with httpx2.Client(base_url=server.url) as http:
        for request in requests:
            wanted = expected(request, signatures)
            inputs = {name: tf.make_ndarray(tensor).tolist() for name, tensor in request.inputs.items()}
            body = {"signature_name": request.model_spec.signature_name}
            answer = http.post("/v1/models/toy:predict", content=json.dumps({**body, "inputs": inputs}))
            assert answer.status_code == 200, answer.text
            outputs = answer.json()["outputs"]
            same(outputs if len(wanted) > 1 else {next(iter(wanted)): outputs}, wanted)
            rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
            answer = http.post("/v1/models/toy:predict", content=json.dumps({**body, "instances": rows}))
            predictions = answer.json()["predictions"]
            if len(wanted) == 1:
                same({next(iter(wanted)): predictions}, wanted)
            else:
                same({name: [row[name] for row in predictions] for name in wanted}, wanted)


def test_the_numbers_are_those_of_numpy_too(server):
    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    body = {"inputs": {"image_left": x.tolist(), "arg__scale": [1, 2]}}
    outputs = httpx2.post(f"{server.url}/v1/models/toy:predict", content=json.dumps(body)).json()["outputs"]
    y = predict_by_numpy(x)
    np.testing.assert_allclose(outputs["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs["sum_of"], y.sum((1, 2)) * [1, 2], rtol=1e-5, atol=1e-5)
