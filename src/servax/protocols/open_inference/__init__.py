"""The Open Inference Protocol (KServe V2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.protocols.open_inference.rest import OpenInference

__all__ = ["OpenInference"]

__getattr__, __dir__ = exports(__name__, {"OpenInference": "rest"})
