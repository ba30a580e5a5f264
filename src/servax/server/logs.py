"""Log lines on standard error, one event a line, in logfmt or JSON: what happened inside. Requests: `access_log`."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import structlog

from servax.core.events import Event, Notice, StateChanged, StepFinished


def logger(stream: TextIO | None = None, *, as_json: bool = False) -> Any:
    """A logger of plain lines; its own, so that the host program's logging is left alone."""
    order = ("timestamp", "level", "event")
    return structlog.wrap_logger(
        structlog.WriteLogger(stream or sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer()
            if as_json
            else structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False),
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
