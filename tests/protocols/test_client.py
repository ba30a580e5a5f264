import asyncio
import socket
import subprocess
import sys
import threading
import time

import httpx2
import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import (
    DeadlineExceeded,
    ExecutionError,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthorized,
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
    with pytest.raises(AttributeError, match=r"no attribute 'embed'.*there are: count, predict, total"):
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


def test_swaps_and_applications_are_the_server_s(remote, server):
    with pytest.raises(UsageError, match="cannot swap") as caught:
        remote.swap("runs/net", step="latest")
    assert caught.value.where == server.url
    assert "servax serve BUNDLE --checkpoint runs/net" in caught.value.remedy
    with pytest.raises(UsageError, match="has no application") as caught:
        _ = remote.app
    assert caught.value.where == server.url
    assert "load the bundle in this process" in caught.value.remedy


@pytest.fixture
def opened(monkeypatch):
    """Every AsyncClient that is made."""
    made, real = [], httpx2.AsyncClient
    monkeypatch.setattr(httpx2, "AsyncClient", lambda **options: (made.append(real(**options)), made[-1])[1])
    return made


def test_closing_closes_the_connections_of_the_running_loop(server, opened):
    async def scene() -> None:
        with connect(server.url) as remote:
            await remote.predict_async(x=[[1.0]])
            assert not opened[0].is_closed
        while not opened[0].is_closed:
            await asyncio.sleep(0)
        with pytest.raises(NotReady, match="was closed"):
            await remote.predict_async(x=[[1.0]])

    asyncio.run(scene())
    assert len(opened) == 1


def test_closing_closes_the_connections_of_other_loops(server, opened):
    remote = connect(server.url)
    idle, busy = asyncio.new_event_loop(), asyncio.new_event_loop()
    thread = threading.Thread(target=busy.run_forever)
    thread.start()
    try:
        idle.run_until_complete(remote.predict_async(x=[[1.0]]))
        asyncio.run_coroutine_threadsafe(remote.predict_async(x=[[1.0]]), busy).result(60)
        asyncio.run(remote.predict_async(x=[[1.0]]))
        remote.close()
        assert [client.is_closed for client in opened[:2]] == [True, True]
        with pytest.raises(NotReady, match="was closed") as caught:
            remote.predict(x=[[1.0]])
        assert caught.value.remedy == "connect again"
        remote.close()
    finally:
        busy.call_soon_threadsafe(busy.stop)
        thread.join()
        busy.close()
        idle.close()


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


@pytest.mark.parametrize(
    ("status", "after", "kind", "seconds"),
    [
        (429, "7", Overloaded, 7.0),
        (503, "2", NotReady, 2.0),
        (503, "Wed, 21 Oct 2026 07:28:00 GMT", NotReady, 1.0),
        (401, None, Unauthorized, None),
        (403, None, Forbidden, None),
    ],
)
def test_refusals_of_others_are_their_own_class_and_say_when_to_come_again(answering, status, after, kind, seconds):
    headers = {} if after is None else {"retry-after": after}
    answering(lambda request: httpx2.Response(status, json={"error": "no"}, headers=headers))
    with pytest.raises(kind) as caught:
        connect("http://host/v2/models/theirs").predict(x=[1])
    assert getattr(caught.value, "retry_after", None) == seconds


@pytest.fixture
def answering(monkeypatch):
    """Lets every server answer as told."""
    real = httpx2.Client

    def told(answer):
        transport = httpx2.MockTransport(answer)
        monkeypatch.setattr(httpx2, "Client", lambda **options: real(transport=transport, **options))

    return told


NOT_OURS = [
    "<!doctype html><title>A router</title>",
    "null",
    '[{"x": 1}]',
    "{}",
    "[]",
    "",
    "[" * 100_000,
    '{"name": 1}',
    '{"name": "toy", "inputs": [{"name": "x"}]}',
    '{"name": "toy", "functions": {"predict": {}}}',
]


@pytest.mark.parametrize("text", NOT_OURS)
def test_whatever_is_no_server_of_the_protocol_is_named(answering, text):
    answering(lambda request: httpx2.Response(200, text=text))
    with pytest.raises(UsageError, match="not a server of the Open Inference Protocol") as caught:
        connect("http://host", model="toy")
    assert caught.value.where == "http://host/v2/models/toy"
    assert text[:20] in caught.value.seen if text else caught.value.seen == "an empty answer"
    if text != "[]":  # which is an index without models
        with pytest.raises(UsageError, match="not a server of the Open Inference Protocol") as caught:
            connect("http://host")
        assert caught.value.where == "http://host/v2/repository/index"


@pytest.mark.parametrize(
    ("text", "kind", "part"),
    [
        ("<html>", UsageError, "not a server"),
        ("{}", UsageError, "not a server"),
        ('{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}]}', ExecutionError, "answer cannot be read"),
        ('{"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1]}]}', ExecutionError, "wrong number"),
    ],
)
def test_answers_that_cannot_be_read_are_errors_of_the_server(answering, text, kind, part):
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/infer"):
            return httpx2.Response(200, text=text)
        if request.url.path.endswith("/ready"):
            return httpx2.Response(200)
        return httpx2.Response(200, json={"name": "toy", "inputs": [], "outputs": []})

    answering(answer)
    with connect("http://host", model="toy") as remote:
        assert remote.ready  # by the HTTP status alone
        with pytest.raises(kind, match=part):
            remote.predict()


def test_timings_of_others_are_passed_over(answering):
    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = {"server-timing": 'cache;desc="hit", queue;dur=2,db;dur=x'}
        return httpx2.Response(200, json={"name": "toy", "outputs": []}, headers=headers)

    answering(answer)
    with connect("http://host", model="toy") as remote:
        assert remote.infer(InferRequest("predict", {})).times == {"queue": 0.002}


def test_names_and_ids_that_are_not_unicode_are_refused(server, remote):
    with pytest.raises(NotFound):
        connect(server.url, model="\ud800")
    with pytest.raises(InvalidInput, match="id is not Unicode") as caught:
        remote.infer(InferRequest("predict", {"x": [[1.0]]}, id="\ud800"))
    assert caught.value.where == "id"


def test_a_redirection_names_its_location(answering):
    answering(lambda request: httpx2.Response(302, headers={"location": "https://login/there"}))
    with pytest.raises(UsageError, match="another address") as caught:
        connect("http://host", model="toy")
    assert caught.value.seen == "HTTP status 302 to https://login/there"


def test_an_answer_compressed_wrongly_is_no_answer(answering):
    answering(
        lambda request: httpx2.Response(
            200, stream=httpx2.ByteStream(b"this is not gzip at all"), headers={"content-encoding": "gzip"}
        )
    )
    with pytest.raises(NotReady, match="no server answers"):
        connect("http://host", model="toy")


def test_an_error_page_is_repeated_in_short(answering):
    answering(lambda request: httpx2.Response(404, text="<html>" + "x" * 100_000))
    with pytest.raises(NotFound) as caught:
        connect("http://host", model="toy")
    assert len(str(caught.value)) <= 300
    assert str(caught.value).startswith("http://host/v2/models/toy answered with HTTP status 404: <html>xxx")


def test_a_closed_connection_says_so(server):
    remote = connect(server.url)
    remote.close()
    for call in (
        lambda: remote.predict(x=[[1.0]]),
        lambda: asyncio.run(remote.predict_async(x=[[1.0]])),
        lambda: remote.ready,
    ):
        with pytest.raises(NotReady, match="was closed") as caught:
            call()
        assert caught.value.where == server.url
        assert "connect again" in caught.value.remedy


@pytest.mark.parametrize(
    "url",
    ["http://host:99999", "http://[::1", "http://", "ftp://host", "http://\ud800", "http://:80", "http://é..x", None],
)
def test_what_is_no_url_is_said(url):
    with pytest.raises(UsageError, match="not the URL of a server") as caught:
        connect(url)
    assert caught.value.seen == repr(url)


def test_the_client_needs_no_jax():
    code = "import sys, servax.protocols.client; sys.exit('jax' in sys.modules or 'starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_room_s_table_of_contents_is_complete():
    import servax.protocols

    for name in servax.protocols.__all__:
        assert getattr(servax.protocols, name).__name__ == name
    assert servax.protocols.connect is clients.connect
