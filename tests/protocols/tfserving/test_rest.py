"""Requests and answers of TensorFlow Serving's page "RESTful API", and what may come in their place."""

import asyncio
import gzip
import json
import math

import httpx2
import numpy as np
import pytest
import tfserving_toys as toys

import serving_toys
from servax.protocols.bodies import Limits
from servax.protocols.dataplane import DataPlane
from servax.protocols.tfserving.rest import TFServing
from servax.runtime.servable import State


@pytest.fixture(scope="module")
def plane():
    with toys.servable("123") as first, toys.servable("124", times=2, plus=1) as second:
        yield toys.plane(first, second, labels={"stable": "123", "canary": "124"})


@pytest.fixture(scope="module")
def http(plane):
    return client(plane)


def client(plane: DataPlane, *, timings=True, **limits):
    """Calls the protocol as the server's application does."""
    serving = TFServing(plane, limits=Limits(**limits), timings=timings)

    async def app(scope, receive, send):
        await serving.handle(scope["path"].removeprefix("/v1"), scope, receive, send)

    async def ask(method, path, **request):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as session:
            return await session.request(method, path, **request)

    return lambda method, path, **request: asyncio.run(ask(method, path, **request))


MODEL = "/v1/models/half_plus_three"


def predict(http, body, path=f"{MODEL}/versions/123:predict", **request):
    return http("POST", path, content=body if isinstance(body, bytes) else json.dumps(body), **request)


def refused(response, status=400):
    assert response.status_code == status, response.text
    message = response.json()
    assert list(message) == ["error"]
    return message["error"]


def test_the_documentations_prediction(http):
    response = predict(http, b'{"instances": [1.0,2.0,5.0]}')
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json() == {"predictions": [3.5, 4.0, 5.5]}
    assert predict(http, {"inputs": [1.0, 2.0, 5.0]}).json() == {"outputs": [3.5, 4.0, 5.5]}
    assert predict(http, {"instances": [{"x": 1}, {"x": 2}]}).json() == {"predictions": [3.5, 4.0]}
    assert predict(http, {"inputs": {"x": [1, 2]}, "signature_name": "serving_default"}).json() == {"outputs": [3.5, 4]}


def test_the_documentations_status(http):
    version = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    assert http("GET", f"{MODEL}/versions/123").json() == {"model_version_status": [{"version": "123", **version}]}
    assert http("GET", MODEL).json() == {
        "model_version_status": [{"version": "123", **version}, {"version": "124", **version}]
    }
    assert http("GET", f"{MODEL}/labels/canary").json() == {"model_version_status": [{"version": "124", **version}]}


def test_a_failed_version_says_why(http):
    failed = toys.servable("7")
    failed._lifecycle.fail("it broke")
    status = client(toys.plane(failed))("GET", MODEL).json()["model_version_status"]
    assert status == [
        {"version": "7", "state": "END", "status": {"error_code": "INTERNAL", "error_message": "it broke"}}
    ]
    assert failed.state is State.FAILED


def test_metadata_are_signature_definitions(http):
    message = http("GET", f"{MODEL}/metadata").json()
    assert message["model_spec"] == {"name": "half_plus_three", "signature_name": "", "version": "124"}
    signatures = message["metadata"]["signature_def"]["signature_def"]
    assert set(signatures) == {"serving_default", *toys.MADE}
    assert signatures["serving_default"] == signatures["predict"]
    vector = {"dim": [{"size": "-1", "name": "batch"}], "unknown_rank": False}
    assert signatures["predict"] == {
        "inputs": {"x": {"dtype": "DT_FLOAT", "tensor_shape": vector, "name": "x"}},
        "outputs": {"y": {"dtype": "DT_FLOAT", "tensor_shape": vector, "name": "y"}},
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }
    assert signatures["echo_bfloat16"]["outputs"]["y"]["tensor_shape"]["dim"][1] == {"size": "2", "name": ""}
    assert http("GET", f"{MODEL}/versions/123/metadata").json()["model_spec"]["version"] == "123"
    assert http("GET", f"{MODEL}/labels/stable/metadata").json()["model_spec"]["version"] == "123"


def test_metadata_are_what_tensorflows_own_message_reads(http):
    from google.protobuf import json_format
    from tensorflow_serving.apis import get_model_metadata_pb2

    definitions = http("GET", f"{MODEL}/metadata").json()["metadata"]["signature_def"]
    read = json_format.ParseDict(definitions, get_model_metadata_pb2.SignatureDefMap())
    assert read.signature_def["split"].inputs["x"].tensor_shape.dim[0].size == -1
    from tensorflow_serving.apis import get_model_status_pb2

    status = json_format.ParseDict(http("GET", MODEL).json(), get_model_status_pb2.GetModelStatusResponse())
    assert [each.version for each in status.model_version_status] == [123, 124]


def test_versions_and_labels_answer_with_their_own_parameters(http):
    for path, y in (("versions/123", 3.5), ("labels/stable", 3.5), ("versions/124", 3.0), ("labels/canary", 3.0)):
        assert predict(http, {"instances": [1]}, f"{MODEL}/{path}:predict").json() == {"predictions": [y]}
    assert predict(http, {"instances": [1]}, f"{MODEL}:predict").json() == {"predictions": [3.0]}


def test_several_outputs_and_an_optional_input(http):
    name = {"signature_name": "split"}
    assert predict(http, {"instances": [[1, 2], [3, 4]], **name}).json() == {
        "predictions": [{"scaled": [1.0, 2.0], "total": 3.0}, {"scaled": [3.0, 4.0], "total": 7.0}]
    }
    rows = [{"x": [1, 2], "scale": 2}, {"x": [3, 4], "scale": 0.5}]
    assert predict(http, {"instances": rows, **name}).json() == {
        "predictions": [{"scaled": [2.0, 4.0], "total": 6.0}, {"scaled": [1.5, 2.0], "total": 3.5}]
    }
    assert predict(http, {"inputs": {"x": [[1, 2], [3, 4]], "scale": [2, 0.5]}, **name}).json() == {
        "outputs": {"scaled": [[2.0, 4.0], [1.5, 2.0]], "total": [6.0, 3.5]}
    }


def test_an_output_without_axes_is_given_in_columns_only(http):
    body = {"inputs": [1, 2, 3], "signature_name": "whole"}
    assert predict(http, body).json() == {"outputs": 6.0}
    assert "columnar" in refused(predict(http, {"instances": [1, 2, 3], "signature_name": "whole"}))


def test_nan_and_infinity_travel_both_ways(http):
    response = predict(http, b'{"instances": [0, -0.0, Infinity, NaN], "signature_name": "divide"}')
    assert response.content == b'{"predictions":[Infinity,-Infinity,0.0,NaN]}'
    read = json.loads(predict(http, b'{"instances": [NaN, 1]}').content)["predictions"]
    assert math.isnan(read[0])
    assert read[1] == 3.5


@pytest.mark.parametrize("dtype", toys.ECHOED)
def test_every_dtype_with_a_form_in_json(http, dtype):
    values = [True, False] if dtype == "bool" else [3, 4]
    expected = [[value, value] for value in values]
    assert predict(http, {"instances": values, "signature_name": f"echo_{dtype}"}).json() == {"predictions": expected}


def test_complex_outputs_are_refused_before_anything_runs(http):
    assert "complex64" in refused(predict(http, {"instances": [1], "signature_name": "complex"}))


def test_texts(tmp_path):
    with serving_toys.reading_toy(serving_toys.word_tokenizer(tmp_path, {"[UNK]": 0, "one": 1, "two": 2})) as servable:
        ask = client(DataPlane([servable]))

        def total(body):
            return ask("POST", "/v1/models/toy:predict", content=json.dumps(body)).json()

        (text,) = servable.texts["total"]
        assert total({"instances": ["one two", "two two two"]}) == {"predictions": [3, 6]}
        assert total({"instances": [{text: "one"}, {text: {"b64": "dHdv"}}]}) == {"predictions": [1, 2]}
        assert total({"inputs": {text: ["one", "two one"]}}) == {"outputs": [1, 3]}
        assert total({"instances": [[1, 2, 3]]}) == {"predictions": [6]}
        signature = ask("GET", "/v1/models/toy/metadata").json()["metadata"]["signature_def"]["signature_def"]["total"]
        assert signature["inputs"][text]["dtype"] == "DT_STRING"


@pytest.mark.parametrize("verb", ["classify", "regress"])
def test_classify_and_regress_say_that_there_is_no_such_signature(http, verb):
    message = refused(predict(http, {"examples": [{"x": 1.0}]}, f"{MODEL}:{verb}"))
    assert f"no signature for {verb}" in message
    assert ":predict" in message
    refused(predict(http, {"examples": []}, f"/v1/models/nope:{verb}"), 404)


def test_what_is_not_there(http):
    assert "half" in refused(predict(http, {"instances": [1.0, 5.0]}, "/v1/models/half:predict"), 404)
    refused(http("GET", "/v1/models/half"), 404)
    refused(http("GET", "/v1/models/half/metadata"), 404)
    refused(predict(http, {"instances": [1]}, f"{MODEL}/versions/9:predict"), 404)
    refused(http("GET", f"{MODEL}/versions/9"), 404)
    # TensorFlow Serving counts an unknown label, and an unknown signature, as a wrong argument.
    assert "no label 'nope'" in refused(predict(http, {"instances": [1]}, f"{MODEL}/labels/nope:predict"))
    refused(http("GET", f"{MODEL}/labels/nope"))
    assert "serving_default" in refused(predict(http, {"instances": [1], "signature_name": "nope"}))
    for path in (
        "/v1",
        "/v1/",
        "/v1/models",
        "/v1/models/",
        f"{MODEL}/nope",
        f"{MODEL}:nope",
        f"{MODEL}/versions/:predict",
    ):
        refused(http("GET", path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", ":predict", "POST"), ("POST", "", "GET"), ("PUT", "/metadata", "GET")]
)
def test_other_methods_are_refused(http, method, path, allowed):
    response = http(method, f"{MODEL}{path}")
    refused(response, 405)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b'"text"',
        b"{}",
        b'{"instances": [1], "inputs": [1]}',
        b'{"instances": []}',
        b'{"instances": {}}',
        b'{"instances": null}',
        b'{"instances": "a"}',
        b'{"instances": [[]]}',
        b'{"instances": [null]}',
        b'{"instances": [true]}',
        b'{"instances": ["1"]}',
        b'{"instances": [{"b64": "AAAA"}]}',
        b'{"instances": [[1], [1, 2]]}',
        b'{"instances": [1, [1]]}',
        b'{"instances": [1e39]}',
        b'{"instances": [{"x": 1}, {"y": 1}]}',
        b'{"instances": [{}]}',
        b'{"inputs": {}}',
        b'{"inputs": []}',
        b'{"inputs": {"x": {"x": [1]}}}',
        b'{"inputs": {"x": [1], "y": [1]}}',
        b'{"instances": [1], "signature_name": 100}',
        b'{"instances": [1], "signature_name": ["a"]}',
        b'{"instances": ' + b"[" * 50_000 + b"1" + b"]" * 50_000 + b"}",
        b'{"instances": [' + b"9" * 5000 + b"]}",
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_in_few_words(http, body):
    assert len(refused(predict(http, body))) < 1000


def test_a_wrong_type_names_tensor_place_seen_and_expected(http):
    message = refused(predict(http, {"instances": [1, "x"]}))
    for part in ("x[1]", "'x'", "float32[batch]"):
        assert part in message


def test_more_rows_than_a_bucket_and_limits(plane):
    small = client(plane, max_body=100)
    refused(predict(small, {"instances": [0.123456789] * 100}), 413)
    packed = gzip.compress(json.dumps({"instances": [0] * 1000}).encode())
    assert len(packed) < 100
    refused(predict(small, packed, headers={"content-encoding": "gzip"}), 413)
    packed = gzip.compress(b'{"instances": [1]}')
    assert predict(small, packed, headers={"content-encoding": "gzip"}).json() == {"predictions": [3.5]}


def test_a_deadline_that_has_passed(http):
    refused(predict(http, {"instances": [1]}, headers={"request-timeout-ms": "soon"}))
    refused(predict(http, {"instances": [1]}, headers={"request-timeout-ms": "1e-6"}), 504)


def test_the_times_of_a_request_are_told_if_wanted(http, plane):
    assert "execute;dur=" in predict(http, {"instances": [1]}).headers["server-timing"]
    assert "server-timing" not in predict(client(plane, timings=False), {"instances": [1]}).headers


def test_no_numbers_are_lost_between_client_and_model(http):
    values = np.float32([1 / 3, 1e-38, 3.4e38, 16777217])
    answer = np.float32(predict(http, {"inputs": values.tolist()}).json()["outputs"])
    np.testing.assert_array_equal(answer, values * np.float32(0.5) + np.float32(3))
