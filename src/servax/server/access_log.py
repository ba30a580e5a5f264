"""A line for each request, formatted by hand and written many at a time: a logger would cost more than the request."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import NamedTuple, TextIO

_FLUSH = 0.25
"""Seconds that a line waits for others at most."""

_MOST = 512
"""Lines that are held back at most."""

_PATHS = 1024
"""Paths whose text is kept."""

_PLAIN = re.compile(r"[\w./:%~@+,;!$&'()*-]+", re.ASCII)
"""What logfmt takes without quotes."""

_QUERY_VALUE = re.compile(r"=[^&]*")


class Access(NamedTuple):
    """What one line tells.

    Attributes:
      id: of the request.
      client: address.
      key: name of the caller's key; None without one.
      method: of HTTP; `gRPC` for a gRPC call.
      path: as it was sent, or the gRPC method; query values are not written.
      query: after the path.
      status: of HTTP, or the gRPC code's name; None where the client went first.
      seconds: from the headers' arrival to the answer's end.
      received: bytes that the body was announced with; None where nothing was.
      sent: bytes of the answer's body; of a gRPC stream 0.
    """

    id: str
    client: str
    key: str | None
    method: str
    path: bytes
    query: bytes
    status: int | str | None
    seconds: float
    received: bytes | None
    sent: int


class AccessLog:
    """Lines in logfmt or JSON.

    Args:
      stream: where they go; standard error unless given.
      as_json: one JSON object a line.
    """

    def __init__(self, stream: TextIO | None = None, *, as_json: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._as_json = as_json
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""
        self._paths: dict[bytes, tuple[str, str]] = {}

    def add(self, access: Access) -> None:
        """Takes a line, to be written soon; on the event loop's thread."""
        lines = self._lines
        lines.append(self._json(access) if self._as_json else self._logfmt(access))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH, self.flush)
        elif len(lines) >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Writes what is held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            self._stream.write("".join(lines))
            self._stream.flush()

    def _logfmt(self, access: Access) -> str:
        path, model = self._paths.get(access.path) or self._learn(access.path)
        if access.query:
            path = f'"{path.strip(chr(34))}?{_masked(access.query)}"'
        key = "" if access.key is None else f" key={_quoted(access.key)}"
        model = f" model={model}" if model else ""
        received = "" if access.received is None else f" received={access.received.decode('latin-1')}"
        return (
            f"timestamp={self._now()} level=info event=request id={access.id} client={access.client}{key} "
            f"method={access.method} path={path}{model} status={access.status or 'gone'} "
            f"ms={access.seconds * 1e3:.3f}{received} sent={access.sent}\n"
        )

    def _json(self, access: Access) -> str:
        _, model = self._paths.get(access.path) or self._learn(access.path)
        path = access.path.decode("latin-1") + (f"?{_masked(access.query)}" if access.query else "")
        fields = {
            "timestamp": self._now(),
            "level": "info",
            "event": "request",
            "id": access.id,
            "client": access.client,
            "key": access.key,
            "method": access.method,
            "path": path,
            "model": model or None,
            "status": access.status or "gone",
            "ms": round(access.seconds * 1e3, 3),
            "received": None if access.received is None else int(access.received),
            "sent": access.sent,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}) + "\n"

    def _now(self) -> str:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._stamp}.{int((now - second) * 1000):03d}Z"

    def _learn(self, path: bytes) -> tuple[str, str]:
        """The text of a path, and the model it names."""
        text = path.decode("latin-1")
        _, found, rest = text.partition("/models/")
        model = rest.split("/", 1)[0].partition(":")[0] if found else ""
        if len(self._paths) >= _PATHS:
            self._paths.clear()
        learned = self._paths[path] = (_quoted(text), _quoted(model) if model else "")
        return learned


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _masked(query: bytes) -> str:
    """A query string with its names and none of its values."""
    text = _QUERY_VALUE.sub("=***", query.decode("latin-1"))
    return json.dumps(text)[1:-1]
