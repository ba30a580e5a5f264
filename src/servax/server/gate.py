"""What stands before every HTTP request, in one thin layer: its id, its key, CORS, the access log, and a count.

Nothing behind it is reached without a key where keys are asked for, whatever the route.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any

import msgspec

from servax.core.errors import RequestError
from servax.protocols.calls import Receive
from servax.protocols.dataplane import DataPlane
from servax.protocols.http import Answer, Scope, Send, respond
from servax.server.access_log import Access as Line
from servax.server.access_log import AccessLog
from servax.server.app import error_body
from servax.server.auth import Access, Identity

_GIVEN_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
"""A request id of the client's that is taken over; another is made in place of any other."""

_QUIET = ("/health", "/health/live", "/health/ready", "/metrics", "/ready")
"""Ends of the paths of probes and scrapes, which have no line unless they are refused."""

_GONE = 499
"""Counts requests whose client did not wait for the answer, by the number that proxies have for it."""

_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST"),
    (
        b"access-control-allow-headers",
        b"authorization, content-type, inference-header-content-length, request-priority, request-timeout-ms, "
        b"x-api-key, x-request-id",
    ),
    (b"access-control-max-age", b"600"),
)
_EXPOSED = (
    b"access-control-expose-headers",
    b"inference-header-content-length, retry-after, server-timing, x-request-id",
)

WHOLE = "servax.whole"
"""Where a request's scope has a `Whole`, if its server offers one; taken out, since it leads back to the scope."""

Whole = Callable[[int, Sequence[tuple[bytes, bytes]], bytes], bool]
"""Sends an answer of this status, these headers and this body at once; False where ASGI's messages must send it."""


class Gate:
    """An ASGI application around another.

    Args:
      app: what is behind it.
      plane: tells probes without a key whether the server lives and is ready.
      access: who may come in; None: everybody.
      log: gets a line for each request; None: nothing does.
      origins: whose pages may read answers; `*`: everybody's.
      responses: HTTP responses by status, counted up here.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        plane: DataPlane,
        *,
        access: Access | None = None,
        log: AccessLog | None = None,
        origins: Sequence[str] = (),
        responses: dict[int, int] | None = None,
    ) -> None:
        self._app = app
        self._plane = plane
        self._access = access
        self._log = log
        self._origins = frozenset(origin.encode() for origin in origins)
        self._responses: dict[int, int] = {} if responses is None else responses
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        if given is None or not _GIVEN_ID.fullmatch(given):
            given = f"{self._prefix}{next(self._numbers):08x}".encode()
        sent = _Sent(send, given, self._cors(headers), scope.pop(WHOLE, None))
        path: str = scope["path"]
        identity: Identity | None = None
        try:
            if self._origins and (answer := self._preflight(scope, headers)) is not None:
                await respond(sent.send, answer)
                return
            if self._access is not None:
                try:
                    identity = self._access.http(path, headers)
                except RequestError as error:
                    await respond(sent.send, self._refusal(path, error))
                    return
            await self._app(scope, receive, sent.send)
        finally:
            status = sent.status
            self._responses[status or _GONE] = self._responses.get(status or _GONE, 0) + 1
            if self._log is not None and (status in (401, 403) or not path.endswith(_QUIET)):
                client = scope.get("client")
                self._log.add(
                    Line(
                        given.decode(),
                        client[0] if client else "-",
                        None if identity is None else identity.name,
                        scope["method"],
                        scope.get("raw_path") or path.encode(),
                        scope["query_string"],
                        status,
                        time.perf_counter() - began,
                        headers.get(b"content-length"),
                        sent.size,
                    )
                )

    def _refusal(self, path: str, error: RequestError) -> Answer:
        """The answer to a caller without a good key; a probe is told what it asks, and nothing else."""
        if self._access is not None and self._access.open_health:
            for name, good in (("live", self._plane.live), ("ready", self._plane.ready)):
                if path == f"/v2/health/{name}":
                    return Answer(msgspec.json.encode({name: good}), 200 if good else 503)
            if path == "/health":
                return Answer(b"", 200 if self._plane.ready else 503, b"text/plain")
        challenge = [(b"www-authenticate", b'Bearer realm="servax"')] if error.status == 401 else []
        return Answer(error_body(error, path), error.status, headers=challenge)

    def _cors(self, headers: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
        if not self._origins:
            return ()
        origin = headers.get(b"origin", b"")
        if b"*" in self._origins:
            return ((b"access-control-allow-origin", b"*"), _EXPOSED)
        if origin not in self._origins:
            return ((b"vary", b"origin"),)
        return ((b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"origin"))

    def _preflight(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Answer | None:
        """The answer to a browser that asks before it sends; it has no key yet."""
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        allowed = b"*" in self._origins or headers.get(b"origin") in self._origins
        return Answer(b"", 204, headers=_PREFLIGHT) if allowed else Answer(b"", 403, b"text/plain")


class _Sent:
    """What goes back to the client: the id is put in, in an error's body too; status and size are noted.

    The start of an answer is held until its body is there: one that comes whole is written whole, where the server
    offers that.
    """

    __slots__ = ("_cors", "_held", "_id", "_send", "_whole", "size", "status")

    def __init__(self, send: Send, given: bytes, cors: tuple[tuple[bytes, bytes], ...], whole: Whole | None) -> None:
        self._send = send
        self._id = given
        self._cors = cors
        self._whole = whole
        self._held: Any = None
        self.status = 0
        self.size = 0

    def send(self, message: Any) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._id), *self._cors]
            self._held = message
            return _NOTHING
        body: bytes = message.get("body", b"")
        start, self._held = self._held, None
        if start is not None:
            if self.status >= 400:
                message["body"] = body = self._with_id(start, body)
            self.size += len(body)
            more = message.get("more_body", False)
            if not more and self._whole is not None and self._whole(self.status, start["headers"], body):
                return _NOTHING
            return self._both(start, message)
        self.size += len(body)
        return self._send(message)

    def _with_id(self, start: Any, body: bytes) -> bytes:
        """An error's body, which says the id where it is a JSON object; `start` is corrected to its length."""
        headers = dict(start["headers"])
        whole = headers.get(b"content-length") == b"%d" % len(body)
        if whole and body.endswith(b"}") and len(body) > 2 and b"content-encoding" not in headers:
            body = b'%b,"request_id":"%b"}' % (body[:-1], self._id)
            headers[b"content-length"] = b"%d" % len(body)
            start["headers"] = list(headers.items())
        return body

    async def _both(self, start: Any, message: Any) -> None:
        await self._send(start)
        await self._send(message)


class _Nothing:
    """What there is to wait for after something that is done already."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_NOTHING = _Nothing()
