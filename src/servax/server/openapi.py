"""The OpenAPI document of what the server answers: each protocol describes its own paths."""

from __future__ import annotations

from typing import Any

from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference import openapi as open_inference
from servax.protocols.openai import openapi as openai
from servax.protocols.openapi import operation
from servax.protocols.tfserving import openapi as tfserving


def describe(plane: DataPlane, version: str, *, metrics: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the present models.

    Args:
      plane: where they are.
      version: of the server.
      metrics: whether `/metrics` is among its pages.
    """
    pages = {
        "/": {"get": operation("the models, and where everything is")},
        "/openapi.json": {"get": operation("this document")},
    }
    if metrics:
        text = {"text/plain": {"type": "string"}}
        pages["/metrics"] = {"get": operation("metrics in Prometheus' text form", answer=text)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "servax", "version": version},
        "paths": {**pages, **open_inference.describe(plane), **tfserving.describe(plane), **openai.describe(plane)},
        "components": {"schemas": open_inference.schemas()},
    }
