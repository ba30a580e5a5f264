"""A lean HTTP/1.1 client: one request at a time on a connection that stays open, sent as bytes made beforehand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import cast

Done = Callable[[str | None, bytes], None]
"""Called once a request, with what went wrong (None: nothing) and the body."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


def encode(host: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A POST as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """One connection; `send` may be called again once `done` was."""

    def __init__(self) -> None:
        self._done: Done | None = None
        self._pending = b""
        self._need = 0
        self._head = 0
        self._transport: asyncio.Transport | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.open = True

    def send(self, request: bytes, done: Done) -> None:
        self._done = done
        if self._transport is None or not self.open:
            self._finish("the connection is closed", b"")
            return
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
            self._pending = b""
        if not self._need:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._pending = data
                return
            self._head = end + 4
            if found := _LENGTH.search(data, 0, end):
                self._need = self._head + int(found[1])
            elif _CHUNKED.search(data, 0, end):
                self._need = -1
            else:
                self._need = self._head
        if self._need < 0:
            if not data.endswith(b"0\r\n\r\n"):
                self._pending = data
                return
            body = _dechunked(data[self._head :])
        elif len(data) < self._need:
            self._pending = data
            return
        else:
            body = data[self._head : self._need]
        self._need = 0
        status = data[9:12]
        self._finish(None if status == b"200" else f"status {status.decode()}", body)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._done is not None:
            self._finish("the connection was lost", b"")

    def _finish(self, error: str | None, body: bytes) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(error, body)


def _dechunked(data: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].split(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
