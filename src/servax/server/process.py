"""A process that serves: listens at once, is ready once everything is warm, and drains before it ends."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from servax.core import monitoring
from servax.core.errors import ServaxError, StartupError, UsageError
from servax.core.events import listening
from servax.protocols.dataplane import DataPlane
from servax.runtime.servable import State
from servax.server.access_log import AccessLog
from servax.server.front import Front
from servax.server.logs import EventLog, logger
from servax.server.models import Models
from servax.server.settings import Settings
from servax.server.startup import Startup

START_FAILED = StartupError.exit_code

_GRACE = 10.0
"""Seconds that connections have to send answers that are there, and models to free what they hold."""

_GLANCE = 0.02
"""Seconds between two looks at whether they have."""


def run(models: Models, settings: Settings, told: Told | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code: 0, or 3 when start-up failed, which is printed.

    It is 2 in place of 3 for a UsageError. The ports are taken and `/v2/health/live` answers before anything is
    loaded. After the first signal it is unready, new requests are refused, and those in flight have
    `settings.drain_timeout` seconds; a second signal ends the process at once. SIGHUP reads keys and certificates
    anew. For the main thread. When a thread is still inside XLA at the end, because loading was interrupted or a
    request outlived the drain, this ends the process and does not return.

    Args:
      models: what is served.
      settings: of the server.
      told: what happens, for the program that started this one; None: it is not told.
    """
    log = logger(as_json=settings.log_format == "json")
    access_log = AccessLog(as_json=settings.log_format == "json") if settings.access_log else None
    told = Told(False) if told is None else told
    with listening(EventLog(log)):
        process = _Process(models, settings, access_log, log, told)
        code = process.run()
    told("ended", code=code)
    if process.loading or process.left or process.closing:
        # A thread inside XLA does not survive the interpreter's end: the process ends without it.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
    return code


class Told:
    """What a program that started this one reads on standard output."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __call__(self, event: str, **fields: Any) -> None:
        if self._wanted:
            print(json.dumps({"event": event, **fields}), flush=True)

    def failed(self, error: Exception) -> None:
        """Start-up failed, with the parts of the error."""
        parts = ("where", "seen", "expected", "remedy")
        what = error.what if isinstance(error, ServaxError) else str(error)
        fields = {part: text for part in parts if (text := getattr(error, part, None)) is not None}
        self("failed", kind=type(error).__name__, what=what, **fields)


_YOUNG = 20_000
"""Objects that may come to life before a collection looks at them. Requests leave no cycles behind, and a few dozen in
progress hold more than Python's own threshold: each wave of them would be looked at, and kept, several times."""


class _Process:
    """The life of the process, on one event loop; loading has a thread of its own.

    Attributes:
      left: how many requests outlived the drain.
      closing: whether what the models hold is not freed yet.
    """

    def __init__(self, models: Models, settings: Settings, access_log: AccessLog | None, log: Any, told: Told) -> None:
        self._startup = Startup()
        self.plane = DataPlane(catalog=models.catalog, repository=models.repository, loading=self._startup.steps)
        self._models = models
        self._settings = settings
        self._access_log = access_log
        self._log = log
        self._told = told
        self._failure: Exception | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.left = 0
        self._thread = threading.Thread(target=self._loading, name="servax-loader", daemon=True)
        self._closer = threading.Thread(target=models.close, name="servax-closer", daemon=True)

    @property
    def loading(self) -> bool:
        """Whether the loader still runs."""
        return self._thread.is_alive()

    @property
    def closing(self) -> bool:
        return self._closer.is_alive()

    def run(self) -> int:
        try:
            self._front = Front(self.plane, self._settings, self._access_log)
            with asyncio.Runner(loop_factory=self._front.loop_factory) as runner:
                runner.run(self._serve())
        except ServaxError as error:  # before anything was loaded: a port, a key, a certificate
            self._failure = error
        if self._failure is None:
            return 0
        return self._tell_failure(self._failure)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._front.open()
        except BaseException:
            await self._front.close()
            raise
        urls = dict(self._front.urls)
        self._log.info("listening", url=urls["http"], **{name: url for name, url in urls.items() if name != "http"})
        self._told("listening", **urls)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._front.reload)
        self._thread.start()
        await self._front.serve()
        if self._stopping is not None:
            await self._stopping

    def _loading(self) -> None:
        began = time.perf_counter()
        try:
            with self._startup, monitoring.thread_role(monitoring.LOADING):
                self._models.start()
        except Exception as error:
            self._failure = error
            self._loop.call_soon_threadsafe(self._front.stop, _GRACE)
            return
        gc.collect()
        gc.freeze()  # what is loaded stays: collections need not look at it again
        gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
        self.plane.loading = None
        models = [f"{status.name}:{status.version}" for status in self.plane.list() if status.state is State.READY]
        seconds = round(time.perf_counter() - began, 3)
        self._log.info("ready", models=",".join(models), seconds=seconds)
        self._told("ready", models=models, seconds=seconds, **self._front.urls)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopping is not None:
            self._log.warning("forced", signal=name)
            self._told("ended", code=128 + number)
            if self._access_log is not None:
                self._access_log.flush()
            sys.stderr.flush()
            os._exit(128 + number)
        self._log.info("draining", signal=name, seconds=self._settings.drain_timeout)
        self._told("draining", signal=name, seconds=self._settings.drain_timeout)
        self.plane.closing = True
        self._stopping = self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        timeout = self._settings.drain_timeout
        if not self.loading:
            ready = [servable for servable in self._models.servables if servable.state is State.READY]
            ends = time.monotonic() + timeout
            counts = await asyncio.gather(
                *(asyncio.to_thread(each.drain, max(0.0, ends - time.monotonic())) for each in ready)
            )
            self.left = sum(counts)
            if self.left:
                self._log.warning("not drained", requests=self.left, seconds=timeout)
        self._front.stop(1.0 if self.left else _GRACE)
        if not self.left and not self.loading:
            self._closer.start()
            ends = time.monotonic() + _GRACE
            while self._closer.is_alive() and time.monotonic() < ends:  # a store may be loading a version just now
                await asyncio.sleep(_GLANCE)

    def _tell_failure(self, error: Exception) -> int:
        if not isinstance(error, ServaxError):
            traceback.print_exception(error, file=sys.stderr)
        print(f"start-up failed: {error}", file=sys.stderr)
        self._told.failed(error)
        return UsageError.exit_code if isinstance(error, UsageError) else START_FAILED
