"""A lean gRPC client: unary calls over HTTP/2, the request's header block and message made beforehand.

As much of RFC 9113 as unary gRPC needs. Headers of answers are not decoded: a call succeeded when a whole message came,
since a gRPC server that fails a unary call sends none.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import cast

from measure.http1 import Done

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
(
    _DATA,
    _HEADERS,
    _RESET,
    _SETTINGS,
    _PING,
    _GOAWAY,
    _WINDOW,
) = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_LARGEST_WINDOW = 2**31 - 1
_SMALLEST_WINDOW = 65535
_FRAME = 16384


def encode(message: bytes) -> bytes:
    """A gRPC message, uncompressed, with its length; it must fit the window that every stream has at first."""
    assert len(message) < _SMALLEST_WINDOW - 5
    return b"\0" + struct.pack(">I", len(message)) + message


def header_block(authority: str, path: str) -> bytes:
    """The request's headers in HPACK (RFC 7541), without the dynamic table."""

    def text(value: str) -> bytes:
        raw = value.encode()
        assert len(raw) < 127
        return bytes([len(raw)]) + raw

    return (
        b"\x83\x86"  # :method POST, :scheme http
        + b"\x04" + text(path)
        + b"\x01" + text(authority)
        + b"\x0f\x10" + text("application/grpc")  # content-type
        + b"\x00" + text("te") + text("trailers")
    )  # fmt: skip


@dataclass(slots=True)
class _Call:
    done: Done
    data: list[bytes] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One connection; any number of calls at a time.

    Args:
      headers: as `header_block` makes them.
    """

    def __init__(self, headers: bytes) -> None:
        self._headers = headers
        self._calls: dict[int, _Call] = {}
        self._next = 1
        self._pending = b""
        self._window = _SMALLEST_WINDOW
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._received = 0
        self._transport: asyncio.Transport | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.open = True
        settings = struct.pack(">HIHI", 0x2, 0, 0x4, _LARGEST_WINDOW)  # no push; the window of each stream
        self._transport.write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_WINDOW, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _SMALLEST_WINDOW))
        )

    def send(self, request: bytes, done: Done) -> None:
        if self._transport is None or not self.open:
            done("the connection is closed", b"")
            return
        stream, self._next = self._next, self._next + 2
        self._calls[stream] = _Call(done)
        self._waiting.append((stream, request))
        self._flush()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        assert self._transport is not None
        while self._waiting and len(self._waiting[0][1]) <= self._window:
            stream, request = self._waiting.popleft()
            self._window -= len(request)
            parts = [_frame(_HEADERS, _END_HEADERS, stream, self._headers)]
            for at in range(0, len(request), _FRAME):
                last = at + _FRAME >= len(request)
                parts.append(_frame(_DATA, _END_STREAM if last else 0, stream, request[at : at + _FRAME]))
            self._transport.write(b"".join(parts))

    def data_received(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        at, end = 0, len(data)
        while end - at >= 9:
            size = int.from_bytes(data[at : at + 3])
            if end - at < 9 + size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9]) & _LARGEST_WINDOW
            self._on_frame(kind, flags, stream, data[at + 9 : at + 9 + size])
            at += 9 + size
        self._pending = data[at:]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind in (_DATA, _HEADERS):
            call = self._calls.get(stream)
            if call is None:
                return
            if kind == _DATA:
                call.data.append(payload)
                self._received += len(payload)
                if self._received > 2**20:
                    self._transport.write(_frame(_WINDOW, 0, 0, struct.pack(">I", self._received)))
                    self._received = 0
            if flags & _END_STREAM:
                del self._calls[stream]
                message = b"".join(call.data)
                whole = len(message) >= 5 and len(message) == 5 + int.from_bytes(message[1:5])
                call.done(None if whole else "no message: the call failed", message[5:])
        elif kind == _WINDOW and stream == 0:
            self._window += int.from_bytes(payload)
            self._flush()
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RESET and stream in self._calls:
            self._calls.pop(stream).done(f"reset with code {int.from_bytes(payload)}", b"")
        elif kind == _GOAWAY:
            self.open = False

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.done("the connection was lost", b"")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload
