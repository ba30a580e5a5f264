"""One process that listens: the application, its life, its metrics and its logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.server.app import App, create_app
    from servax.server.background import BackgroundServer, serve
    from servax.server.process import run

__all__ = ["App", "BackgroundServer", "create_app", "run", "serve"]

__getattr__, __dir__ = exports(
    __name__,
    {"App": "app", "BackgroundServer": "background", "create_app": "app", "run": "process", "serve": "background"},
)
