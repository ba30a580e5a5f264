import asyncio
import socket

import grpc
import httpx2
import pytest

import serving_toys as toys
from servax.core.errors import StartupError, Unauthorized, UsageError
from servax.core.events import Event, Notice, listening
from servax.protocols.client import connect
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference.grpc import InferenceService
from servax.protocols.tfserving.grpc import ModelService, PredictionService
from servax.server.background import BackgroundServer, serve
from servax.server.front import Front
from servax.server.settings import make

KEY, ADMIN = "k" * 16, "a" * 16
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


@pytest.fixture
def keys(tmp_path) -> dict[str, str]:
    (tmp_path / "keys").write_text(f"alice:{KEY}\n")
    (tmp_path / "admins").write_text(f"root:{ADMIN}\n")
    return {"api_key_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "admins")}


def methods() -> list[str]:
    """Every method of the services that we describe, and those of health and reflection."""
    plane = DataPlane()
    services = [
        InferenceService(plane, version="1").service(),
        PredictionService(plane).service(),
        ModelService(plane).service(),
    ]
    described = [
        f"/{service.name}/{method.name}"
        for service in services
        for file in service.messages.files
        for each in file.service
        if f"{file.package}.{each.name}" == service.name
        for method in each.method
    ]
    others = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/no.such.Service/Method"]
    return [*described, *others, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]


def code(server: BackgroundServer, method: str, key: str | None = None) -> str:
    """The status of a call with an empty message; streams are called as such, or their code would be another."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            channel.unary_unary(method)(b"", metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def test_every_method_of_grpc_asks_for_a_key(servable, keys):
    named = methods()
    assert len(named) >= 20
    with serve(servable, 0, grpc_port=0, **keys) as server:
        assert {code(server, method) for method in named} == {"UNAUTHENTICATED"}
        assert {code(server, method, "wrong" * 4) for method in named} == {"UNAUTHENTICATED"}
        assert code(server, "/inference.GRPCInferenceService/ServerLive", KEY) == "OK"
        assert code(server, "/inference.GRPCInferenceService/RepositoryModelLoad", KEY) == "PERMISSION_DENIED"
        assert code(server, "/tensorflow.serving.ModelService/HandleReloadConfigRequest", KEY) == "PERMISSION_DENIED"
        loading = code(server, "/inference.GRPCInferenceService/RepositoryModelLoad", ADMIN)
        assert loading not in ("UNAUTHENTICATED", "PERMISSION_DENIED")


def test_http_asks_for_the_same_keys(servable, keys):
    with serve(servable, 0, **keys) as server, httpx2.Client(base_url=server.url) as http:
        assert http.post("/v2/models/toy/infer", json=BODY).status_code == 401
        keyed = {"authorization": f"Bearer {KEY}"}
        assert http.post("/v2/models/toy/infer", json=BODY, headers=keyed).status_code == 200
        assert http.post("/v2/repository/models/toy/load", headers=keyed).status_code == 403


def test_our_own_client_has_its_key_from_the_environment(servable, keys, monkeypatch):
    with serve(servable, 0, **keys) as server:
        with pytest.raises(Unauthorized):
            connect(server.url)
        monkeypatch.setenv("SERVAX_API_KEY", KEY)
        with connect(server.url) as client:
            assert client.predict(x=[[1.0]])["y"].tolist() == [[3.0]]
            assert asyncio.run(client.predict_async(x=[[1.0]]))["y"].tolist() == [[3.0]]


def test_health_opened_for_probes(servable, keys):
    with serve(servable, 0, grpc_port=0, **keys, open_health=True) as server:
        assert httpx2.get(f"{server.url}/v2/health/ready").json() == {"ready": True}
        assert code(server, "/grpc.health.v1.Health/Check") == "OK"
        assert code(server, "/inference.GRPCInferenceService/ModelInfer") == "UNAUTHENTICATED"


def test_metrics_have_a_port_of_their_own(servable):
    async def scene():
        front = Front(DataPlane([servable]), make(http=0, grpc=-1, metrics=0))
        async with httpx2.AsyncClient() as http:

            async def ask() -> list[int]:
                urls = [f"{front.urls[port]}{path}" for port in ("http", "metrics") for path in ("/metrics", "/v2")]
                answers = [await http.get(url) for url in urls]
                front.stop(1)
                return [each.status_code for each in answers]

            asking: list[asyncio.Task[list[int]]] = []
            await front.serve(lambda: asking.append(asyncio.ensure_future(ask())))
            return await asking[0]

    assert asyncio.run(scene()) == [404, 200, 200, 404]


def test_more_ports_for_clients_of_tensorflow_serving(servable):
    with serve(servable, 0, grpc_port=0, tfserving_http=0, tfserving_grpc=0) as server:
        urls = server._front.urls
        assert httpx2.get(f"{urls['tfserving_http']}/v1/models/toy").status_code == 200
        with grpc.insecure_channel(urls["tfserving_grpc"]) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/tensorflow.serving.PredictionService/Predict")(b"", timeout=60)
            assert caught.value.code() is not grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_leaves_no_other_open(servable):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        with pytest.raises(StartupError, match="taken"):
            Front(DataPlane(), make(http=free, metrics=taken))
        with pytest.raises(StartupError, match="taken"):
            serve(servable, free, grpc_port=taken)
        with serve(servable, free) as server:
            assert server.url.endswith(f":{free}")


def test_options_that_cannot_be_used_are_refused_before_anything_listens(servable):
    with pytest.raises(UsageError, match="max_body"):
        serve(servable, 0, max_body="large")
    with pytest.raises(UsageError, match="max_queue, threads"):  # of whoever loads, and of a process of its own
        serve(servable, 0, max_queue=1, threads=2, max_body="1MiB")
    with pytest.raises(StartupError, match="cannot be read"):
        serve(servable, 0, api_key_file="/nope")


def warnings(**settings) -> list[str]:
    said: list[Event] = []
    with listening(said.append):
        front = Front(DataPlane(), make(http=0, grpc=-1, **settings))
    for each in front._sockets:
        each.close()
    return [each.message for each in said if isinstance(each, Notice) and each.level == "warning"]


def test_a_port_that_others_reach_without_keys_or_tls_is_warned_of(keys):
    assert len(warnings(host="0.0.0.0")) == 2
    (clear,) = warnings(host="0.0.0.0", **keys)
    assert "keys and data travel in the clear" in clear
    assert warnings() == warnings(host="localhost") == warnings(host="127.0.0.2") == []


def test_calls_of_grpc_are_counted_and_written_down(servable, keys, capsys):
    del capsys
    with serve(servable, 0, grpc_port=0, **keys) as server:
        code(server, "/inference.GRPCInferenceService/ServerMetadata", KEY)
        code(server, "/inference.GRPCInferenceService/ServerMetadata")
        metrics = httpx2.get(f"{server.url}/metrics", headers={"x-api-key": KEY}).text
    assert 'servax_grpc_responses_total{code="OK"} 1.0' in metrics
    assert 'servax_grpc_responses_total{code="UNAUTHENTICATED"} 1.0' in metrics
