"""uvicorn as servax runs it: without its signal handlers and its logging, telling when it has started."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator
from typing import Any

import uvicorn


class Server(uvicorn.Server):
    """A uvicorn server for one application.

    Attributes:
      failure: why it did not start or broke off; None otherwise.
    """

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
            )
        )
        self.failure: BaseException | None = None
        self._announced = threading.Event()

    def stop(self, grace: float) -> None:
        """Stops listening, gives connections `grace` seconds to send what they owe, and ends; from any thread."""
        self.config.timeout_graceful_shutdown = max(1, round(grace))
        self.should_exit = True

    def wait_started(self) -> None:
        """Waits until it takes requests, or has failed."""
        self._announced.wait()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        except BaseException as error:  # told to whoever waits for the start, on another thread
            self.failure = error
        finally:
            self._announced.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announced.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leaves signals to the process: uvicorn would raise them again after a graceful end."""
        yield
