"""The Open Inference Protocol over gRPC, `inference.GRPCInferenceService`: what Triton's and KServe's clients speak."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf import json_format

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature
from servax.protocols.dataplane import DataPlane, Repository
from servax.protocols.grpc.calls import absent, answering, time_limit
from servax.protocols.grpc.messages import Messages
from servax.protocols.grpc.service import Service
from servax.protocols.open_inference import messages
from servax.protocols.open_inference.codec import datatype_of, require_known
from servax.protocols.open_inference.config import model_config
from servax.protocols.open_inference.contents import read_tensors, require_plain, write_response
from servax.protocols.open_inference.parameters import read_choices, value_of
from servax.protocols.open_inference.stats import model_statistics
from servax.protocols.open_inference.stream import Stream
from servax.protocols.wording import short
from servax.runtime.request import InferRequest
from servax.runtime.servable import State

SERVICE = "inference.GRPCInferenceService"

_ABSENT = {
    **dict.fromkeys(
        (f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
        "servax has no shared memory extension; send tensors in the message",
    ),
    "TraceSetting": "servax has no trace extension; GET /metrics tells where time goes",
    "LogSettings": "servax has no logging extension; logging is set when the server starts",
}
"""Methods of Triton that there are not here, and what to do instead."""

_FINAL = (("triton_final_response", True),)

Method = Callable[[Any, Any], Awaitable[Any]]
"""From the class of the answer and a request to the answer."""


def schema() -> Messages:
    """The messages of the protocol."""
    return Messages.load("servax.protocols.open_inference", "inference")


class InferenceService:
    """The methods of the service over a data plane.

    Args:
      plane: where the models are.
      version: of the server, for its metadata.
    """

    def __init__(self, plane: DataPlane, *, version: str) -> None:
        self._plane = plane
        self._version = version
        self._methods = schema().methods(SERVICE)
        self._response = self._methods["ModelInfer"][1]
        self._streams: set[Stream] = set()

    def service(self) -> Service:
        """As a gRPC server takes it."""
        handlers = {
            "ModelInfer": answering(self._infer_once, self._methods["ModelInfer"][0]),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._infer_stream),
            "ServerLive": self._method("ServerLive", self._server_live),
            "ServerReady": self._method("ServerReady", self._server_ready),
            "ModelReady": self._method("ModelReady", self._model_ready),
            "ServerMetadata": self._method("ServerMetadata", self._server_metadata),
            "ModelMetadata": self._method("ModelMetadata", self._model_metadata),
            "ModelConfig": self._method("ModelConfig", self._model_config),
            "ModelStatistics": self._method("ModelStatistics", self._model_statistics),
            "RepositoryIndex": self._method("RepositoryIndex", self._index),
            "RepositoryModelLoad": self._method("RepositoryModelLoad", self._load),
            "RepositoryModelUnload": self._method("RepositoryModelUnload", self._unload),
            **{name: absent(reason) for name, reason in _ABSENT.items()},
        }
        return Service(SERVICE, grpc.method_handlers_generic_handler(SERVICE, handlers), schema())

    def close(self) -> None:
        """Ends the streams once the requests on them are answered: they would hold up the server's end."""
        for stream in tuple(self._streams):
            stream.close()

    async def infer(self, request: Any, deadline: float | None, extra: tuple[tuple[str, bool], ...] = ()) -> bytes:
        """The serialized answer to a ModelInferRequest.

        Args:
          request: the message.
          deadline: of its call, on `time.monotonic`'s clock.
          extra: parameters of the answer, beside its function and bucket.
        """
        plane, model, version = self._plane, request.model_name, request.model_version or None
        choices = read_choices(request.parameters, deadline)
        function, signature = plane.signature(model, version, choices.function)
        names = _chosen(request, signature)
        tensors = read_tensors(request, signature)
        result = await plane.infer(
            model,
            version,
            InferRequest(function, tensors, request.id or None, choices.deadline, choices.priority, owned=True),
        )
        return write_response(
            self._response,
            (model, result.version),
            (("function", function), ("bucket", result.bucket), *extra),
            request.id,
            {name: result.tensors[name] for name in names},
        )

    async def _infer_once(self, request: Any, context: Any) -> bytes:
        return await self.infer(request, time_limit(context))

    async def _infer_stream(self, requests: Any, context: Any) -> None:
        infer = functools.partial(self.infer, extra=_FINAL)
        stream = Stream(infer, self._methods["ModelStreamInfer"], requests, context)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def _method(self, name: str, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        request, answer = self._methods[name]

        async def call(message: Any, context: Any) -> Any:
            return await method(answer, message)

        return answering(call, request, answer)

    async def _server_live(self, answer: Any, request: Any) -> Any:
        return answer(live=self._plane.live)

    async def _server_ready(self, answer: Any, request: Any) -> Any:
        return answer(ready=self._plane.ready)

    async def _model_ready(self, answer: Any, request: Any) -> Any:
        return answer(ready=self._plane.get(request.name, request.version or None).state is State.READY)

    async def _server_metadata(self, answer: Any, request: Any) -> Any:
        return answer(**messages.server_metadata(self._version, repository=self._plane.repository is not None))

    async def _model_metadata(self, answer: Any, request: Any) -> Any:
        message = messages.model_metadata(self._plane.metadata(request.name, request.version or None))
        del message["functions"]  # of our REST alone: the protocol's message has no place for it
        return answer(**message)

    async def _model_config(self, answer: Any, request: Any) -> Any:
        return json_format.ParseDict(
            {"config": model_config(self._plane, request.name, request.version or None)}, answer()
        )

    async def _model_statistics(self, answer: Any, request: Any) -> Any:
        return answer(**model_statistics(self._plane, request.name or None, request.version or None))

    async def _index(self, answer: Any, request: Any) -> Any:
        return answer(models=messages.repository_index(self._plane, ready=request.ready))

    async def _load(self, answer: Any, request: Any) -> Any:
        parameters = {name: value_of(parameter) for name, parameter in request.parameters.items()}
        await self._repository().load(request.model_name, parameters)
        return answer()

    async def _unload(self, answer: Any, request: Any) -> Any:
        await self._repository().unload(request.model_name)
        return answer()

    def _repository(self) -> Repository:
        if self._plane.repository is None:
            raise InvalidInput(
                "this server loads and unloads nothing", remedy="serve a store: servax serve STORE --control explicit"
            )
        return self._plane.repository


def _chosen(request: Any, signature: Signature) -> Sequence[str]:
    """Names of the outputs to send, checked before anything runs."""
    known = {spec.name: spec.dtype for spec in signature.outputs}
    names = list(known)
    if request.outputs:
        require_plain(request.outputs)
        names = list(dict.fromkeys(output.name for output in request.outputs))
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(
            "there are no such outputs", where="outputs", seen=", ".join(map(short, unknown)), expected=", ".join(known)
        )
    for name in names:
        require_known(name, datatype_of(known[name]))
    return names
