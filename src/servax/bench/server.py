"""A server in a process of its own, and plain requests to it: what the demo and the benchmarks measure."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from servax.core.errors import StartupError

_TIMING = re.compile(r"(\w+);dur=([0-9.eE+-]+)")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer over HTTP.

    Attributes:
      body: the JSON.
      seconds: from sending to the last byte, as the client saw it.
      steps: seconds by step of the server's `Server-Timing` header.
    """

    body: Any
    seconds: float
    steps: Mapping[str, float]


class ServerProcess:
    """A child that serves, ended when the block ends.

    Args:
      command: arguments after `python`; `{port}` is replaced by a free port.
      patience: seconds it may take to become ready.
    """

    def __init__(self, command: Sequence[str], *, patience: float = 300.0, quiet: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seconds_to_ready = 0.0
        self._command = [sys.executable, *(part.replace("{port}", str(self.port)) for part in command)]
        self._patience = patience
        self._quiet = quiet

    def __enter__(self) -> Self:
        began = time.perf_counter()
        sink = subprocess.DEVNULL if self._quiet else None
        self.process = subprocess.Popen(self._command, stdout=sink, stderr=subprocess.PIPE if self._quiet else None)
        try:
            self._wait_until_ready(began + self._patience)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_ready = time.perf_counter() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()

    def get(self, path: str) -> str:
        """The text at a path of the server."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.read().decode()

    def infer(self, model: str, inputs: Sequence[Mapping[str, Any]]) -> Reply:
        """One request by the Open Inference Protocol."""
        request = urllib.request.Request(
            f"{self.url}/v2/models/{model}/infer",
            data=json.dumps({"inputs": list(inputs)}).encode(),
            headers={"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as response:
            body = response.read()
            seconds = time.perf_counter() - began
            header = response.headers.get("Server-Timing", "")
        steps = {name: float(milliseconds) / 1e3 for name, milliseconds in _TIMING.findall(header)}
        return Reply(json.loads(body), seconds, steps)

    def compiles_after_ready(self) -> int:
        """`servax_compiles_after_ready_total` of the server's metrics."""
        for line in self.get("/metrics").splitlines():
            if line.startswith("servax_compiles_after_ready_total"):
                return int(float(line.rsplit(" ", 1)[1]))
        raise KeyError("servax_compiles_after_ready_total is not among the metrics")

    def stop(self) -> None:
        """Ends the child: SIGTERM, and after ten seconds SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _wait_until_ready(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self.process.poll() is not None:
                detail = self.process.stderr.read().decode() if self.process.stderr else ""
                raise StartupError(
                    f"the server ended with status {self.process.returncode} before it was ready",
                    where=" ".join(self._command),
                    seen=detail.strip()[-2000:] or None,
                )
            try:
                self.get("/v2/health/ready")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.005)
            else:
                return
        raise StartupError("the server did not become ready", where=" ".join(self._command))


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
