"""Everything of a server that listens, over one data plane and on one event loop: HTTP, gRPC, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from servax.core.errors import NotFound
from servax.core.events import Notice, emit
from servax.protocols.bodies import Limits
from servax.protocols.calls import Receive
from servax.protocols.dataplane import DataPlane
from servax.protocols.http import Answer, Scope, Send, respond
from servax.server.access_log import AccessLog
from servax.server.app import App, error_body
from servax.server.auth import Access, Keys, KeySources
from servax.server.connections import ConnectionLimits
from servax.server.gate import Gate
from servax.server.http import Server
from servax.server.metrics import Metrics
from servax.server.settings import Settings
from servax.server.sockets import listen, url_of
from servax.server.tls import Tls, TlsFiles

if TYPE_CHECKING:
    from servax.server.grpc import GrpcServer

_LOOK = 1.0
"""Seconds between two looks at whether keys or certificates have changed."""


class Front:
    """What listens; ports of HTTP are taken when it is made, those of gRPC by `open`.

    Args:
      plane: the models.
      settings: of the server.
      log: gets a line for each request; None: nothing does.

    Attributes:
      urls: where each is reached from this machine, by `http`, `grpc`, `metrics`, `tfserving_http`, `tfserving_grpc`.

    Raises:
      UsageError: there is no such port.
      StartupError: a port is taken; keys or certificates cannot be read.
    """

    def __init__(self, plane: DataPlane, settings: Settings, log: AccessLog | None = None) -> None:
        self._plane = plane
        self._settings = settings
        self._log = log
        self._tls = _tls(settings)
        self._keys = _keys(settings)
        self._access = None if self._keys is None else Access(self._keys, open_health=settings.open_health)
        self._grpc: list[GrpcServer] = []
        self._ending: list[asyncio.Task[None]] = []
        self.urls: dict[str, str] = {}
        self._sockets: list[socket.socket] = []
        try:
            self._listen("http", settings.http)
            metrics = self._listen("metrics", settings.metrics)
            self._listen("tfserving_http", settings.tfserving_http)
        except BaseException:
            for listening in self._sockets:
                listening.close()
            raise
        http_responses: dict[int, int] = {}
        self._grpc_responses: dict[str, int] = {}
        page = Metrics(
            plane, triton=settings.triton_metrics, responses=http_responses, grpc_responses=self._grpc_responses
        )
        app = App(
            plane,
            limits=Limits(settings.max_body, settings.body_timeout),
            metrics=page if metrics is None else None,
            timings=settings.timings,
        )
        gate = Gate(
            app if metrics is None else _by_port(metrics, _scrapes(page), app),
            plane,
            access=self._access,
            log=log,
            origins=settings.cors_origin,
            responses=http_responses,
        )
        limits = ConnectionLimits(settings.max_connections, settings.idle_timeout)
        self._http = Server(gate, tls=self._tls, limits=limits)
        _warn(settings, guarded=self._keys is not None and self._keys.required, tls=self._tls is not None)

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Makes the event loop that this runs best on: uvloop's where it is installed."""
        return self._http.config.get_loop_factory()

    async def open(self) -> None:
        """Takes the ports of gRPC.

        Raises:
          StartupError: one is taken.
        """
        await self._open_grpc("grpc", None if self._settings.grpc == -1 else self._settings.grpc)
        await self._open_grpc("tfserving_grpc", self._settings.tfserving_grpc)

    async def serve(self, started: Callable[[], None] | None = None) -> None:
        """Answers until `stop`; calls `started` once it does."""
        if started is not None:
            self._http.on_start = started
        looking = asyncio.create_task(self._look())
        try:
            await self._http.serve(self._sockets)
        finally:
            looking.cancel()
            await self.close()

    def stop(self, grace: float) -> None:
        """Stops listening and gives connections `grace` seconds to send what they owe; on the loop's thread."""
        self._ending += [asyncio.create_task(server.stop(grace)) for server in self._grpc]
        self._grpc = []
        self._http.stop(grace)

    async def close(self) -> None:
        """Ends what `stop` has not."""
        self._ending += [asyncio.create_task(server.stop(0)) for server in self._grpc]
        self._grpc = []
        await asyncio.gather(*self._ending)
        for listening in self._sockets:
            listening.close()
        if self._log is not None:
            self._log.flush()

    def reload(self) -> None:
        """Reads keys and certificates anew."""
        for each in (self._keys, self._tls):
            if each is not None:
                each.refresh(force=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            for each in (self._keys, self._tls):
                if each is not None:
                    each.refresh()

    def _listen(self, name: str, port: int | None) -> int | None:
        if port is None:
            return None
        listening = listen(self._settings.host, port)
        self._sockets.append(listening)
        self.urls[name] = url_of(listening, secure=self._tls is not None)
        return listening.getsockname()[1]

    async def _open_grpc(self, name: str, port: int | None) -> None:
        if port is None:
            return
        from servax.server.grpc import GrpcServer
        from servax.server.grpc_gate import GrpcGate

        gate = GrpcGate(access=self._access, log=self._log, responses=self._grpc_responses)
        server = GrpcServer(
            self._plane,
            host=self._settings.host,
            port=port,
            credentials=None if self._tls is None else self._tls.grpc_credentials(),
            authorize=None if self._access is None else gate.authorize,
            max_body=self._settings.max_body,
            wrap=gate.wrap,
        )
        taken = await server.start()
        self._grpc.append(server)
        host = self._settings.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        self.urls[name] = f"[{host}]:{taken}" if ":" in host else f"{host}:{taken}"


def _tls(settings: Settings) -> Tls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca))


def _keys(settings: Settings) -> Keys | None:
    sources = KeySources(
        settings.api_key_file,
        settings.admin_key_file,
        None if settings.api_key is None else settings.api_key.get_secret_value(),
        None if settings.admin_key is None else settings.admin_key.get_secret_value(),
    )
    return None if sources == KeySources() else Keys(sources)


def _warn(settings: Settings, *, guarded: bool, tls: bool) -> None:
    """Says aloud what whoever can reach a port may do."""
    with contextlib.suppress(ValueError):
        if settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback:
            return
    fields = {"host": settings.host}
    if not guarded and settings.tls_client_ca is None:
        emit(Notice("anybody who reaches this port may use it: there is no --api-key-file", "warning", fields))
    if not tls:
        what = "keys and data travel" if guarded else "data travels"
        emit(Notice(f"{what} in the clear: there is no --tls-cert", "warning", fields))


def _scrapes(metrics: Metrics) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An application of nothing but the metrics."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD"):
            await respond(send, Answer(metrics.text(), content_type=metrics.content_type.encode()))
        else:
            missing = NotFound("there is no such page", seen=scope["path"][:100], expected="/metrics")
            await respond(send, Answer(error_body(missing, scope["path"]), 404))

    return app


def _by_port(
    port: int, there: Callable[[Scope, Receive, Send], Awaitable[None]], elsewhere: App
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """One application at a port, another at every other."""

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["server"][1] == port:
            return there(scope, receive, send)
        return elsewhere(scope, receive, send)

    return app
