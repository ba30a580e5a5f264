"""`grpc.health.v1.Health`: whether the server answers, or one service or model on it."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from servax.core.errors import NotFound, ServiceError
from servax.protocols.dataplane import DataPlane
from servax.runtime.servable import State

SERVICE = "grpc.health.v1.Health"

_GLANCE = 0.1
"""Seconds between two looks for whoever watches."""

_Response: Any = health_pb2.HealthCheckResponse
_Request: Any = health_pb2.HealthCheckRequest


class Health:
    """Health of a data plane.

    The empty name and those of services stand for the whole server, every other name for a model.

    Args:
      plane: the models.
      services: names of the server's services.
    """

    def __init__(self, plane: DataPlane, services: Container[str]) -> None:
        self._plane = plane
        self._services = services
        self._closing = False

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods of the service."""
        codec = {
            "request_deserializer": _Request.FromString,
            "response_serializer": _Response.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **codec),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **codec),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """From now on nothing is healthy; who watches is told, and its call ends."""
        self._closing = True

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is neither a service nor a model {request.service[:100]!r}"
            )
        return _Response(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        told = None
        while True:
            closing, status = self._closing, self._status(request.service)
            if status != told:
                await context.write(_Response(status=status))
                told = status
            if closing:
                return
            await asyncio.sleep(_GLANCE)

    def _status(self, name: str) -> int:
        if not name or name in self._services:
            ready = self._plane.ready
        else:
            try:
                ready = self._plane.get(name).state is State.READY
            except NotFound:
                return _Response.SERVICE_UNKNOWN
            except ServiceError:
                ready = False
        return _Response.SERVING if ready and not self._closing else _Response.NOT_SERVING
