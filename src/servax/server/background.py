"""A server in a thread of this process: for notebooks, tests, and programs that do something else as well."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from servax.core.errors import StartupError
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference.rest import DEFAULT_MAX_BODY
from servax.runtime.servable import Servable
from servax.server.app import create_app
from servax.server.http import Server
from servax.server.sockets import listen, url_of

if TYPE_CHECKING:
    import socket

_lock = threading.Lock()
_servers: dict[int, BackgroundServer] = {}
"""The servers of this process by the port asked for: a cell that is run again replaces its server."""


_GRACE = 30.0
"""Seconds that requests in flight have when a server is closed."""


class BackgroundServer:
    """A server that runs until `close`; the servables are the caller's and stay open.

    Attributes:
      url: where it is reached, e.g. `http://127.0.0.1:8000`.
    """

    def __init__(self, app: Any, listening: socket.socket) -> None:
        self.url = url_of(listening)
        self._server = Server(app)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name=f"servax-http-{self.url}", daemon=True
        )
        self._thread.start()
        self._server.wait_started()
        if self._server.failure is not None:
            raise StartupError("the server did not start", where=self.url, seen=repr(self._server.failure))

    @property
    def alive(self) -> bool:
        """Whether it listens."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops listening, lets requests in flight finish, and ends the thread."""
        self._server.stop(_GRACE)
        self._thread.join()
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


def serve(
    source: DataPlane | Servable | Iterable[Servable],
    port: int = 8000,
    host: str = "127.0.0.1",
    *,
    max_body: int = DEFAULT_MAX_BODY,
) -> BackgroundServer:
    """Serves in a thread and returns once it listens; a server of this process at the same port is replaced.

    Args:
      source: a servable, several, or a data plane.
      port: 0 picks a free one.
      host: loopback unless told otherwise.
      max_body: largest request body, in bytes.

    Raises:
      StartupError: another process has the port.
    """
    app = create_app(source, max_body=max_body)
    with _lock:
        former = _servers.get(port) if port else None
    if former is not None:
        former.close()
    server = BackgroundServer(app, listen(host, port))
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
