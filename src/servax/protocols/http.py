"""What every protocol over HTTP does alike, in raw ASGI: reads a request, has it answered, and sends the answer.

The way of a request costs no task and no timer of its own; see `calls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from servax.core.errors import ExecutionError, InvalidInput, RequestError, ServaxError, ServiceError
from servax.core.events import Notice, emit
from servax.protocols.bodies import Body, Limits, Reader, accepted_encoding, packed
from servax.protocols.calls import Calls, Gone, Receive, Refusal
from servax.protocols.dataplane import DataPlane
from servax.protocols.wording import short

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"

_TIMINGS: dict[tuple[str, ...], bytes] = {}
"""By the names of steps, the text that their times are put into."""

_LINGER = 2.0
"""Seconds in which a client that still sends may read why its request is refused."""


@dataclass(slots=True)
class Incoming:
    """A request that has arrived.

    Attributes:
      headers: by lower-case name; of several with one name the last.
      body: whole and unpacked; nobody else holds it.
    """

    headers: dict[bytes, bytes]
    body: Body

    @property
    def deadline(self) -> float | None:
        """On `time.monotonic`'s clock, by the header `Request-Timeout-Ms`; None without it.

        Raises:
          InvalidInput: the header is not a number of milliseconds.
        """
        text = self.headers.get(b"request-timeout-ms")
        return None if text is None else _deadline(text)

    @property
    def priority(self) -> int:
        """By the header `Request-Priority`: higher runs earlier; 0 without it.

        Raises:
          InvalidInput: the header is not an integer.
        """
        text = self.headers.get(b"request-priority")
        return 0 if text is None else _priority(text)


@dataclass(slots=True)
class Answer:
    """What a client is sent."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Sequence[Header] = ()


@dataclass(slots=True)
class Streamed:
    """What a client is sent part by part, each as soon as it is there.

    Attributes:
      parts: tells its own errors in its own form: once the first part is there, the status is sent. It is closed when
        the client goes away.
    """

    parts: AsyncGenerator[bytes]
    content_type: bytes = b"text/event-stream; charset=utf-8"
    headers: Sequence[Header] = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


Work = Callable[[Incoming], Awaitable[Answer | Streamed]]
"""Answers a request whose body is there. Errors of ours become answers of their own."""


class Endpoint:
    """Runs the handlers of one protocol.

    Args:
      plane: says whether the server drains.
      limits: of what is read.
      write_error: the body in which the protocol tells an error; JSON.
    """

    def __init__(self, plane: DataPlane, limits: Limits, write_error: Callable[[ServaxError], bytes]) -> None:
        self._plane = plane
        self._limits = limits
        self._write_error = write_error
        self._reader = Reader(limits)
        self._calls: Calls | None = None
        self._by_loop: dict[asyncio.AbstractEventLoop, Calls] = {}

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, work: Work, *, while_closing: bool = False
    ) -> None:
        """Reads the request, does the work, and sends its answer, which is an error where either fails.

        A client that goes away before its answer takes the work along: it is cancelled.

        Args:
          scope: of the request.
          receive: gives its body, and later says that the client went away.
          send: takes the answer.
          work: makes the answer.
          while_closing: whether this is still answered when the server drains.
        """
        calls = self._present_calls()
        call = calls.begin(receive)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            if self._plane.closing and not while_closing:
                raise Refusal.stopping()
            body = await self._reader.read(headers, receive)
            call.arrived()
            made = await work(Incoming(headers, body))
            if isinstance(made, Streamed):
                await _stream(send, made)
                return
            answer = made
        except Gone:
            return
        except asyncio.CancelledError:
            reason = call.caught()
            if reason is None:
                raise
            if isinstance(reason, Gone):
                return
            answer = self._refused(reason)
        except Refusal as refusal:
            answer = self._refused(refusal)
        except ServaxError as error:
            answer = self._failed(error)
        except Exception as error:  # a fault of ours: said in full to the operator, in short to the client
            emit(Notice(f"a request failed: {error!r}\n{traceback.format_exc()}", level="error"))
            answer = self._failed(ExecutionError("the server failed; its log says why"))
        finally:
            calls.end(call)
        if call.reading:
            await _respond_early(receive, send, answer, linger=call.stopped is None and not self._plane.closing)
            return
        accept = headers.get(b"accept-encoding")
        if accept is not None and (encoding := accepted_encoding(accept)) is not None:
            answer.body = await packed(answer.body, encoding)
            answer.headers = (*answer.headers, (b"content-encoding", encoding.encode()))
        await respond(send, answer)

    def error(self, error: ServaxError, status: int | None = None, headers: Sequence[Header] = ()) -> Answer:
        """The answer that tells an error; its status is the error's own unless another is given."""
        return Answer(self._write_error(error), status_of(error) if status is None else status, headers=headers)

    def _failed(self, error: ServaxError) -> Answer:
        retry = error.retry_after if isinstance(error, ServiceError) else None
        if retry is None:
            return self.error(error)
        return self.error(error, headers=[(b"retry-after", b"%d" % max(1, math.ceil(retry)))])

    def _refused(self, refusal: Refusal) -> Answer:
        return self.error(refusal.error, refusal.status, refusal.headers)

    def _present_calls(self) -> Calls:
        loop = asyncio.get_running_loop()
        calls = self._calls
        if calls is None or calls.loop is not loop:
            for former in [each for each in self._by_loop if each.is_closed()]:
                del self._by_loop[former]
            calls = self._by_loop.get(loop)
            if calls is None:
                calls = Calls(loop, lambda: self._plane.closing, self._limits.body_timeout)
                self._by_loop[loop] = calls
            self._calls = calls
        return calls


async def respond(send: Send, answer: Answer) -> None:
    """Sends an answer whole."""
    await send(_start(answer))
    await send({"type": "http.response.body", "body": answer.body})


async def _stream(send: Send, answer: Streamed) -> None:
    """Sends an answer part by part."""
    async with contextlib.aclosing(answer.parts) as parts:
        part = await anext(parts, b"")  # before anything is sent: a stream that has begun is closed in order
        headers = [(b"content-type", answer.content_type), *answer.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": part, "more_body": True})
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def server_timing(times: Mapping[str, float]) -> Header:
    """The header that says what each step took: seconds by step, told in milliseconds."""
    steps = tuple(times)
    form = _TIMINGS.get(steps)
    if form is None:
        form = _TIMINGS[steps] = ", ".join(f"{step};dur=%.3f" for step in steps).encode()
    return b"server-timing", form % tuple([seconds * 1e3 for seconds in times.values()])


def status_of(error: ServaxError) -> int:
    """The HTTP status of an error; 500 for one that is not about a request."""
    return error.status if isinstance(error, RequestError | ServiceError) else 500


async def _respond_early(receive: Receive, send: Send, answer: Answer, *, linger: bool) -> None:
    """Answers a request that is not read to its end, and closes its connection.

    A client that sends on would find the connection broken before it has read the answer, so what it sends is thrown
    away for a moment.
    """
    await send(_start(answer, (b"connection", b"close")))
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    if linger:
        try:
            async with asyncio.timeout(_LINGER):
                while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                    continue
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": b""})


def _start(answer: Answer, *headers: Header) -> MutableMapping[str, Any]:
    return {
        "type": "http.response.start",
        "status": answer.status,
        "headers": [
            (b"content-type", answer.content_type),
            (b"content-length", b"%d" % len(answer.body)),
            *answer.headers,
            *headers,
        ],
    }


def _deadline(text: bytes) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise InvalidInput(
            "the deadline cannot be read",
            where="header Request-Timeout-Ms",
            seen=short(text.decode("latin-1")),
            expected="milliseconds, more than 0",
        )
    return time.monotonic() + milliseconds / 1e3


def _priority(text: bytes) -> int:
    try:
        priority = int(text)
    except ValueError:
        priority = None
    if priority is None or abs(priority) >= 1 << 31:
        raise InvalidInput(
            "the priority cannot be read",
            where="header Request-Priority",
            seen=short(text.decode("latin-1")),
            expected="an integer of 32 bits; higher runs earlier",
        )
    return priority
