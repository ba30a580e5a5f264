"""The verbs as Python users call them: `load` a model, a bundle or a URL, and `serve` it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.api.load import load as load
    from servax.api.serve import serve as serve

__all__ = ["load", "serve"]

__getattr__, __dir__ = exports(__name__, {"load": "load", "serve": "serve"})
