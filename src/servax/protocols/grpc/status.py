"""Errors of ours as gRPC statuses."""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

import grpc

from servax.core.errors import ExecutionError, RequestError, ServaxError, ServiceError
from servax.core.events import Notice, emit

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.OUT_OF_RANGE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC's own retry policy reads."""

_LONGEST = 2000
"""Bytes of a message: a request may have put names into it, on the wire each may take three, and 8 KiB is the limit."""


def code_of(error: ServaxError) -> grpc.StatusCode:
    """The gRPC status of an error, by its HTTP status; INTERNAL for one that is not about a request."""
    if isinstance(error, RequestError | ServiceError):
        return _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    return grpc.StatusCode.INTERNAL


def told(error: Exception) -> ServaxError:
    """The error that the client is told of; a fault of ours is said in full to the operator alone."""
    if isinstance(error, ServaxError):
        return error
    trace = "".join(traceback.format_exception(error))
    emit(Notice(f"a gRPC call failed: {error!r}\n{trace}", level="error"))
    return ExecutionError("the server failed; its log says why")


def message_of(error: ServaxError) -> str:
    """An error on one line, no longer than a status may be."""
    text = error.sentence()
    data = text.encode(errors="replace")
    return text if len(data) <= _LONGEST else data[: _LONGEST - 3].decode(errors="ignore") + "..."


async def abort(context: Any, error: Exception) -> NoReturn:
    """Ends a call with the status of an error, and says when to come again where the error knows."""
    shown = told(error)
    retry_after = getattr(shown, "retry_after", None)
    trailing = tuple(context.trailing_metadata() or ())  # such as the request's id
    if retry_after is not None:
        trailing += ((_PUSHBACK, str(max(1, round(retry_after * 1e3)))),)
    await context.abort(code_of(shown), message_of(shown), trailing)
    raise AssertionError("abort raises")
