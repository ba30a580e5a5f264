"""`servax.serve` and what stands behind the `serve` verb."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from servax.core.errors import UsageError
from servax.runtime.servable import Servable

if TYPE_CHECKING:
    from servax.runtime.local import LocalServable
    from servax.server.background import BackgroundServer


def serve(
    servable: Servable | Iterable[Servable],
    port: int = 8000,
    host: str = "127.0.0.1",
) -> BackgroundServer:
    """Serves a servable, or several, from a background thread; running the cell again replaces the server.

    Args:
      servable: what to serve; it stays the caller's to close.
      port: 0 picks a free one.
      host: loopback unless told otherwise.

    Returns:
      A server with `url` and `close()`.

    Raises:
      StartupError: another process has the port.
    """
    from servax.server.background import serve as serve_in_background

    return serve_in_background(servable, port, host)


def run(
    target: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_timeout: float = 30.0,
    max_body: int = 64 * 2**20,
    load_options: Mapping[str, Any],
) -> int:
    """Serves a bundle, or `MODEL.py:NAME` with a checkpoint, until a signal; returns the exit code.

    Args:
      target: as `servax.load` takes it, except a URL.
      host: address to listen on.
      port: 0 picks a free one.
      drain_timeout: seconds that requests in flight have after SIGTERM.
      max_body: largest request body, in bytes.
      load_options: those of `servax.load`.

    Raises:
      UsageError: the target is a URL.
    """
    if target.startswith(("http://", "https://")):
        raise UsageError("a URL is served already", seen=target, expected="a bundle, or MODEL.py:NAME")
    from servax.server.process import run as run_process

    def loader() -> LocalServable:
        from servax.api.load import load
        from servax.runtime.local import LocalServable

        servable = load(target, warm=False, **load_options)
        assert isinstance(servable, LocalServable), "only a URL gives another kind, and it was refused"
        return servable

    return run_process(loader, host=host, port=port, drain_timeout=drain_timeout, max_body=max_body)
