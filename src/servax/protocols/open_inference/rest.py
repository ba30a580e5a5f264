"""The Open Inference Protocol over HTTP and JSON: raw ASGI for inference, Starlette for everything else."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Container, MutableMapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from servax.core.errors import ExecutionError, InvalidInput, NotFound, NotReady, ServaxError, TooLarge
from servax.core.events import Notice, emit
from servax.core.tensors import Signature
from servax.protocols.dataplane import DataPlane
from servax.protocols.dataplane import status_of as model_status
from servax.protocols.open_inference import messages
from servax.protocols.open_inference.codec import (
    datatype_of,
    datatype_of_array,
    decode,
    encode,
    short,
    travels,
)
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import State

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

DEFAULT_MAX_BODY = 64 * 1024 * 1024
"""Largest request body, in bytes."""

DEFAULT_BODY_TIMEOUT = 30.0
"""Seconds in which a request's body must arrive."""

_GLANCE = 0.1
"""Seconds between two looks at whether a model drains while a body still arrives."""

_INFER = re.compile(r"^/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer$")
_JSON = (b"content-type", b"application/json")


class OpenInference:
    """An ASGI application for the paths below `/v2`: `/models/net/infer`, `/health/ready`, and so on.

    Args:
      plane: where the models are.
      version: of the server, for its metadata.
      max_body: largest request body, in bytes.
      body_timeout: seconds in which a request's body must arrive.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        version: str,
        max_body: int = DEFAULT_MAX_BODY,
        body_timeout: float = DEFAULT_BODY_TIMEOUT,
    ) -> None:
        self._plane = plane
        self._version = version
        self._max_body = max_body
        self._body_timeout = body_timeout
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
            await _respond(send, 405, {"error": "inference takes POST"}, [(b"allow", b"POST")])
            return
        try:
            headers, message = await self._infer(match["model"], match["version"], scope, receive)
        except _Disconnected:
            return
        except _Unfinished as unfinished:
            await _respond(send, unfinished.status, messages.write_error(unfinished.error), unfinished.headers)
        except ServaxError as error:
            retry = [(b"retry-after", b"1")] if messages.status_of(error) == 503 else []
            await _respond(send, messages.status_of(error), messages.write_error(error), retry)
        except Exception as error:  # a fault of ours: said in full to the operator, in short to the client
            emit(Notice(f"inference failed: {error!r}\n{traceback.format_exc()}", level="error"))
            await _respond(send, 500, messages.write_error(ExecutionError("the server failed; its log says why")))
        else:
            await _respond(send, 200, message, headers)

    async def _infer(
        self, model: str, version: str | None, scope: Scope, receive: Receive
    ) -> tuple[Headers, messages.Message]:
        headers = dict(scope["headers"])
        deadline = _deadline(headers)
        body = messages.read_body(await self._body(model, receive, headers))
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
        request = InferRequest(name, tensors, body.id, deadline, owned=True)
        result = await _unless_gone(self._plane.infer(model, version, request), receive)
        message: messages.Message = {
            "model_name": model,
            "model_version": version or self._plane.get(model).version,
            "parameters": {"function": name, "bucket": result.bucket},
            "outputs": [_output(output, result) for output in outputs],
        }
        if body.id is not None:
            message["id"] = body.id
        timing = ", ".join(f"{step};dur={seconds * 1e3:.3f}" for step, seconds in result.times.items())
        return [(b"server-timing", timing.encode())], message

    async def _body(self, model: str, receive: Receive, headers: dict[bytes, bytes]) -> bytes | bytearray:
        """The body, unless it takes too long, or the model drains before it is there."""
        reading = asyncio.ensure_future(_read(receive, headers, self._max_body))
        ends = time.monotonic() + self._body_timeout
        try:
            while not (await asyncio.wait((reading,), timeout=min(_GLANCE, self._body_timeout)))[0]:
                if self._drains(model):
                    raise _Unfinished.drained(model)
                if time.monotonic() >= ends:
                    raise _Unfinished.late(self._body_timeout)
            return reading.result()
        finally:
            reading.cancel()

    def _drains(self, model: str) -> bool:
        return model in self._plane and self._plane.get(model).state in (State.DRAINING, State.UNLOADED)

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


class _Disconnected(Exception):
    """The client went away."""


class _Unfinished(Exception):
    """A body that is not waited for any longer; what comes of it later is not read, so its connection closes."""

    def __init__(self, status: int, error: ServaxError, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.headers = ((b"connection", b"close"), *headers)

    @classmethod
    def late(cls, limit: float) -> _Unfinished:
        error = InvalidInput(
            "the request body did not arrive in time",
            seen="a body that is not complete",
            expected=f"the whole body within {limit:g} s",
            remedy="send it faster, or less at once",
        )
        return cls(408, error)

    @classmethod
    def drained(cls, model: str) -> _Unfinished:
        error = NotReady(
            f"{model} stops, and the request body is not complete", remedy="send the request to another server"
        )
        return cls(503, error, (b"retry-after", b"1"))


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


def _deadline(headers: dict[bytes, bytes]) -> float | None:
    text = headers.get(b"request-timeout-ms")
    if text is None:
        return None
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


async def _read(receive: Receive, headers: dict[bytes, bytes], limit: int) -> bytes | bytearray:
    """The whole body, read no further than the limit."""
    if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
        raise InvalidInput(
            "the body is compressed",
            where="header Content-Encoding",
            seen=short(encoding.decode("latin-1")),
            expected="none",
        )
    if b"inference-header-content-length" in headers:
        raise InvalidInput(
            "the body holds binary tensors",
            where="header Inference-Header-Content-Length",
            expected="JSON; GET /v2 lists the extensions of this server",
        )
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(short(announced.decode("ascii")), limit)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if not more and not body:
            return _limited(chunk, limit)
        body += chunk
        _limited(body, limit)
    return body


def _limited(body: bytes | bytearray, limit: int) -> bytes | bytearray:
    if len(body) > limit:
        raise _too_large(len(body), limit)
    return body


def _too_large(seen: int | str, limit: int) -> TooLarge:
    return TooLarge(
        "the request body is too large",
        seen=f"{seen} bytes",
        expected=f"at most {limit}",
        remedy="send fewer rows at once, or start the server with a larger --max-body",
    )


async def _unless_gone(answer: Awaitable[InferResult], receive: Receive) -> InferResult:
    """The answer, unless the client goes first: then the request leaves the queue."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise _Disconnected
    finally:
        for task in (work, gone):
            task.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _respond(send: Send, status: int, message: messages.Message, headers: Headers = ()) -> None:
    body = msgspec.json.encode(message)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


def _json(message: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(message), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServaxError)
    return _json(messages.write_error(error), messages.status_of(error))


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
