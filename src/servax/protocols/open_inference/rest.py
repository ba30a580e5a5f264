"""The Open Inference Protocol over HTTP and JSON: raw ASGI for inference, Starlette for everything else."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from servax.core.errors import InvalidInput, NotFound, ServaxError
from servax.core.tensors import Signature
from servax.protocols.bodies import Limits
from servax.protocols.calls import Receive
from servax.protocols.dataplane import DataPlane
from servax.protocols.dataplane import status_of as model_status
from servax.protocols.http import Answer, Endpoint, Incoming, Scope, Send, respond, status_of
from servax.protocols.open_inference import messages
from servax.protocols.open_inference.codec import (
    datatype_of,
    datatype_of_array,
    decode,
    encode,
    travels,
)
from servax.protocols.wording import short
from servax.runtime.request import InferRequest, InferResult

DEFAULT_MAX_BODY = Limits().max_body
"""Largest request body, in bytes."""

_INFER = re.compile(r"^/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer$")
_ALLOW = ((b"allow", b"POST"),)


class OpenInference:
    """An ASGI application for the paths below `/v2`: `/models/net/infer`, `/health/ready`, and so on.

    Args:
      plane: where the models are.
      version: of the server, for its metadata.
      limits: of requests.
    """

    def __init__(self, plane: DataPlane, *, version: str, limits: Limits) -> None:
        self._plane = plane
        self._version = version
        self._endpoint = Endpoint(plane, limits, _error_body)
        model = "/models/{model}"
        self._rest = Starlette(
            routes=[
                Route("/", self._server),
                Route("/health/live", self._live),
                Route("/health/ready", self._ready),
                Route("/repository/index", self._index, methods=["POST"]),
                *(Route(path, self._model) for path in (model, f"{model}/versions/{{version}}")),
                *(Route(f"{path}/ready", self._model_ready) for path in (model, f"{model}/versions/{{version}}")),
            ],
            exception_handlers=ERROR_HANDLERS,
        )
        self._rest.router.redirect_slashes = False

    async def handle(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose path, below `/v2`, is `path`."""
        match = _INFER.match(path)
        if match is None:
            full: str = scope["path"]
            root = full[: len(full) - len(path)] if path and full.endswith(path) else full
            await self._rest({**scope, "path": f"{root}{path or '/'}", "root_path": root}, receive, send)
            return
        if scope["method"] != "POST":
            await respond(send, Answer(msgspec.json.encode({"error": "inference takes POST"}), 405, headers=_ALLOW))
            return
        await self._endpoint(scope, receive, send, partial(self._infer, match["model"], match["version"]))

    async def _infer(self, model: str, version: str | None, incoming: Incoming) -> Answer:
        if b"inference-header-content-length" in incoming.headers:
            raise InvalidInput(
                "the body holds binary tensors",
                where="header Inference-Header-Content-Length",
                expected="JSON; GET /v2 lists the extensions of this server",
            )
        body = messages.read_body(incoming.body)
        function = (body.parameters or {}).get("function")
        if function is not None and not isinstance(function, str):
            raise InvalidInput(
                "the function is not a name",
                where="parameters.function",
                seen=f"a {type(function).__name__}",
                expected="a string",
            )
        if function is not None and function not in self._plane.get(model, version).signatures:
            function = short(function)
        name, signature = self._plane.signature(model, version, function)
        outputs = chosen_outputs(body, signature)
        tensors = _tensors(body, {spec.name for spec in signature.inputs})
        request = InferRequest(name, tensors, body.id, incoming.deadline, incoming.priority, owned=True)
        result = await self._plane.infer(model, version, request)
        message: messages.Message = {
            "model_name": model,
            "model_version": version or self._plane.get(model).version,
            "parameters": {"function": name, "bucket": result.bucket},
            "outputs": [_output(output, result) for output in outputs],
        }
        if body.id is not None:
            message["id"] = body.id
        timing = ", ".join(f"{step};dur={seconds * 1e3:.3f}" for step, seconds in result.times.items())
        return Answer(msgspec.json.encode(message), headers=[(b"server-timing", timing.encode())])

    async def _server(self, request: Request) -> Response:
        return _json(messages.server_metadata(self._version))

    async def _live(self, request: Request) -> Response:
        return _json({"live": self._plane.live}, 200 if self._plane.live else 503)

    async def _ready(self, request: Request) -> Response:
        message = messages.server_ready(self._plane)
        return _json(message, 200 if message["ready"] else 503)

    async def _index(self, request: Request) -> Response:
        return _json(messages.repository_index(self._plane))

    async def _model(self, request: Request) -> Response:
        return _json(messages.model_metadata(self._plane.metadata(*_named(request))))

    async def _model_ready(self, request: Request) -> Response:
        message = messages.model_ready(model_status(self._plane.get(*_named(request))))
        return _json(message, 200 if message["ready"] else 503)


def _named(request: Request) -> tuple[str, str | None]:
    return request.path_params["model"], request.path_params.get("version")


def _tensors(body: messages.InferBody, known: Container[str]) -> dict[str, Any]:
    """Arrays by name; names that the function does not have are cut, as errors repeat them."""
    tensors: dict[str, Any] = {}
    for tensor in body.inputs:
        name = tensor.name if tensor.name in known else short(tensor.name)
        if name in tensors:
            raise InvalidInput(
                f"tensor {name!r} was sent twice", where=name, seen="two tensors of this name", expected="one"
            )
        if not memoryview(tensor.data):
            raise InvalidInput(
                f"tensor {name!r} has no data", where=name, seen="no `data`", expected="`data`, a list of values"
            )
        tensors[name] = decode(name, tensor.datatype, tensor.shape, memoryview(tensor.data))
    return tensors


def chosen_outputs(body: messages.InferBody, signature: Signature) -> list[str]:
    """Names of the outputs to send, checked before anything runs."""
    specs = {spec.name: spec for spec in signature.outputs}
    names = list(specs) if body.outputs is None else [output.name for output in body.outputs]
    if unknown := [name for name in names if name not in specs]:
        raise InvalidInput(
            "there are no such outputs", where="outputs", seen=", ".join(map(short, unknown)), expected=", ".join(specs)
        )
    if stuck := [name for name in names if not travels(datatype_of(specs[name].dtype))]:
        others = [name for name, spec in specs.items() if travels(datatype_of(spec.dtype))]
        choice = ", ".join(f'{{"name": "{name}"}}' for name in others)
        raise InvalidInput(
            "outputs have a datatype that the Open Inference Protocol does not carry in JSON",
            where=", ".join(stuck),
            seen=", ".join(datatype_of(specs[name].dtype) for name in stuck),
            expected=f"outputs among {', '.join(others)}" if others else "outputs that are cast inside the function",
            remedy=f'ask for the others: "outputs": [{choice}]; with servax.load(URL): infer(request, outputs={others})'
            if others
            else "cast them inside the function (`x.astype(jnp.float32)`; of complex numbers `x.real` and `x.imag`)",
        )
    return names


def _output(name: str, result: InferResult) -> messages.Message:
    array = result.tensors[name]
    return {
        "name": name,
        "datatype": datatype_of_array(array),
        "shape": list(array.shape),
        "data": encode(name, array),
    }


def _error_body(error: ServaxError) -> bytes:
    return msgspec.json.encode(messages.write_error(error))


def _json(message: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(message), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServaxError)
    return _json(messages.write_error(error), status_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _on_error(request, NotFound(f"there is no {request.url.path}"))
    return Response(
        msgspec.json.encode({"error": error.detail}),
        error.status_code,
        media_type="application/json",
        headers=error.headers,
    )


ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ServaxError: _on_error,
    HTTPException: _on_http_error,
}
"""For a Starlette application whose errors are to look like those of the protocol."""
