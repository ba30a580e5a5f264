"""What stands before every gRPC call: its key, and a line of the access log when it has ended."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import grpc

from servax.server.access_log import Access as Line
from servax.server.access_log import AccessLog
from servax.server.auth import Access

_GIVEN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")

_QUIET = ("/Check", "/Watch", "/ServerLive", "/ServerReady", "/ModelReady")
"""Ends of the methods of probes, which have no line unless they are refused."""

_CLIENTS = 4096
"""Connections whose address is remembered."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcGate:
    """Authorizes calls and writes them down.

    Args:
      access: who may call; None: everybody.
      log: gets a line for each call; None: nothing does.
      responses: calls by the name of their code, counted up here.
    """

    def __init__(self, *, access: Access | None, log: AccessLog | None, responses: dict[str, int]) -> None:
        self._access = access
        self._log = log
        self._responses = responses
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._clients: dict[str, str] = {}
        self._paths: dict[str, bytes] = {}

    def authorize(self, method: str, metadata: Mapping[str, str]) -> None:
        """Raises Unauthorized or Forbidden for a call that may not be made."""
        if self._access is not None:
            self._access.grpc(method, metadata)

    def wrap(self, method: str, handler: Any) -> Any:
        """A handler that does the same, and is counted and written down."""
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._watched(method, handler.unary_unary))
        for kind in ("unary_stream", "stream_unary", "stream_stream"):
            if (inner := getattr(handler, kind)) is not None:
                watched = self._watched if kind == "stream_unary" else self._watched_stream
                return handler._replace(**{kind: watched(method, inner)})
        return handler

    def _watched(self, method: str, inner: Any) -> Any:
        self._paths[method] = method.encode()

        async def call(request: Any, context: Any) -> Any:
            began, sent, gone = time.perf_counter(), 0, False
            given = _given_id(context)
            try:
                answer = await inner(request, context)
                sent = len(answer) if isinstance(answer, bytes) else 0
                return answer
            except asyncio.CancelledError:
                gone = True
                raise
            finally:
                self._ended(method, context, given, began, sent, gone=gone)

        return call

    def _watched_stream(self, method: str, inner: Any) -> Any:
        self._paths[method] = method.encode()

        async def call(request: Any, context: Any) -> Any:
            began, gone = time.perf_counter(), False
            given = _given_id(context)
            try:
                answers = inner(request, context)
                if hasattr(answers, "__aiter__"):
                    async for answer in answers:
                        yield answer
                else:  # a refusal: no stream, but a call that aborts
                    await answers
            except (asyncio.CancelledError, GeneratorExit):
                gone = True
                raise
            finally:
                self._ended(method, context, given, began, 0, gone=gone)

        return call

    def _client(self, peer: str) -> str:
        """The address of a client: `ipv4:127.0.0.1:50000` is a connection, which makes many calls."""
        client = self._clients.get(peer)
        if client is None:
            if len(self._clients) >= _CLIENTS:
                self._clients.clear()
            client = self._clients[peer] = peer.partition(":")[2].rpartition(":")[0] or "-"
        return client

    def _ended(self, method: str, context: Any, given: str | None, began: float, sent: int, *, gone: bool) -> None:
        told = context.code()  # a number until something has set it
        code = told if isinstance(told, grpc.StatusCode) else _CODES.get(told or 0, grpc.StatusCode.UNKNOWN)
        name = "CANCELLED" if gone and code is grpc.StatusCode.OK else code.name
        self._responses[name] = self._responses.get(name, 0) + 1
        refused = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        if self._log is None or (method.endswith(_QUIET) and not refused):
            return
        identity = None
        if self._access is not None:
            metadata = context.invocation_metadata() or ()
            identity = self._access.known({key: value for key, value in metadata if isinstance(value, str)})
        self._log.add(
            Line(
                given or f"{self._prefix}{next(self._numbers):08x}",
                self._client(context.peer()),
                None if identity is None else identity.name,
                "gRPC",
                self._paths[method],
                b"",
                name,
                time.perf_counter() - began,
                None,
                sent,
            )
        )


def _given_id(context: Any) -> str | None:
    """The id that a call brings along, which then goes back with its status; None for none, or one of another form."""
    given = None
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id":
            given = value
    if not isinstance(given, str) or not _GIVEN_ID.fullmatch(given):
        return None
    context.set_trailing_metadata((("x-request-id", given),))
    return given
