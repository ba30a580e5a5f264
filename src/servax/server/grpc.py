"""gRPC in a running event loop: services, health, reflection, TLS, authorization, and a stop that waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

import servax
from servax.core.errors import RequestError, StartupError
from servax.protocols.dataplane import DataPlane
from servax.protocols.grpc.calls import absent
from servax.protocols.grpc.service import Service
from servax.protocols.grpc.status import code_of, message_of
from servax.protocols.open_inference.grpc import InferenceService
from servax.protocols.open_inference.rest import DEFAULT_MAX_BODY
from servax.protocols.tfserving.grpc import ModelService, PredictionService
from servax.server.health import SERVICE as HEALTH
from servax.server.health import Health
from servax.server.sockets import listen

Authorize = Callable[[str, Mapping[str, str]], None]
"""Raises Unauthorized or Forbidden for a call: its full method name (`/inference.GRPCInferenceService/ModelInfer`) and
its metadata."""

Wrap = Callable[[str, Any], Any]
"""A method's handler by its full name, and what stands in its place: it may watch each call."""

_MARGIN = 64 * 1024
"""Bytes of a message beside its tensors: names, shapes, parameters."""

_SILENCE = 60_000
"""Milliseconds after which a silent connection is asked whether it lives: the calls of a dead one leave the queue."""

_LEAST_PING = 10_000
"""Milliseconds between the pings of an idle client; one that sends more is cut off."""


class GrpcServer:
    """A gRPC server over a data plane, on the event loop that `start` runs in.

    Args:
      plane: the models.
      host: where to listen; a name, or an address of IPv4 or IPv6.
      port: 0 picks a free one.
      credentials: for TLS; None: plain text.
      authorize: called for every call before its message is read; None: all may call.
      max_body: largest request message, in bytes.
      wrap: called once for each method; None: methods as they are.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        authorize: Authorize | None = None,
        max_body: int = DEFAULT_MAX_BODY,
        wrap: Wrap | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._credentials = credentials
        self._max_body = max_body
        self._inference = InferenceService(plane, version=servax.__version__)
        services = [self._inference.service(), PredictionService(plane).service(), ModelService(plane).service()]
        names = [*(service.name for service in services), HEALTH, reflection.SERVICE_NAME]
        self._health = Health(plane, frozenset(names))
        self._methods = _Methods(
            [*(service.handler for service in services), self._health.handler(), _reflection(names, services)],
            authorize,
            wrap,
        )
        self._server: Any = None

    async def start(self) -> int:
        """Listens and returns the port.

        Raises:
          StartupError: the port is taken, or the address is not one of this machine.
          UsageError: there is no such port.
        """
        if self._port:
            listen(self._host, self._port).close()  # gRPC says that it failed, and not why
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self._max_body + _MARGIN),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", _SILENCE),
            ("grpc.keepalive_timeout_ms", _SILENCE // 3),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING),
        )
        server = grpc.aio.server(handlers=(self._methods,), options=options)
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise StartupError("the address cannot be listened at", where=address, seen=str(error)) from error
        await server.start()
        self._server = server
        return port

    async def stop(self, grace: float) -> None:
        """Takes no new calls, gives those in progress `grace` seconds, and ends the others."""
        self._health.close()
        self._inference.close()
        if self._server is not None:
            await self._server.stop(grace)


class _Methods(grpc.GenericRpcHandler):
    """Every method of the server; a call is let through to it, or refused."""

    def __init__(
        self, handlers: Sequence[grpc.GenericRpcHandler], authorize: Authorize | None, wrap: Wrap | None
    ) -> None:
        self._handlers = handlers
        self._authorize = authorize
        self._wrap = wrap
        self._found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        found = self._found.get(method) or self._find(handler_call_details)
        if self._authorize is None:
            return found
        try:
            self._authorize(method, _metadata(handler_call_details))
        except RequestError as error:
            refused = _refused(found, error)
            return refused if self._wrap is None else self._wrap(method, refused)
        return found

    def _find(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        for handler in self._handlers:
            found = handler.service(details)
            if found is not None:
                if self._wrap is not None:
                    found = self._wrap(details.method, found)
                self._found[details.method] = found
                return found
        return absent(f"there is no method {details.method[:200]}")


def _metadata(details: grpc.HandlerCallDetails) -> dict[str, str]:
    pairs: Any = details.invocation_metadata or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _refused(handler: Any, error: RequestError) -> grpc.RpcMethodHandler[Any, Any]:
    """A method of the same kind that ends with an error; no message is read."""

    async def call(requests: Any, context: Any) -> None:
        await context.abort(code_of(error), message_of(error))

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(call)
    return grpc.stream_unary_rpc_method_handler(call)


def _reflection(names: Sequence[str], services: Sequence[Service]) -> grpc.GenericRpcHandler:
    """The reflection service over our own files; those of the process' default pool are others'."""
    pool = descriptor_pool.DescriptorPool()
    for service in services:
        for file in service.messages.files:
            pool.Add(file)
    modules: Any = (health_pb2, reflection_pb2)
    for module in modules:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        pool.Add(file)
    servicer: Any = reflection.aio.ReflectionServicer(names, pool)
    request: Any = reflection_pb2.ServerReflectionRequest
    answer: Any = reflection_pb2.ServerReflectionResponse
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo, request.FromString, answer.SerializeToString
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})
