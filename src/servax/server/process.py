"""A process that serves: listens at once, is ready once everything is warm, and drains before it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from servax.core import monitoring
from servax.core.errors import ServaxError, StartupError, UsageError
from servax.core.events import listening
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference.rest import DEFAULT_MAX_BODY
from servax.runtime.local import LocalServable
from servax.runtime.servable import State
from servax.server.app import create_app
from servax.server.http import Server
from servax.server.logs import AccessLog, EventLog, logger
from servax.server.sockets import listen, url_of
from servax.server.startup import Startup

Loader = Callable[[], LocalServable | Sequence[LocalServable]]
"""Loads what is to be served. What comes back LOADING is warmed here, where readiness sees each program."""

DEFAULT_DRAIN_TIMEOUT = 30.0
"""Seconds that requests in flight have after the first signal."""

START_FAILED = StartupError.exit_code

_GRACE = 10.0
"""Seconds that connections have to send answers that are there."""


def run(
    load: Loader,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_timeout: float = DEFAULT_DRAIN_TIMEOUT,
    max_body: int = DEFAULT_MAX_BODY,
    access_log: bool = True,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code: 0, or 3 when start-up failed, which is printed.

    It is 2 in place of 3 where `load` raised UsageError.

    The port is taken and `/v2/health/live` answers before `load` runs. After the first signal it is unready, new
    requests are refused, and those in flight have `drain_timeout` seconds; a second signal ends the process at once.
    For the main thread. When a thread is still inside XLA at the end, because `load` was interrupted or a request
    outlived the drain, this ends the process and does not return.
    """
    log = logger()
    try:
        socket = listen(host, port)
    except ServaxError as error:
        print(error, file=sys.stderr)
        return START_FAILED
    process = _Process(load, drain_timeout, log)
    app: Any = create_app(process.plane, max_body=max_body)
    server = Server(AccessLog(app, log) if access_log else app)
    log.info("listening", url=url_of(socket))
    loop_factory = server.config.get_loop_factory()  # uvloop where it is installed
    with listening(EventLog(log)), asyncio.Runner(loop_factory=loop_factory) as runner:
        code = runner.run(process.serve(server, socket))
    if process.loading or process.left:
        # A thread inside XLA does not survive the interpreter's end: the process ends without it.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
    return code


class _Process:
    """The life of the process, on one event loop; loading has a thread of its own.

    Attributes:
      left: how many requests outlived the drain.
    """

    def __init__(self, load: Loader, drain_timeout: float, log: Any) -> None:
        self._startup = Startup()
        self.plane = DataPlane(loading=self._startup.steps)
        self._load = load
        self._drain_timeout = drain_timeout
        self._log = log
        self._servables: list[LocalServable] = []
        self._failure: Exception | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.left = 0
        self._thread = threading.Thread(target=self._loading, name="servax-loader", daemon=True)

    @property
    def loading(self) -> bool:
        """Whether the loader still runs."""
        return self._thread.is_alive()

    async def serve(self, server: Server, socket: Any) -> int:
        self._server = server
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._thread.start()
        await server.serve([socket])
        if self._stopping is not None:
            await self._stopping
        if self._failure is not None:
            self._print_failure(self._failure)
            return UsageError.exit_code if isinstance(self._failure, UsageError) else START_FAILED
        return 0

    def _loading(self) -> None:
        began = time.perf_counter()
        try:
            with self._startup, monitoring.thread_role(monitoring.LOADING):
                loaded = self._load()
                self._servables = [loaded] if isinstance(loaded, LocalServable) else list(loaded)
                for servable in self._servables:
                    self.plane.add(servable)
                for servable in self._servables:
                    servable.warm()
        except Exception as error:
            self._failure = error
            self._server.stop(_GRACE)
            return
        self.plane.loading = None
        names = ",".join(servable.name for servable in self._servables)
        self._log.info("ready", models=names, seconds=round(time.perf_counter() - began, 3))

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopping is not None:
            self._log.warning("forced", signal=name)
            sys.stderr.flush()
            os._exit(128 + number)
        self._log.info("draining", signal=name, seconds=self._drain_timeout)
        self._stopping = self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        if not self.loading:
            ready = [servable for servable in self._servables if servable.state is State.READY]
            ends = time.monotonic() + self._drain_timeout
            counts = await asyncio.gather(
                *(asyncio.to_thread(each.drain, max(0.0, ends - time.monotonic())) for each in ready)
            )
            self.left = sum(counts)
            if self.left:
                self._log.warning("not drained", requests=self.left, seconds=self._drain_timeout)
        self._server.stop(1.0 if self.left else _GRACE)
        if not self.left and not self.loading:
            for servable in self._servables:
                await asyncio.to_thread(servable.close)

    def _print_failure(self, error: Exception) -> None:
        if not isinstance(error, ServaxError):
            traceback.print_exception(error, file=sys.stderr)
        print(f"start-up failed: {error}", file=sys.stderr)
