"""Calls: how long one may take, and a function of ours as a method that answers or aborts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from servax.core.errors import InvalidInput
from servax.protocols.grpc.status import abort

Method = Callable[[Any, Any], Awaitable[Any]]
"""From a request message and the call's context to the answer: a message, or its bytes."""


def time_limit(context: Any) -> float | None:
    """The deadline of a call on `time.monotonic`'s clock; None where the client set none."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def answering(method: Method, request: Any, answer: Any = None) -> grpc.RpcMethodHandler[Any, Any]:
    """A unary method: what it raises becomes the call's status.

    Args:
      method: answers one request.
      request: class of the request message.
      answer: class of the answer; None where `method` returns bytes.
    """

    async def call(data: bytes, context: Any) -> Any:
        try:
            return await method(parsed(request, data), context)
        except asyncio.CancelledError:
            raise  # the client is gone, or the server stops
        except Exception as error:
            await abort(context, error)

    return grpc.unary_unary_rpc_method_handler(
        call, response_serializer=None if answer is None else answer.SerializeToString
    )


def parsed(message: Any, data: bytes) -> Any:
    """The message of this class that the bytes hold.

    Raises:
      InvalidInput: they hold none. As a deserializer, gRPC would make an unknown error of it.
    """
    try:
        return message.FromString(data)
    except DecodeError:
        raise InvalidInput(
            "the message cannot be read", seen=f"{len(data)} bytes", expected=message.DESCRIPTOR.full_name
        ) from None


def absent(reason: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A method that others have and this server does not."""

    async def call(message: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)

    return grpc.unary_unary_rpc_method_handler(call)
