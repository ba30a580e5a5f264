import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import httpx2
import pytest

CHILD = Path(__file__).with_name("server_child.py")
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


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
