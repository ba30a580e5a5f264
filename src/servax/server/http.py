"""uvicorn as servax runs it: without its signal handlers and its logging, telling when it has started."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from servax.server.connections import Config, Connection, ConnectionLimits
from servax.server.tls import Tls


class Server(uvicorn.Server):
    """A uvicorn server for one application.

    Attributes:
      on_start: called once it takes requests.
    """

    def __init__(self, app: Any, *, tls: Tls | None, limits: ConnectionLimits) -> None:
        config = Config(
            app,
            http=Connection,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(limits.idle)),
            ssl_context_factory=None if tls is None else lambda config, make: tls.context,
        )
        config.limits = limits
        super().__init__(config)
        self.on_start: Callable[[], None] | None = None

    def stop(self, grace: float) -> None:
        """Stops listening, gives connections `grace` seconds to send what they owe, and ends; from any thread."""
        self.config.timeout_graceful_shutdown = max(1, round(grace))
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_start is not None:
            self.on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leaves signals to the process: uvicorn would raise them again after a graceful end."""
        yield
