"""TensorFlow Serving's protocols: its REST API below `/v1`, its PredictionService and ModelService over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.protocols.tfserving.rest import TFServing

__all__ = ["TFServing"]

__getattr__, __dir__ = exports(__name__, {"TFServing": "rest"})
