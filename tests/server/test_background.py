import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

import servax
import serving_toys as toys
from servax.core.errors import StartupError
from servax.server.background import serve


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_it_serves_until_it_is_closed(servable):
    with servax.serve(servable, port=0) as server:
        assert httpx2.get(f"{server.url}/v2/health/ready").status_code == 200
        assert server.alive
    assert not server.alive
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.url)
    assert servable.predict(x=[[1.0]])["y"].tolist() == [[3.0]]


def test_serving_again_at_the_same_port_replaces_the_server(servable, port):
    first = serve(servable, port)
    with toys.toy("second").warm() as second, serve(second, port) as again:
        assert not first.alive
        assert again.url == first.url == f"http://127.0.0.1:{port}"
        assert httpx2.get(f"{again.url}/v2/models/second").status_code == 200
        assert httpx2.get(f"{again.url}/v2/models/toy").status_code == 404
    with serve(servable, port) as third:
        assert httpx2.get(f"{third.url}/v2/models/toy").status_code == 200


def test_a_port_of_another_process_is_refused(servable):
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        with pytest.raises(StartupError, match="taken by another process"):
            serve(servable, int(other.stdout.readline()))
        other.communicate("\n")


def test_closing_waits_for_requests_in_flight():
    servable, held = toys.held_toy()
    answers = []
    with servable:
        server = serve(servable, port=0)
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
        asking = threading.Thread(
            target=lambda: answers.append(httpx2.post(f"{server.url}/v2/models/toy/infer", json=body, timeout=60))
        )
        asking.start()
        held.entered.wait()
        closing = threading.Thread(target=server.close)
        closing.start()
        held.release.set()
        closing.join()
        asking.join()
    assert answers[0].status_code == 200


def test_the_interpreter_ends_with_a_server_left_open():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import serving_toys as toys\n"
        "from servax.server.background import serve\n"
        "import socket\n"
        "with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]\n"
        "serve(toys.toy().warm(), port); serve(toys.toy('b').warm(), 0); print('left open')\n"
    )
    tests = str(Path(toys.__file__).parent)
    command = [sys.executable, "-c", code, tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left open\n", "")
