import asyncio
import socket
import subprocess
import sys
import time

import httpx2
import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    NotReady,
    TooLarge,
    UsageError,
)
from servax.protocols import client as clients
from servax.protocols.client import connect
from servax.runtime.request import InferRequest
from servax.runtime.servable import State
from servax.server.background import serve


@pytest.fixture(scope="module")
def local():
    with toys.toy().warm() as ready:
        yield ready


@pytest.fixture(scope="module")
def server(local):
    with serve(local, port=0) as running:
        yield running


@pytest.fixture
def remote(server):
    with connect(server.url) as connected:
        yield connected


def test_it_is_a_servable_with_the_same_signatures(remote, local):
    assert remote.signatures == local.signatures
    assert (remote.name, remote.version, remote.platform) == ("toy", "1", "jax_jit")
    assert (remote.state, remote.ready, remote.reason) == (State.READY, True, None)
    assert remote.progress == local.progress


@pytest.mark.parametrize(
    "x", [np.array([[1, 2], [3, 4]], np.float32), [[1, 2], [3, 4]], [[1], [2, 3, 4]], [np.ones(3, np.float32)] * 2]
)
def test_answers_are_the_local_ones(remote, local, x):
    for function in ("predict", "total"):
        ours, theirs = local.predict(function, x=x), remote.predict(function, x=x)
        assert list(ours) == list(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_functions_are_attributes_and_calls_may_be_awaited(remote):
    assert remote.total(x=[[1, 2], [3]])["sum"].tolist() == [3, 3]
    for _ in range(2):
        answer = asyncio.run(remote.predict_async(x=[[1.0]]))
        assert answer["y"].tolist() == [[3.0]]
    with pytest.raises(AttributeError, match="no attribute 'embed'"):
        remote.embed(x=[[1]])


def test_results_tell_bucket_and_times(remote):
    result = remote.infer(InferRequest("predict", {"x": [[1.0]]}))
    assert result.bucket == "batch=1,length=8"
    assert set(result.times) == {"queue", "pad", "transfer", "execute", "copy"}


def test_errors_of_the_server_come_back_as_themselves(remote):
    with pytest.raises(TooLarge) as caught:
        remote.predict(x=np.ones((1, 17), np.float32))
    assert caught.value.where == "length"
    assert "--bucket length=17" in caught.value.remedy
    with pytest.raises(NotFound, match="no function 'embed'"):
        remote.predict("embed", x=[[1]])


def test_wrong_tensors_are_refused_before_they_are_sent(remote):
    with pytest.raises(InvalidInput) as caught:
        remote.predict(x=np.ones((1, 2), np.int32), y=1)
    assert caught.value.where == "x, y"


def test_deadlines_travel_along(remote):
    with pytest.raises(DeadlineExceeded):
        remote.infer(InferRequest("predict", {"x": [[1.0]]}, deadline=time.monotonic() - 1))
    remote.infer(InferRequest("predict", {"x": [[1.0]]}, deadline=time.monotonic() + 60))


def test_stages_stay_where_they_are(remote):
    with pytest.raises(UsageError, match="no stages to show") as caught:
        _ = remote.stages
    assert "servax inspect" in caught.value.remedy


def test_one_of_several_models_must_be_named(local):
    with toys.toy("other", params=toys.params(1, 0)).warm() as other, serve([local, other], port=0) as server:
        with pytest.raises(UsageError) as caught:
            connect(server.url)
        assert caught.value.seen == "other, toy"
        assert f"{server.url}/v2/models/other" in caught.value.remedy
        with connect(f"{server.url}/v2/models/other") as remote:
            assert remote.predict(x=[[5.0]])["y"].tolist() == [[5.0]]
        with connect(server.url + "/v2/", model="toy") as remote:
            assert remote.predict(x=[[5.0]])["y"].tolist() == [[11.0]]
        with pytest.raises(NotFound, match="no model 'third'"):
            connect(server.url, model="third")


def test_nobody_there_is_said():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(NotReady) as caught:
        connect(url)
    assert (caught.value.what, caught.value.where) == ("no server answers", url)
    with pytest.raises(UsageError, match="not the URL of a server"):
        connect("localhost:8000")


def test_a_model_that_is_not_ready_says_so():
    with toys.toy() as cold, serve(cold, port=0) as server, connect(server.url) as remote:
        assert (remote.state, remote.ready) == (State.LOADING, False)
        assert len(remote.progress.left) == len(toys.GRID)
        with pytest.raises(NotReady) as caught:
            remote.predict(x=[[1.0]])
        assert caught.value.seen == "LOADING"
        cold.warm()
        assert remote.ready


def test_an_answer_that_takes_too_long_is_a_deadline():
    servable, held = toys.held_toy()
    with servable, serve(servable, port=0) as server, connect(server.url, timeout=0.2) as remote:
        with pytest.raises(DeadlineExceeded) as caught:
            remote.predict(x=[[1.0]])
        assert caught.value.expected == "an answer within 0.2 s"
        held.release.set()


def test_texts_travel_as_bytes(tmp_path):
    tokenizer = toys.word_tokenizer(tmp_path, {"[UNK]": 0, "ja": 1, "grün": 5})
    with toys.reading_toy(tokenizer) as local, serve(local, port=0) as server, connect(server.url) as remote:
        assert httpx2.get(f"{server.url}/v2/models/toy").json()["inputs"][-1] == {
            "name": "text",
            "datatype": "BYTES",
            "shape": [-1],
        }
        for texts in (["ja grün", "grün"], np.array(["ja grün", "grün"])):
            assert remote.predict(text=texts)["sum"].tolist() == local.predict(text=texts)["sum"].tolist() == [6, 5]
        assert remote.predict(x=[[1, 5], [5]])["sum"].tolist() == [6, 5]
        with pytest.raises(InvalidInput, match="beside the text"):
            remote.predict(text=["ja"], x=[[1]])
        with pytest.raises(InvalidInput, match="text"):
            remote.predict(text="ja")
        for servable in (local, remote):
            with pytest.raises(InvalidInput, match="not Unicode") as caught:
                servable.predict(text=["ja", "\ud800"])
            assert caught.value.where == "text[1]"


def test_servers_of_others_are_understood(monkeypatch):
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/infer"):
            return httpx2.Response(
                200, json={"outputs": [{"name": "OUT", "datatype": "INT64", "shape": [2], "data": [4, 6]}]}
            )
        tensors = [{"name": "IN", "datatype": "FP32", "shape": [-1, 2]}]
        outputs = [{"name": "OUT", "datatype": "INT64", "shape": [-1]}]
        return httpx2.Response(200, json={"name": "theirs", "platform": "x", "inputs": tensors, "outputs": outputs})

    real = httpx2.Client
    monkeypatch.setattr(httpx2, "Client", lambda **options: real(transport=httpx2.MockTransport(answer), **options))
    with connect("http://host/v2/models/theirs") as remote:
        assert remote.signatures["predict"].input("IN").text() == "float32[batch, 2]"
        assert remote.predict(IN=[[1, 2], [3, 4]])["OUT"].tolist() == [4, 6]


def test_the_client_needs_no_jax():
    code = "import sys, servax.protocols.client; sys.exit('jax' in sys.modules or 'starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_room_s_table_of_contents_is_complete():
    import servax.protocols

    for name in servax.protocols.__all__:
        assert getattr(servax.protocols, name).__name__ == name
    assert servax.protocols.connect is clients.connect
