import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import grpc
import httpx2
import pytest

CHILD = Path(__file__).with_name("server_child.py")
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


MODEL_NAME = b"\x0a\x03toy"
"""A message whose first field, the model's name, is `toy`."""


class Child:
    """A server process, its log read line by line on a thread."""

    def __init__(self, mode: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), mode, *(arguments or ("0",))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._grew = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._grew:
                self.lines.append(line.rstrip("\n"))
                self._grew.notify_all()
        with self._grew:
            self.lines.append("")
            self._grew.notify_all()

    def line(self, part: str) -> str:
        """The first log line with `part` in it; waits for it."""
        with self._grew:
            found = self._grew.wait_for(
                lambda: next((line for line in self.lines if part in line), None) or "" in self.lines, 120
            )
        assert isinstance(found, str), "\n".join(self.lines)
        return found

    @property
    def url(self) -> str:
        return self.line("event=listening").split("url=")[1].split()[0]

    def wait_held(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ended(self) -> int:
        code = self.process.wait(120)
        self._reader.join(120)
        return code


@contextlib.contextmanager
def child(mode: str, *arguments: str) -> Generator[Child]:
    running = Child(mode, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def ask(url: str, answers: list[httpx2.Response | Exception]) -> threading.Thread:
    def post() -> None:
        try:
            answers.append(httpx2.post(f"{url}/v2/models/toy/infer", json=BODY, timeout=120))
        except httpx2.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_it_is_live_at_once_and_ready_once_it_is_loaded_and_warm():
    with child("loading") as server:
        server.wait_held()
        with httpx2.Client(base_url=server.url) as http:
            assert http.get("/v2/health/live").json() == {"live": True}
            ready = http.get("/v2/health/ready")
            assert (ready.status_code, ready.json()["loading"], ready.json()["models"]) == (503, [], [])
            assert http.post("/v2/models/toy/infer", json=BODY).status_code == 503
            server.let_go()
            assert "models=toy" in server.line("event=ready")
            assert http.get("/v2/health/ready").status_code == 200
            answer = http.post("/v2/models/toy/infer", json=BODY)
            assert answer.json()["outputs"][0]["data"] == [3.0]
            assert "servax_compiles_after_ready_total 0.0" in http.get("/metrics").text.splitlines()
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


def test_readiness_lists_what_is_left_to_warm():
    with child("warming") as server:
        server.wait_held()
        with httpx2.Client(base_url=server.url) as http:
            message = http.get("/v2/health/ready").json()
            (model,) = message["models"]
            assert (message["ready"], model["state"]) == (False, "WARMING")
            assert len(model["programs"]["left"]) == 7
            assert message["loading"][-1] == {"step": "warm", "done": 0, "total": 7, "seconds": None}
            refused = http.post("/v2/models/toy/infer", json=BODY)
            assert (refused.status_code, refused.json()["details"]["seen"]) == (503, "WARMING")
            server.let_go()
            server.line("event=ready")
            assert http.get("/v2/health/ready").json()["models"][0]["programs"]["left"] == []


def test_a_signal_drains_requests_in_flight_and_ends_with_zero():
    with child("running") as server:
        server.line("event=ready")
        answers: list[httpx2.Response | Exception] = []
        first = ask(server.url, answers)
        server.wait_held()
        with httpx2.Client(base_url=server.url) as http:
            server.process.send_signal(signal.SIGTERM)
            server.line("state=DRAINING")
            unready = http.get("/v2/health/ready")
            assert (unready.status_code, unready.json()["models"][0]["state"]) == (503, "DRAINING")
            refused = http.post("/v2/models/toy/infer", json=BODY)
            assert (refused.status_code, refused.json()["details"]["type"]) == (503, "NotReady")
        assert not answers
        server.let_go()
        first.join()
        (answer,) = answers
        assert isinstance(answer, httpx2.Response)
        assert answer.json()["outputs"][0]["data"] == [3.0]
        assert server.ended() == 0
        assert "state=UNLOADED" in server.line("state=UNLOADED")


def test_a_drain_that_runs_out_of_time_says_so_and_ends():
    with child("running", "0", "0.2") as server:
        server.line("event=ready")
        answers: list[httpx2.Response | Exception] = []
        asking = ask(server.url, answers)
        server.wait_held()
        server.process.send_signal(signal.SIGTERM)
        assert "requests=1" in server.line('event="not drained"')
        assert server.ended() == 0
        asking.join()
        assert isinstance(answers[0], Exception) or answers[0].status_code >= 500


def test_a_second_signal_ends_it_at_once():
    with child("running") as server:
        server.line("event=ready")
        asking = ask(server.url, [])
        server.wait_held()
        server.process.send_signal(signal.SIGTERM)
        server.line("state=DRAINING")
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 128 + signal.SIGINT
        asking.join()


def test_a_signal_while_it_loads_ends_it():
    with child("loading") as server:
        server.wait_held()
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("broken", ["start-up failed: the bundle is damaged", "where:    params/0", "remedy:   copy it again"]),
        ("bug", ["ZeroDivisionError: a bug", "Traceback"]),
    ],
)
def test_a_start_up_that_fails_is_printed_and_exits_three(mode, parts):
    with child(mode) as server:
        assert server.ended() == 3
        for part in parts:
            assert part in "\n".join(server.lines)


def test_a_contradiction_in_what_is_asked_for_exits_two():
    with child("contradiction") as server:
        assert server.ended() == 2
        assert "leave one of them out" in "\n".join(server.lines)


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not exist there")
def test_it_runs_on_uvloop():
    with child("loop") as server:
        assert "models=uvloop" in server.line("event=ready")


def test_a_taken_port_exits_three():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with child("plain", str(other.getsockname()[1])) as server:
            assert server.ended() == 3
            assert "the port is taken by another process" in "\n".join(server.lines)


def settings(**changes) -> tuple[str, str, str]:
    """Arguments of the child after its mode: a free port, time to drain, and these settings."""
    return "0", "60", json.dumps(changes)


def grpc_status(address: str, method: str) -> str:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(MODEL_NAME, timeout=60)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def test_grpc_runs_beside_http_and_drains_with_it():
    with child("running") as server:
        server.line("event=ready")
        address = server.line("event=listening").split(" grpc=")[1].split()[0]
        assert grpc_status(address, "ServerLive") == "OK"
        asking = ask(server.url, [])
        server.wait_held()
        server.process.send_signal(signal.SIGTERM)
        server.line("state=DRAINING")
        assert grpc_status(address, "ModelInfer") == "UNAVAILABLE"
        server.let_go()
        asking.join()
        assert server.ended() == 0


def test_a_body_that_is_half_there_is_refused_when_the_server_drains():
    with child("running") as server:
        server.line("event=ready")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = b"POST /v2/models/toy/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"
            client.sendall(head + b'{"inputs":')
            asking = ask(server.url, [])
            server.wait_held()
            server.process.send_signal(signal.SIGTERM)
            client.settimeout(60)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        server.let_go()
        asking.join()
        assert server.ended() == 0


def test_a_program_that_starts_it_reads_objects_on_standard_output():
    with child("plain", *settings(as_json=True, metrics=0, access_log=False)) as server:
        assert server.process.stdout is not None
        listening, ready = (json.loads(server.process.stdout.readline()) for _ in range(2))
        assert listening["event"] == "listening"
        assert set(listening) == {"event", "http", "grpc", "metrics"}
        assert httpx2.get(f"{listening['metrics']}/metrics").status_code == 200
        assert httpx2.post(f"{listening['http']}/v2/models/toy/infer", json=BODY).status_code == 200
        assert (ready["event"], ready["models"], ready["http"]) == ("ready", ["toy:1"], listening["http"])
        server.process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in server.process.stdout]
        assert [each["event"] for each in rest] == ["draining", "ended"]
        assert server.ended() == rest[-1]["code"] == 0
        assert "event=request" not in "\n".join(server.lines)


def test_a_failure_is_among_them():
    with child("broken", *settings(as_json=True)) as server:
        assert server.process.stdout is not None
        _, failed, ended = map(json.loads, server.process.stdout)
        assert failed == {
            "event": "failed",
            "kind": "BundleError",
            "what": "the bundle is damaged",
            "where": "params/0",
            "remedy": "copy it again",
        }
        assert ended == {"event": "ended", "code": 3}


@pytest.mark.parametrize("port", ["grpc", "metrics"])
def test_any_taken_port_exits_three_before_anything_is_loaded(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with child("bug", *settings(**{port: other.getsockname()[1]})) as server:
            assert server.ended() == 3
            said = "\n".join(server.lines)
            assert "the port is taken by another process" in said
            assert "ZeroDivisionError" not in said


def test_keys_that_cannot_be_read_exit_three(tmp_path):
    with child("bug", *settings(api_key_file=str(tmp_path / "nope"))) as server:
        assert server.ended() == 3
        assert "a file of keys cannot be read" in "\n".join(server.lines)


def test_keys_are_read_anew_on_a_signal(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first:" + "1" * 16)
    with child("plain", *settings(api_key_file=str(keys))) as server:
        server.line("event=ready")

        def status(key: str) -> int:
            return httpx2.get(f"{server.url}/v2", headers={"x-api-key": key}).status_code

        assert (status("1" * 16), status("2" * 16)) == (200, 401)
        keys.write_text("second:" + "2" * 16)
        server.process.send_signal(signal.SIGHUP)
        server.line('event="API keys read"')
        assert (status("1" * 16), status("2" * 16)) == (401, 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        said = "\n".join(server.lines)
        assert "key=second" in said
        assert "1" * 16 not in said
        assert "2" * 16 not in said


def test_requests_are_written_down_before_it_ends():
    with child("plain") as server:
        server.line("event=ready")
        httpx2.post(f"{server.url}/v2/models/toy/infer", json=BODY, headers={"x-request-id": "mine"})
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        (line,) = [line for line in server.lines if "event=request" in line]
        assert " id=mine " in line
        assert " model=toy status=200 " in line


def test_the_log_can_be_json():
    with child("plain", *settings(log_format="json")) as server:
        server.line('"event": "ready"')
        url = json.loads(server.line('"event": "listening"'))["url"]
        httpx2.post(f"{url}/v2/models/toy/infer", json=BODY)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        events = [json.loads(line)["event"] for line in server.lines if line]
        assert {"listening", "state", "ready", "request", "draining"} <= set(events)


def test_two_models_of_one_name_are_refused():
    with child("twins") as server:
        assert server.ended() == 2
        assert "two models have one name" in "\n".join(server.lines)


def test_a_device_thread_that_dies_makes_it_unready_and_answers_who_waits():
    with child("dying") as server:
        server.line("event=ready")
        answer = httpx2.post(f"{server.url}/v2/models/toy/infer", json=BODY, timeout=60)
        assert answer.status_code == 500
        assert "has died" in answer.json()["error"]
        ready = httpx2.get(f"{server.url}/v2/health/ready")
        assert (ready.status_code, ready.json()["models"][0]["state"]) == (503, "FAILED")
        assert httpx2.get(f"{server.url}/v2/health/live").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
