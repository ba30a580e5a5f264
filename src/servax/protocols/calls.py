"""Requests in progress on an event loop: those that take too long to arrive, and those whose client went away.

One timer looks at all of them. A task or a timer for each would cost a request more than reading it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from servax.core.errors import InvalidInput, NotReady, ServaxError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_GLANCE = 0.02
"""Seconds between two looks; a request that waits longer for its answer is watched for its client."""


class Gone(Exception):
    """The client went away: nobody is there to answer."""


class Refusal(Exception):
    """An error with an HTTP status of its own; `closes` says that the rest of the request will not be read."""

    def __init__(self, status: int, error: ServaxError, *headers: tuple[bytes, bytes], closes: bool = False) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.headers = headers
        self.closes = closes

    @classmethod
    def stopping(cls) -> Refusal:
        """The server drains: this request is for another one."""
        error = NotReady("the server stops", remedy="send the request to another server")
        return cls(503, error, (b"retry-after", b"1"), closes=True)

    @classmethod
    def late(cls, limit: float) -> Refusal:
        """The body took longer than `limit` seconds."""
        error = InvalidInput(
            "the request body did not arrive in time",
            seen="a body that is not complete",
            expected=f"the whole body within {limit:g} s",
            remedy="send it faster, or less at once",
        )
        return cls(408, error, closes=True)


class Call:
    """One request in progress, on the task that answers it.

    Attributes:
      reading: whether its body still arrives.
      stopped: why its task was cancelled from here; None as long as it was not.
    """

    __slots__ = ("_listener", "_receive", "_task", "reading", "since", "stopped")

    def __init__(self, receive: Receive) -> None:
        self.reading = True
        self.stopped: Gone | Refusal | None = None
        self.since: float | None = None
        self._receive = receive
        self._task = asyncio.current_task()
        self._listener: asyncio.Task[None] | None = None

    def arrived(self) -> None:
        """The body is there; from now on the client waits."""
        self.reading = False
        self.since = None

    def stop(self, reason: Gone | Refusal) -> None:
        """Cancels the request; its task sees `stopped`."""
        if self.stopped is None and self._task is not None:
            self.stopped = reason
            self._task.cancel()

    def caught(self) -> Gone | Refusal | None:
        """Why the cancellation that the task has just caught came from here; None where it did not."""
        if self.stopped is not None and self._task is not None:
            self._task.uncancel()
        return self.stopped

    def listen(self) -> None:
        """Watches for the client; does nothing the second time."""
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._until_gone())

    def end(self) -> None:
        if self._listener is not None:
            self._listener.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.stop(Gone())


class Calls:
    """The requests in progress on one event loop.

    Args:
      loop: theirs.
      closing: whether the server drains; bodies that are not complete are then waited for no longer.
      body_timeout: seconds in which a body must arrive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, closing: Callable[[], bool], body_timeout: float) -> None:
        self.loop = loop
        self._closing = closing
        self._body_timeout = body_timeout
        self._glance = min(_GLANCE, body_timeout)
        self._calls: set[Call] = set()
        self._looking = False

    def begin(self, receive: Receive) -> Call:
        """Takes in the request that the present task answers."""
        call = Call(receive)
        self._calls.add(call)
        if not self._looking:
            self._looking = True
            self.loop.call_later(self._glance, self._look)
        return call

    def end(self, call: Call) -> None:
        """Forgets a request that has its answer."""
        self._calls.discard(call)
        call.end()

    def _look(self) -> None:
        now = self.loop.time()
        for call in tuple(self._calls):
            if call.since is None:
                call.since = now
            elif not call.reading:
                call.listen()
            elif now - call.since >= self._body_timeout:
                call.stop(Refusal.late(self._body_timeout))
            if call.reading and self._closing():
                call.stop(Refusal.stopping())
        self._looking = bool(self._calls)
        if self._looking:
            self.loop.call_later(self._glance, self._look)
