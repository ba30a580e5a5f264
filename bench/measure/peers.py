"""The servers: what each needs installed, how it starts, and the ways to talk to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from measure import models, processes
from measure.wires import ROWS, V2_BINARY, V2_GRPC, V2_JSON, Wire

FOLDER = Path(__file__).resolve().parent.parent / "peers"
MARK = "SERVAX_BENCH_SERVER"
"""Environment variable by which a server's processes are known."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to measure.

    Attributes:
      title: its name in tables.
      script: its server, in bench/peers; requirements stand in a .txt beside it. None: servax.
      wires: json, binary or grpc -> how it is spoken.
      ready: path that answers 200 once it serves.
      saved_model: whether it serves servax's SavedModel, not the parameters.
      options: more arguments of its script.
    """

    title: str
    script: str | None
    wires: Mapping[str, Wire]
    ready: str
    saved_model: bool = False
    options: tuple[str, ...] = ()


PEERS = {
    "servax": Peer("servax", None, {"json": V2_JSON, "binary": V2_BINARY, "grpc": V2_GRPC}, "/v2/health/ready"),
    "pytriton": Peer(
        "PyTriton",
        "pytriton_server",
        {"json": V2_JSON, "binary": V2_BINARY, "grpc": V2_GRPC},
        "/v2/models/{model}/ready",
    ),
    "kserve": Peer(
        "KServe SDK",
        "kserve_server",
        {"json": V2_JSON, "binary": V2_BINARY, "grpc": V2_GRPC},
        "/v2/models/{model}/ready",
    ),
    "fastapi": Peer("FastAPI + jit", "fastapi_server", {"json": ROWS}, "/health"),
    "fastapi-inline": Peer("FastAPI inline", "fastapi_server", {"json": ROWS}, "/health", options=("--inline",)),
    "litserve": Peer("LitServe", "litserve_server", {"json": ROWS}, "/health"),
    "bentoml": Peer("BentoML", "bentoml_server", {"json": ROWS}, "/readyz"),
    "ray": Peer("Ray Serve", "ray_server", {"json": ROWS}, "/predict"),
    "tensorflow": Peer("TensorFlow", "tensorflow_server", {"json": ROWS}, "/health", saved_model=True),
}


class Unavailable(Exception):
    """A server that could not be installed, started or spoken to; the text says why."""


def install(name: str, folder: Path) -> Path:
    """The interpreter of a peer's virtual environment, which is made where it is missing or its pins have changed.

    Raises:
      Unavailable: pip's last words.
    """
    script = PEERS[name].script
    if script is None:
        return Path(sys.executable)
    return environment(FOLDER / f"{script}.txt", folder / script.removesuffix("_server"))


def environment(requirements: Path, folder: Path) -> Path:
    """The interpreter of a virtual environment, which is made where it is missing or its pins have changed.

    Raises:
      Unavailable: pip's last words.
    """
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    print(f"installing {requirements.stem} into {folder}", file=sys.stderr, flush=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv:
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        fill = [uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements)]
    else:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        fill = [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
    for command in (make, fill):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"not installed: {done.stderr.strip()[-500:]}")
    stamp.write_text(requirements.read_text())
    return python


@cache
def _serve_options() -> str:
    """What `servax serve --help` says: options of versions differ."""
    command = [sys.executable, "-m", "servax", "serve", "--help"]
    environment = processes.environment(COLUMNS="200", NO_COLOR="1", TERM="dumb")
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@dataclass(slots=True)
class Server:
    """A server that runs for the length of a block.

    Args:
      name: of the peer.
      python: its interpreter.
      model: mlp or encoder.
      source: what it serves.
      core: the core it stays on.
      warm: whether a peer compiles every shape before it serves.
      cache: where jax keeps what it compiles; None: nowhere.
      nice: its priority.

    Raises:
      Unavailable: it did not become ready.

    Attributes:
      seconds_to_ready: from the start of the process.
    """

    name: str
    python: Path
    model: str
    source: Path
    core: int
    log: Path
    warm: bool = True
    cache: Path | None = None
    nice: int = 0
    seconds_to_ready: float = 0.0
    port: int = field(default_factory=processes.free_port)
    grpc_port: int = field(default_factory=processes.free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def peer(self) -> Peer:
        return PEERS[self.name]

    @property
    def _mark(self) -> str:
        return f"{self.name}-{self.port}-{os.getpid()}"

    def __enter__(self) -> Self:
        variables = {MARK: self._mark}
        if self.peer.script is None:
            command = [str(self.python), "-m", "servax", "serve", str(self.source), "--http", str(self.port)]
            for option, values in (("--grpc", [str(self.grpc_port)]), ("--no-access-log", [])):
                if option in _serve_options():
                    command += [option, *values]
        else:
            command = [str(self.python), str(FOLDER / f"{self.peer.script}.py"), self.model, str(self.source)]
            command += ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
            command += [*self.peer.options, *(["--warm"] if self.warm else [])]
            variables["PYTHONSAFEPATH"] = ""
            if self.cache is not None:
                variables |= {
                    "JAX_COMPILATION_CACHE_DIR": str(self.cache),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                }
        began = time.perf_counter()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                processes.pinned(self.core, command, self.nice),
                env=processes.environment(**variables),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(began)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_ready = time.perf_counter() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()

    def pids(self) -> list[int]:
        """All its processes."""
        return processes.marked(f"{MARK}={self._mark}")

    def metric(self, name: str) -> float:
        """The sum of a metric in `/metrics`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def _wait(self, began: float) -> None:
        assert self._process is not None
        url = f"http://127.0.0.1:{self.port}{self.peer.ready.format(model=self.model)}"
        while time.perf_counter() < began + 180:
            if self._process.poll() is not None:
                tail = self.log.read_text(errors="replace").strip()[-500:]
                raise Unavailable(f"ended with status {self._process.returncode}: {tail}")
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        raise Unavailable(f"not ready after 180 s: {self.log.read_text(errors='replace').strip()[-500:]}")

    def stop(self) -> None:
        """SIGTERM to the process, and SIGKILL to what is left of its processes after ten seconds."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def source(peer: Peer, model: str, folder: Path, core: int) -> Path:
    """What a peer serves: the bundle, its SavedModel, or the parameters."""
    if peer.script is None:
        return models.bundle(model, folder, ["aot"], core)
    if peer.saved_model:
        return models.bundle(model, folder, ["saved_model"], core) / "saved_model"
    return models.parameters_file(model, folder)
