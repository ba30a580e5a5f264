"""A server in a thread of this process: for notebooks, tests, and programs that do something else as well."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from servax.core.errors import ServaxError, StartupError, UsageError
from servax.protocols.dataplane import DataPlane
from servax.runtime.servable import Servable
from servax.server.app import plane_of
from servax.server.front import Front
from servax.server.settings import Settings, make

_lock = threading.Lock()
_servers: dict[int, BackgroundServer] = {}
"""The servers of this process by the port asked for: a cell that is run again replaces its server."""

_SETTINGS = frozenset((
    "metrics", "tfserving_http", "tfserving_grpc", "max_body", "body_timeout", "max_connections", "idle_timeout",
    "drain_timeout", "api_key_file", "admin_key_file", "api_key", "admin_key", "open_health", "tls_cert", "tls_key",
    "tls_client_ca", "cors_origin", "timings", "triton_metrics",
))  # fmt: skip
"""Settings of `servax serve` that a server of servables which are loaded already has a use for."""


class BackgroundServer:
    """A server that runs until `close`; the servables are the caller's and stay open.

    Args:
      plane: what is served.
      settings: of the server.
      closing: called once when it has ended, for what is the server's own.

    Attributes:
      url: where it is reached, e.g. `http://127.0.0.1:8000`.
      grpc: where its gRPC is reached, e.g. `127.0.0.1:8001`; None without.
    """

    def __init__(self, plane: DataPlane, settings: Settings, closing: Callable[[], None] | None = None) -> None:
        self._plane = plane
        self._closing = closing
        self._grace = settings.drain_timeout
        self._front = Front(plane, settings)
        self._started = threading.Event()
        self._failures: list[BaseException] = []
        self.url = self._front.urls["http"]
        self._thread = threading.Thread(target=self._run, name=f"servax-http-{self.url}", daemon=True)
        self._thread.start()
        self._started.wait()
        for failure in self._failures:
            self._thread.join()
            if isinstance(failure, ServaxError):
                raise failure
            raise StartupError("the server did not start", where=self.url, seen=repr(failure))
        self.grpc = self._front.urls.get("grpc")

    @property
    def alive(self) -> bool:
        """Whether it listens."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops listening, gives requests in flight `drain_timeout` seconds to finish, and ends the thread."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._front.stop, self._grace)
        self._thread.join()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()
        with _lock:
            for key in [key for key, server in _servers.items() if server is self]:
                del _servers[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BackgroundServer {self.url}{'' if self.alive else ', closed'}>"

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._front.loop_factory) as runner:
                runner.run(self._serve())
        except BaseException as error:  # told to whoever waits for the start, on another thread
            self._failures.append(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._front.open()
        except ServaxError:
            await self._front.close()
            raise
        await self._front.serve(self._started.set)


def serve(
    source: DataPlane | Servable | Iterable[Servable],
    port: int = 8000,
    host: str = "127.0.0.1",
    *,
    grpc_port: int | None = None,
    closing: Callable[[], None] | None = None,
    **options: Any,
) -> BackgroundServer:
    """Serves in a thread and returns once it listens; a server of this process at the same port is replaced.

    Args:
      source: a servable, several, or a data plane.
      port: 0 picks a free one.
      host: loopback unless told otherwise.
      grpc_port: 0 picks a free one; None: no gRPC.
      closing: called once when the server has ended.
      options: more settings of `servax serve`, by name: `max_body="1MiB"`, `api_key_file="keys"`. Those of loading, of
        stores, of the log and of the process are refused.

    Raises:
      UsageError: a setting cannot be used.
      StartupError: another process has the port; keys or certificates cannot be read.
    """
    if useless := sorted(options.keys() & Settings.model_fields.keys() - _SETTINGS):
        raise UsageError(
            "settings have no effect on a server in this process",
            seen=", ".join(useless),
            expected=", ".join(sorted(_SETTINGS)),
            remedy="say how a model is loaded, and how its requests are joined, to servax.load",
        )
    chosen = make(http=port, host=host, grpc=-1 if grpc_port is None else grpc_port, **options)
    plane = plane_of(source)
    with _lock:
        former = _servers.get(port) if port else None
    if former is not None:
        former.close()
    server = BackgroundServer(plane, chosen, closing)
    if port:
        with _lock:
            _servers[port] = server
    return server


@atexit.register
def _close_all() -> None:
    """Answers what is in flight before the interpreter ends."""
    with _lock:
        servers = list(_servers.values())
    for server in servers:
        server.close()
