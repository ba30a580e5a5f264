"""How the client's tensors travel: in binary where the server reads it, in JSON elsewhere; keys and certificates."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import trustme

from echo_servable import DTYPES, EchoServable
from servax.core.errors import InvalidInput, ServaxError, UsageError
from servax.protocols.client import connect
from servax.protocols.connection import Connection
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference import answers
from servax.runtime.request import InferRequest
from servax.server.background import serve


@pytest.fixture(scope="module")
def echo():
    return EchoServable()


@pytest.fixture(scope="module")
def server(echo):
    with serve(DataPlane([echo]), port=0) as running:
        yield running


def sample(dtype):
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    raw = np.random.default_rng(3).integers(0, 2 if dtype == "bool" else 256, 6 * kind.itemsize, np.uint8)
    return raw.view(kind).reshape(2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels_to_the_bit(server, dtype):
    array = sample(dtype)
    with connect(server.url) as remote:
        for outputs in (
            remote.predict(f"echo_{dtype}", x=array),
            asyncio.run(remote.predict_async(f"echo_{dtype}", x=array)),
        ):
            assert outputs["y"].dtype == array.dtype
            assert outputs["y"].tobytes() == array.tobytes()
            outputs["y"][0, 0] = outputs["y"][0, 1]  # it belongs to the caller


def test_several_tensors_and_a_choice_of_outputs(server, echo):
    a, b = np.ones((2, 2), np.float32), np.arange(2)
    with connect(server.url) as remote:
        result = remote.infer(InferRequest("several", {"a": a, "b": b}, priority=5))
        assert list(result.tensors) == ["a", "b"]
        assert result.version == "1"
        assert echo.requests[-1].priority == 5
        result = remote.infer(InferRequest("several", {"a": a, "b": b}), outputs=["b"])
        assert {name: array.tolist() for name, array in result.tensors.items()} == {"b": [0, 1]}
        with pytest.raises(InvalidInput, match="not Unicode"):
            remote.infer(InferRequest("several", {"a": a, "b": b}, id="\ud800"))


def test_a_server_without_the_extension_is_sent_json(server, echo, monkeypatch):
    real = Connection.get

    def silent(self, path, kind):
        if path == "":
            raise UsageError("no metadata")
        return real(self, path, kind)

    monkeypatch.setattr(Connection, "get", silent)
    with connect(server.url) as remote:
        assert (
            remote.predict(x=np.array([[1.5, np.nan]], np.float32))["y"].tobytes()
            == np.array([[1.5, np.nan]], np.float32).tobytes()
        )
        with pytest.raises(InvalidInput, match="does not carry in JSON"):
            remote.predict("echo_bfloat16", x=sample("bfloat16"))
        with pytest.raises(InvalidInput, match="does not carry in JSON") as caught:
            remote.predict("half", x=np.ones(2, np.float32))
        assert "infer(request, outputs=['whole'])" in caught.value.remedy
        request = InferRequest("half", {"x": [1, 2]})
        for names in (["whole"], "whole"):
            assert remote.infer(request, outputs=names).tensors["whole"].tolist() == [1, 2]
        assert list(asyncio.run(remote.infer_async(request, outputs=["whole"])).tensors) == ["whole"]


def test_the_extension_is_asked_for_by_the_specification_s_name(server):
    with connect(server.url) as remote:
        assert "binary_tensor_data" in remote._connection.get("", answers.Server).extensions


def test_keys_and_certificates_open_a_server_that_asks_for_them(echo, tmp_path, monkeypatch):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "someone@example.com")):
        issued = authority.issue_cert(identity)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    options = {name: str(tmp_path / file) for name, file in (("tls_cert", "server.pem"), ("tls_key", "server.key"))}
    options |= {"tls_client_ca": str(tmp_path / "ca.pem"), "api_key_file": str(keys)}
    shown = {"ca": tmp_path / "ca.pem", "certificate": (tmp_path / "client.pem", tmp_path / "client.key")}
    with serve(DataPlane([echo]), port=0, **options) as server:
        assert server.url.startswith("https://")
        with connect(server.url, api_key="a-key-of-some-length", **shown) as remote:
            x = np.ones((1, 2), np.float32)
            assert remote.predict(x=x)["y"].tolist() == [[1, 1]]
            assert asyncio.run(remote.predict_async(x=x))["y"].tolist() == [[1, 1]]
        monkeypatch.setenv("SERVAX_API_KEY", "a-key-of-some-length")
        with connect(server.url, **shown) as remote:
            assert remote.predict(x=x)["y"].tolist() == [[1, 1]]
        for wrong in ({**shown, "api_key": "another"}, {**shown, "certificate": None}, {**shown, "ca": None}):
            with pytest.raises(ServaxError):
                connect(server.url, **wrong)
    with pytest.raises(UsageError, match="certificates cannot be read") as caught:
        connect("https://127.0.0.1:1", ca=tmp_path / "nothing.pem")
    assert caught.value.where == str(tmp_path / "nothing.pem")
