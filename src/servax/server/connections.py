"""A connection over HTTP as uvicorn speaks it, with bounds: on their number, on heads, on idle and slow clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from servax.core.errors import InvalidInput, NotReady, ServaxError
from servax.server.app import error_body
from servax.server.gate import WHOLE

if TYPE_CHECKING:
    from asyncio import TimerHandle

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_WHOLE = 64 * 1024
"""Bytes of a body up to which it is copied behind its head, to be written with it."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What connections are held to.

    Attributes:
      number: how many there may be; None: as many as the system gives.
      idle: seconds that one may be open between two requests.
      head: seconds in which the head of a request must arrive, the first one's from connecting.
      head_bytes: size of a request's head.
      stalled: seconds in which a client must take some of an answer that waits for it.
    """

    number: int | None = None
    idle: float = 75.0
    head: float = 15.0
    head_bytes: int = 64 * 1024
    stalled: float = 30.0


class Config(uvicorn.Config):
    """uvicorn's, with our limits beside them."""

    limits: ConnectionLimits


class Connection(HttpToolsProtocol):
    """One connection; made by uvicorn."""

    config: Config

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = self.config.limits
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: TimerHandle | None = None
        self._stall_timer: TimerHandle | None = None
        self._cycles: deque[RequestResponseCycle] = deque()
        self._default: tuple[list[tuple[bytes, bytes]] | None, bytes] = (None, b"")

    # uvicorn narrows the transport that asyncio declares, and so must an override of its method.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._limits.number is not None and len(self.connections) > self._limits.number:
            error = NotReady("too many connections are open", expected=f"at most {self._limits.number}")
            self._refuse("503 Service Unavailable", error)
            return
        self._head_timer = self.loop.call_later(self._limits.head, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the last one only
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)
        scope: Any = self.scope
        if scope["method"] != "HEAD":
            scope[WHOLE] = partial(self._answer_whole, self.cycle)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self._limits.head, self._on_late_head)
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
                error = InvalidInput(
                    "the head of the request is too large", expected=f"at most {self._limits.head_bytes} bytes"
                )
                self._refuse("431 Request Header Fields Too Large", error)
        elif self._head_timer is not None:
            self._forget_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _answer_whole(
        self, cycle: RequestResponseCycle, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """Writes an answer that is there as a whole at once; False where it must be sent in the ordinary way.

        uvicorn checks, copies and writes the head and the body of an answer one after the other. These headers are our
        own, so that nothing in them needs checking.
        """
        if (
            not cycle.keep_alive
            or cycle.disconnected
            or cycle.response_started
            or cycle.waiting_for_100_continue
            or self.flow.write_paused
            or len(body) > _WHOLE
        ):
            return False
        parts = [_STATUS_LINES[status], self._default_head()]
        for name, value in headers:
            if name == b"connection":
                return False
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n", body)
        self.transport.write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True

    def _default_head(self) -> bytes:
        """The headers of uvicorn itself, which it makes anew once a second."""
        headers = self.server_state.default_headers
        if self._default[0] is not headers:
            self._default = (headers, b"".join([b"%b: %b\r\n" % each for each in headers]))
        return self._default[1]

    def _watch_writing(self, waiting: int) -> None:
        self._stall_timer = self.loop.call_later(self._limits.stalled, self._on_stall, waiting)

    def _on_stall(self, waited: int) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < waited:
            self._watch_writing(waiting)
        else:
            self.transport.abort()

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._in_head:
            error = InvalidInput(
                "the head of the request did not arrive in time", expected=f"all of it within {self._limits.head:g} s"
            )
            self._refuse("408 Request Timeout", error)
        else:
            self.transport.close()

    def _forget_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: str, error: ServaxError) -> None:
        """Answers before there is a request, and closes."""
        body = error_body(error, "")
        retry = "retry-after: 1\r\n" if status.startswith("503") else ""
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            "connection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()
