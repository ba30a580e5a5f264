"""Log lines on standard error, one event a line, `key=value`: what happened inside, and each HTTP request."""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from servax.core.events import Event, Notice, StateChanged, StepFinished
from servax.protocols.open_inference.rest import Receive, Scope, Send

_QUIET = ("/health/live", "/health/ready", "/metrics", "/ready")


def logger(stream: TextIO | None = None) -> Any:
    """A logger of plain lines; its own, so that the host program's logging is left alone."""
    return structlog.wrap_logger(
        structlog.WriteLogger(stream or sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "event"), bool_as_flag=False),
        ],
    )


class EventLog:
    """A listener that writes notices, changes of state and finished steps."""

    def __init__(self, log: Any) -> None:
        self._log = log

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            write = {"warning": self._log.warning, "error": self._log.error}.get(event.level, self._log.info)
            write(event.message, **event.fields)
        elif isinstance(event, StateChanged):
            reason = {} if event.reason is None else {"reason": event.reason}
            self._log.info("state", model=event.servable, state=str(event.state), **reason)
        elif isinstance(event, StepFinished):
            self._log.info("step", step=event.step, seconds=round(event.seconds, 3))


class AccessLog:
    """An application around another that writes a line for each request; probes and scrapes are left out."""

    def __init__(self, app: Any, log: Any) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].endswith(_QUIET):
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._log.info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status or "gone",
                ms=round((time.perf_counter() - began) * 1e3, 3),
            )
