"""The application that answers HTTP, for one servable or several; it can be mounted in a service of the user's own.

Alone it serves `/v2/...`, TensorFlow Serving's and the OpenAI API's `/v1/...`, `/metrics`, `/openapi.json` and `/`.
Mounted at a path that ends in `/v2` or `/v1`, what stands below it is found right there: `app.mount("/v2",
servable.app)` gives `/v2/models/NAME/infer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import servax
from servax.core.errors import ServaxError
from servax.core.tensors import Signature
from servax.protocols.bodies import Limits
from servax.protocols.dataplane import DataPlane, ModelStatus
from servax.protocols.open_inference import messages
from servax.protocols.open_inference.rest import (
    DEFAULT_MAX_BODY,
    ERROR_HANDLERS,
    OpenInference,
    Receive,
    Scope,
    Send,
)
from servax.protocols.openai import errors as openai_errors
from servax.protocols.openai.rest import OpenAI
from servax.protocols.tfserving.rest import TFServing
from servax.runtime.servable import Servable
from servax.server.metrics import Metrics
from servax.server.openapi import describe

DEFAULT_LIMITS = Limits()


class App:
    """An ASGI application over a data plane.

    Args:
      plane: the models.
      limits: of requests.
      metrics: what `/metrics` shows; None: there is no such page here.
      timings: whether answers say where their time went.

    Attributes:
      plane: the models it serves.
    """

    def __init__(
        self, plane: DataPlane, *, limits: Limits = DEFAULT_LIMITS, metrics: Metrics | None, timings: bool = True
    ) -> None:
        self.plane = plane
        self._metrics = metrics
        self._v2 = OpenInference(plane, version=servax.__version__, limits=limits, timings=timings)
        self._openai = OpenAI(plane, limits=limits)
        self._v1 = TFServing(plane, limits=limits, timings=timings, beside=self._openai.described)
        routes = [Route("/", self._index), Route("/openapi.json", self._openapi)]
        if metrics is not None:
            routes.append(Route("/metrics", self._scrape))
        self._pages = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, root = below(scope)
            if path == "/v2" or path.startswith("/v2/"):
                await self._v2.handle(path[3:], scope, receive, send)
                return
            if path.startswith("/v1/"):
                await self._below_v1(path[3:], scope, receive, send)
                return
            if root.endswith("/v2"):
                await self._v2.handle(path, scope, receive, send)
                return
            if root.endswith("/v1"):
                await self._below_v1(path, scope, receive, send)
                return
            if path in OPENAI_PAGES:
                await self._openai.handle(path, scope, receive, send)
                return
        await self._pages(scope, receive, send)

    async def _below_v1(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Two APIs share `/v1`: what neither claims is answered by TensorFlow Serving's."""
        api = self._openai if self._openai.owns(path) else self._v1
        await api.handle(path, scope, receive, send)

    async def _index(self, request: Request) -> Response:
        models = [
            {
                "name": status.name,
                "version": status.version,
                "state": status.state.value,
                "functions": {
                    name: {
                        "inputs": {spec.name: spec.text() for spec in signature.inputs},
                        "outputs": {spec.name: spec.text() for spec in signature.outputs},
                    }
                    for name, signature in self._signatures(status).items()
                },
                "metadata": f"{_base(request)}/v2/models/{status.name}",
                "infer": f"{_base(request)}/v2/models/{status.name}/infer",
            }
            for status in self.plane.list()
        ]
        links = {
            name: f"{_base(request)}{path}"
            for name, path in _LINKS.items()
            if name != "metrics" or self._metrics is not None
        }
        return _json({"name": "servax", "version": servax.__version__, "models": models, **links})

    def _signatures(self, status: ModelStatus) -> Mapping[str, Signature]:
        try:
            return self.plane.get(status.name, status.version).signatures
        except ServaxError:  # not loaded
            return {}

    async def _scrape(self, request: Request) -> Response:
        assert self._metrics is not None, "the route is not there otherwise"
        return Response(self._metrics.text(), media_type=self._metrics.content_type)

    async def _openapi(self, request: Request) -> Response:
        return _json(describe(self.plane, servax.__version__, metrics=self._metrics is not None))


def error_body(error: ServaxError, path: str) -> bytes:
    """An error as the protocol of a path tells it, for what answers in its place."""
    if path in OPENAI_PAGES or path in _OPENAI:
        return openai_errors.write_error(error)
    return msgspec.json.encode(messages.write_error(error))


OPENAI_PAGES = frozenset({"/tokenize", "/detokenize", "/health"})
"""Paths of the OpenAI API's handlers that do not stand below `/v1`."""

_OPENAI = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models"})

_LINKS = {"ready": "/v2/health/ready", "metrics": "/metrics", "openapi": "/openapi.json"}


def create_app(source: DataPlane | Servable | Iterable[Servable], *, max_body: int = DEFAULT_MAX_BODY) -> App:
    """The application for a servable, for several, or for a data plane that others fill."""
    plane = plane_of(source)
    return App(plane, limits=Limits(max_body=max_body), metrics=Metrics(plane))


def plane_of(source: DataPlane | Servable | Iterable[Servable]) -> DataPlane:
    """The data plane that these make."""
    if isinstance(source, DataPlane):
        return source
    return DataPlane([source] if not isinstance(source, Iterable) else source)


def below(scope: Scope) -> tuple[str, str]:
    """The part of a request's path below where this application is mounted, and where that is."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :], root
    return path, root


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def _json(message: Any) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
