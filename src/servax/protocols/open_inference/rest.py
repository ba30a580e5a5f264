"""The Open Inference Protocol over HTTP, in raw ASGI: its routes, and what they answer beside inference."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from servax.core.errors import InvalidInput, NotFound, ServaxError
from servax.protocols.bodies import Limits
from servax.protocols.calls import Receive
from servax.protocols.dataplane import DataPlane, Repository
from servax.protocols.dataplane import status_of as model_status
from servax.protocols.http import Answer, Endpoint, Incoming, Scope, Send, status_of
from servax.protocols.open_inference import messages
from servax.protocols.open_inference.config import model_config
from servax.protocols.open_inference.inference import Inference
from servax.protocols.open_inference.stats import model_statistics
from servax.protocols.wording import short

DEFAULT_MAX_BODY = Limits().max_body
"""Largest request body, in bytes."""

_MODEL = r"/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_INFER = re.compile(rf"{_MODEL}/infer")
_PATHS = 1024
"""Paths of inference that are remembered."""
_ABSENT = (
    (re.compile(r"/(?:system|cuda)sharedmemory.*"), "shared memory extension; binary tensors in the body are fast"),
    (re.compile(r"(?:/models/.+)?/trace/setting"), "trace extension; GET /metrics tells where time goes"),
    (re.compile(r"/logging"), "logging extension; logging is set when the server starts"),
    (re.compile(r"/models/.+/generate(?:_stream)?"), "generate extension; POST .../infer takes tensors"),
)
"""Paths of Triton's that there are not here, and what to do instead."""

Named = Mapping[str, str | None]
Handler = Callable[[Named, Incoming], Awaitable[Answer]]


class OpenInference:
    """An ASGI application for the paths below `/v2`: `/models/net/infer`, `/health/ready`, and so on.

    Args:
      plane: where the models are.
      version: of the server, for its metadata.
      limits: of requests.
      timings: whether an answer says what each step took (`Server-Timing`).
    """

    def __init__(self, plane: DataPlane, *, version: str, limits: Limits, timings: bool) -> None:
        self._plane = plane
        self._version = version
        self._endpoint = Endpoint(plane, limits, _error_body)
        self._infer = Inference(plane, timings=timings)
        routes: dict[str, tuple[str, Handler]] = {
            "/?": ("GET", self._server),
            "/health/live": ("GET", self._live),
            "/health/ready": ("GET", self._ready),
            "/models/stats": ("GET", self._statistics),
            _MODEL: ("GET", self._model),
            f"{_MODEL}/ready": ("GET", self._model_ready),
            f"{_MODEL}/config": ("GET", self._config),
            f"{_MODEL}/stats": ("GET", self._statistics),
            "/repository/index": ("POST", self._index),
            r"/repository/models/(?P<model>[^/]+)/load": ("POST", self._load),
            r"/repository/models/(?P<model>[^/]+)/unload": ("POST", self._unload),
        }
        self._inferring: dict[str, tuple[str, str | None]] = {}
        """Paths of inference that were asked for, with the model and the version that they name."""
        self._routes = [(re.compile(path), method, handler) for path, (method, handler) in routes.items()]

    async def handle(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose path, below `/v2`, is `path`."""
        named = self._inferring.get(path)
        if named is None and (match := _INFER.fullmatch(path)) is not None:
            if len(self._inferring) >= _PATHS:
                self._inferring.clear()
            named = self._inferring[path] = match["model"], match["version"]
        if named is not None and scope["method"] == "POST":
            work = partial(self._infer, *named, scope["query_string"])
            await self._endpoint(scope, receive, send, work)
            return
        work = partial(self._answer, path, scope)
        # Probes and metadata are answered to the end; what changes the server refuses itself while it stops.
        await self._endpoint(scope, receive, send, work, while_closing=scope["method"] in ("GET", "HEAD"))

    async def _answer(self, path: str, scope: Scope, incoming: Incoming) -> Answer:
        method: str = scope["method"]
        if _INFER.fullmatch(path) is not None:
            return _wrong_method("POST")
        for pattern, takes, handler in self._routes:
            match = pattern.fullmatch(path)
            if match is not None:
                if method != takes and (method, takes) != ("HEAD", "GET"):
                    return _wrong_method(takes)
                return await handler(match.groupdict(), incoming)
        for pattern, reason in _ABSENT:
            if pattern.fullmatch(path) is not None:
                raise NotFound(f"servax has no {reason}")
        raise NotFound(f"there is no {short(scope['path'])}")

    async def _server(self, named: Named, incoming: Incoming) -> Answer:
        return _json(messages.server_metadata(self._version, repository=self._plane.repository is not None))

    async def _live(self, named: Named, incoming: Incoming) -> Answer:
        return _json({"live": self._plane.live}, 200 if self._plane.live else 503)

    async def _ready(self, named: Named, incoming: Incoming) -> Answer:
        message = messages.server_ready(self._plane)
        return _json(message, 200 if message["ready"] else 503)

    async def _model(self, named: Named, incoming: Incoming) -> Answer:
        return _json(messages.model_metadata(self._plane.metadata(*_model(named))))

    async def _model_ready(self, named: Named, incoming: Incoming) -> Answer:
        message = messages.model_ready(model_status(self._plane.get(*_model(named))))
        return _json(message, 200 if message["ready"] else 503)

    async def _config(self, named: Named, incoming: Incoming) -> Answer:
        return _json(model_config(self._plane, *_model(named)))

    async def _statistics(self, named: Named, incoming: Incoming) -> Answer:
        return _json(model_statistics(self._plane, named.get("model"), named.get("version")))

    async def _index(self, named: Named, incoming: Incoming) -> Answer:
        ready = messages.read_index(incoming.body).ready
        return _json(messages.repository_index(self._plane, ready=ready))

    async def _load(self, named: Named, incoming: Incoming) -> Answer:
        parameters = messages.read_load(incoming.body).parameters
        await self._repository().load(str(named["model"]), parameters)
        return _json({})

    async def _unload(self, named: Named, incoming: Incoming) -> Answer:
        messages.read_load(incoming.body)
        await self._repository().unload(str(named["model"]))
        return _json({})

    def _repository(self) -> Repository:
        if self._plane.repository is None:
            raise InvalidInput(
                "this server loads and unloads nothing", remedy="serve a store: servax serve STORE --control explicit"
            )
        return self._plane.repository


def _model(named: Named) -> tuple[str, str | None]:
    return str(named["model"]), named["version"]


def _json(message: Any, status: int = 200) -> Answer:
    return Answer(msgspec.json.encode(message), status)


def _wrong_method(takes: str) -> Answer:
    error = {"error": f"this path takes {takes}"}
    return Answer(msgspec.json.encode(error), 405, headers=[(b"allow", takes.encode())])


def _error_body(error: ServaxError) -> bytes:
    return msgspec.json.encode(messages.write_error(error))


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServaxError)
    return Response(_error_body(error), status_of(error), media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _on_error(request, NotFound(f"there is no {short(request.url.path)}"))
    body = msgspec.json.encode({"error": error.detail})
    return Response(body, error.status_code, media_type="application/json", headers=error.headers)


ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ServaxError: _on_error,
    HTTPException: _on_http_error,
}
"""For a Starlette application whose errors are to look like those of the protocol."""
