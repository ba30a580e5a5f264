import asyncio
import json
import threading

import httpx2
import jax
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import serving_toys as toys
from servax.protocols.bodies import Limits
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference.rest import OpenInference
from servax.server.app import create_app
from servax.server.background import serve


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


@pytest.fixture(scope="module")
def http(servable):
    with serve(servable, port=0, max_body=100_000) as server, httpx2.Client(base_url=server.url) as client:
        yield client


def tensor(data, shape, datatype="FP32", name="x"):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def infer(http, *inputs, path="/v2/models/toy/infer", **rest):
    return http.post(path, json={"inputs": list(inputs), **rest})


def test_inference_answers_as_the_specification_says(http):
    response = infer(http, tensor([[1, 2, 3]], [1, 3]), id="seven")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    message = response.json()
    assert message["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [3.0, 5.0, 7.0]}]
    assert (message["model_name"], message["model_version"], message["id"]) == ("toy", "1", "seven")
    steps = [part.split(";dur=") for part in response.headers["server-timing"].split(", ")]
    assert [step for step, _ in steps] == ["queue", "pad", "transfer", "execute", "copy"]
    assert all(float(duration) >= 0 for _, duration in steps)


def test_requests_need_no_id(http):
    assert "id" not in infer(http, tensor([1], [1, 1])).json()


def test_a_version_may_be_named(http):
    answer = infer(http, tensor([1], [1, 1]), path="/v2/models/toy/versions/1/infer")
    assert answer.json()["model_version"] == "1"
    wrong = infer(http, tensor([1], [1, 1]), path="/v2/models/toy/versions/2/infer")
    assert wrong.status_code == 404
    assert "no version '2'" in wrong.json()["error"]


def test_a_parameter_names_another_function(http):
    answer = infer(http, tensor([[1, 2], [3, 4]], [2, 2]), parameters={"function": "total"})
    assert answer.json()["outputs"][0]["data"] == [3.0, 7.0]
    lengths = tensor([1, 2], [2], "INT32", "n")
    answer = infer(http, tensor([[1, 2], [3, 4]], [2, 2]), lengths, parameters={"function": "total"})
    assert answer.json()["outputs"][0]["data"] == [1.0, 7.0]
    assert infer(http, tensor([1], [1, 1]), parameters={"function": "nope"}).status_code == 404
    assert infer(http, tensor([1], [1, 1]), parameters={"function": 3}).status_code == 400


def test_outputs_are_chosen_by_name(http):
    assert [each["name"] for each in infer(http, tensor([1], [1, 1]), outputs=[{"name": "y"}]).json()["outputs"]] == [
        "y"
    ]
    wrong = infer(http, tensor([1], [1, 1]), outputs=[{"name": "z"}])
    assert wrong.status_code == 400
    assert wrong.json()["error"] == "there are no such outputs; at outputs; seen z; expected y."


@pytest.mark.parametrize(
    ("inputs", "status", "parts"),
    [
        ([tensor([1], [1, 1], name="z")], 400, ["x: missing", "z: unknown"]),
        ([tensor([1], [1])], 400, ["at x", "float32[1]", "float32[batch, length]"]),
        ([tensor([1, 2], [1, 1])], 400, ["at x", "2 values", "1 for shape [1, 1]"]),
        ([tensor([1], [1, 1]), tensor([1], [1, 1])], 400, ["'x' was sent twice"]),
        ([{"name": "x", "datatype": "FP32", "shape": [1, 1]}], 400, ["'x' has no data"]),
        ([tensor([1] * 17, [1, 17])], 413, ["length=17", "at most 16"]),
        ([tensor([1], [1, 1], "FP16")], 400, ["FP16", "does not carry in JSON"]),
    ],
)
def test_faults_name_tensor_seen_and_expected(http, inputs, status, parts):
    response = infer(http, *inputs)
    assert response.status_code == status
    for part in parts:
        assert part in response.json()["error"]


def test_what_a_request_names_is_repeated_in_short_and_never_logged(http):
    from servax.core.events import Notice, listening

    deep: object = 0
    for _ in range(500):
        deep = [deep]
    long = "z" * 10_000
    told = []
    with listening(lambda event: told.append(event) if isinstance(event, Notice) else None):
        answers = [
            infer(http, tensor([1], [1, 1], name=long)),
            infer(http, tensor([1], [1, 1]), outputs=[{"name": long}]),
            infer(http, tensor([1], [1, 1]), parameters={"function": deep}),
            infer(http, tensor([1], [1] * 3)),
            infer(http, tensor([], [0, 2**62])),
            infer(http, tensor(deep, [1])),
        ]
    for answer in answers:
        details = answer.json()["details"]
        assert (answer.status_code, details["type"]) == (400, "InvalidInput")
        assert {"where", "seen", "expected"} <= set(details)
        assert len(answer.json()["error"]) < 700
    assert "z" * 97 + "..." in answers[0].json()["error"]
    assert not told
    unknown = infer(http, tensor([1], [1, 1]), parameters={"function": long})
    assert (unknown.status_code, unknown.json()["details"]["what"]) == (
        404,
        f"model 'toy' has no function '{'z' * 97}...'",
    )


def test_bodies_are_limited_announced_or_not(http):
    small, large = b" " * 100, b" " * 100_001
    announced = http.post("/v2/models/toy/infer", content=large)
    assert announced.status_code == 413
    assert "100001 bytes" in announced.json()["error"]
    chunked = http.post("/v2/models/toy/infer", content=iter([small, large]))
    assert chunked.status_code == 413
    assert http.post("/v2/models/toy/infer", content=small).status_code == 400


def test_what_is_not_offered_is_said(http):
    packed = http.post("/v2/models/toy/infer", content=b"x", headers={"content-encoding": "br"})
    assert (packed.status_code, packed.json()["details"]["where"]) == (400, "header Content-Encoding")
    get = http.get("/v2/models/toy/infer")
    assert (get.status_code, get.headers["allow"]) == (405, "POST")
    assert (http.post("/v2").status_code, http.post("/v2").headers["allow"]) == (405, "GET")
    for path, word in (
        ("/v2/systemsharedmemory/status", "shared memory"),
        ("/v2/cudasharedmemory/region/r/register", "shared memory"),
        ("/v2/trace/setting", "trace"),
        ("/v2/models/toy/trace/setting", "trace"),
        ("/v2/logging", "logging"),
        ("/v2/models/toy/generate_stream", "infer takes tensors"),
    ):
        absent = http.get(path)
        assert (absent.status_code, word in absent.json()["error"]) == (404, True)


def test_deadlines_come_in_a_header(http):
    url, body = "/v2/models/toy/infer", {"inputs": [tensor([1], [1, 1])]}
    assert http.post(url, json=body, headers={"request-timeout-ms": "60000"}).status_code == 200
    for text in ("soon", "-1", "nan", "inf"):
        refused = http.post(url, json=body, headers={"request-timeout-ms": text})
        assert (refused.status_code, refused.json()["details"]["seen"]) == (400, text)


def test_health_metadata_and_index(http):
    assert http.get("/v2/health/live").json() == {"live": True}
    ready = http.get("/v2/health/ready").json()
    assert (ready["ready"], ready["live"]) == (True, True)
    server = http.get("/v2").json()
    assert (server["name"], set(server)) == ("servax", {"name", "version", "extensions"})
    model = http.get("/v2/models/toy").json()
    assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert model["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}]
    assert (model["name"], model["versions"], model["platform"]) == ("toy", ["1"], "jax_jit")
    assert http.get("/v2/models/toy/versions/1").json() == model
    assert http.get("/v2/models/toy/ready").json()["ready"] is True
    assert http.get("/v2/models/toy/versions/1/ready").json()["name"] == "toy"
    index = http.post("/v2/repository/index").json()
    assert index == [{"name": "toy", "version": "1", "state": "READY", "reason": ""}]
    assert http.post("/v2/repository/index", json={"ready": True}).json() == index
    assert http.post("/v2/repository/index", json={"ready": 1}).status_code == 400
    for verb in ("load", "unload"):
        refused = http.post(f"/v2/repository/models/toy/{verb}", json={})
        assert (refused.status_code, "servax serve STORE" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", ["/v2/models/nope", "/v2/models/nope/ready", "/v2/models/toy/versions/9", "/v2/nope"])
def test_what_is_not_there_is_a_404_with_an_error(http, path):
    response = http.get(path)
    assert response.status_code == 404
    assert isinstance(response.json()["error"], str)


def test_a_model_that_is_not_ready_answers_503():
    with toys.toy("cold") as cold, serve(cold, port=0) as server, httpx2.Client(base_url=server.url) as http:
        assert http.get("/v2/health/live").status_code == 200
        ready = http.get("/v2/health/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert ready.json()["models"][0]["programs"]["left"][0] == "predict@batch=1,length=8"
        model = http.get("/v2/models/cold/ready")
        assert (model.status_code, model.json()["state"]) == (503, "LOADING")
        refused = infer(http, tensor([1], [1, 1]), path="/v2/models/cold/infer")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["details"]["type"] == "NotReady"
        cold.warm()
        assert http.get("/v2/health/ready").status_code == 200


def test_a_client_that_goes_takes_its_request_along():
    servable, held = toys.held_toy()
    ran, done, original = [], threading.Event(), held.loaded.program

    def watched(params, state, inputs):
        ran.append(float(jax.device_get(inputs[0])[0, 0]))
        return original(params, state, inputs)

    held.loaded = type(held.loaded)(watched, "jit")
    body = [json.dumps({"inputs": [tensor([value], [1, 1])]}).encode() for value in (1.0, 2.0)]

    async def request(writer_body: bytes, port: int):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v2/models/toy/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(writer_body)}\r\n\r\n"
        writer.write(head.encode() + writer_body)
        await writer.drain()
        return reader, writer

    async def scene(port: int) -> None:
        first_reader, first = await request(body[0], port)
        await asyncio.to_thread(held.entered.wait)
        _, second = await request(body[1], port)
        while servable.in_flight < 2:
            await asyncio.sleep(0)
        second.close()
        while servable.in_flight > 1:
            await asyncio.sleep(0)
        held.release.set()
        assert b"200 OK" in await first_reader.readline()
        first.close()
        done.set()

    with servable, serve(servable, port=0) as server:
        asyncio.run(asyncio.wait_for(scene(int(server.url.rsplit(":", 1)[1])), 60))
        servable.predict(x=[[3.0]])
    assert ran == [1.0, 3.0]


async def half_sent(port: int):
    """A connection that has sent half of a body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v2/models/toy/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b"{" * 50)
    await writer.drain()
    return reader, writer


def test_an_upload_that_is_not_complete_is_refused_once_the_server_drains(servable):
    async def scene(port: int, plane: DataPlane) -> bytes:
        reader, writer = await half_sent(port)
        plane.closing = True
        answer = await reader.read()  # to the end: the server closes the connection
        writer.close()
        return answer

    plane = DataPlane([servable])
    with serve(plane, port=0) as server:
        answer = asyncio.run(asyncio.wait_for(scene(int(server.url.rsplit(":", 1)[1]), plane), 60))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in head
    details = json.loads(body)["details"]
    assert (details["type"], details["remedy"]) == ("NotReady", "send the request to another server")


def test_a_body_that_does_not_arrive_in_time_is_refused(servable):
    app = OpenInference(DataPlane([servable]), version="1", limits=Limits(body_timeout=0.05), timings=False)
    sent = []

    async def receive():
        if received:
            await asyncio.Event().wait()
        received.append(1)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message):
        sent.append(message)

    received: list[int] = []
    scope = {"type": "http", "method": "POST", "path": "/v2/models/toy/infer", "query_string": b"", "headers": []}
    asyncio.run(asyncio.wait_for(app.handle("/models/toy/infer", scope, receive, send), 60))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    details = json.loads(sent[1]["body"])["details"]
    assert details["type"] == "InvalidInput"
    assert details["expected"] == "the whole body within 0.05 s"


def test_non_finite_outputs_are_valid_json(http):
    answer = infer(http, tensor(["Infinity", "NaN", -1], [1, 3]))
    assert answer.json()["outputs"][0]["data"] == ["Infinity", "NaN", -1.0]


@pytest.mark.parametrize("root", ["/v2", "/api/v2"])
def test_mounted_below_v2_the_paths_stand_right_there(servable, root):
    outer = Starlette(routes=[Mount(root, create_app(servable))])
    transport = httpx2.ASGITransport(outer)

    async def scene() -> None:
        async with httpx2.AsyncClient(transport=transport, base_url="http://host") as http:
            assert (await http.get(f"{root}/health/ready")).json()["ready"] is True
            assert (await http.get(f"{root}/models/toy")).json()["name"] == "toy"
            assert (await http.get(root + "/")).json()["name"] == "servax"
            assert (await http.get(f"{root}/models/nope")).status_code == 404
            answer = await http.post(f"{root}/models/toy/infer", json={"inputs": [tensor([2], [1, 1])]})
            assert answer.json()["outputs"][0]["data"] == [5.0]

    asyncio.run(scene())


def test_mounted_elsewhere_the_paths_are_the_whole_ones(servable):
    transport = httpx2.ASGITransport(Starlette(routes=[Mount("/models", create_app(servable))]))

    async def scene() -> None:
        async with httpx2.AsyncClient(transport=transport, base_url="http://host") as http:
            assert (await http.get("/models/v2/models/toy/ready")).json()["ready"] is True
            answer = await http.post("/models/v2/models/toy/infer", json={"inputs": [tensor([2], [1, 1])]})
            assert answer.json()["outputs"][0]["data"] == [5.0]

    asyncio.run(scene())


def test_a_fault_of_ours_is_told_to_the_operator_and_not_to_the_client(servable):
    from servax.core.events import Notice, listening

    app = create_app(servable)

    async def broken(name, version, request):
        raise ZeroDivisionError("secret")

    app.plane.infer = broken
    told = []

    async def scene():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://host") as http:
            return await http.post("/v2/models/toy/infer", json={"inputs": [tensor([2], [1, 1])]})

    with listening(lambda event: told.append(event.message) if isinstance(event, Notice) else None):
        response = asyncio.run(scene())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "ZeroDivisionError" in told[0]


def test_the_same_numbers_come_over_the_wire_as_from_numpy(http):
    x = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    data = infer(http, tensor(x.tolist(), [4, 16])).json()["outputs"][0]["data"]
    np.testing.assert_allclose(np.array(data, np.float32).reshape(4, 16), 2 * x + 1, rtol=1e-6)


def test_binary_tensors_may_begin_at_any_byte(http):
    """The bytes are not copied on their way to the device, and JSON of any length stands before them."""
    x = np.arange(8, dtype=np.float32)[None]
    for spaces in range(8):
        head = (
            json.dumps(
                {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "parameters": {"binary_data_size": 32}}]}
            ).encode()
            + b" " * spaces
        )
        headers = {"inference-header-content-length": str(len(head))}
        answer = http.post("/v2/models/toy/infer", content=head + x.tobytes(), headers=headers)
        assert answer.json()["outputs"][0]["data"] == (2 * x + 1)[0].tolist()
