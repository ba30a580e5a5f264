"""TensorFlow Serving's paths in an OpenAPI document."""

from __future__ import annotations

from typing import Any

from servax.protocols.dataplane import DataPlane
from servax.protocols.openapi import operation


def describe(plane: DataPlane) -> dict[str, Any]:
    """The paths of the present models."""
    body: dict[str, Any] = {
        "application/json": {
            "type": "object",
            "properties": {"signature_name": {"type": "string"}, "instances": {"type": "array"}, "inputs": {}},
            "anyOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
        }
    }
    paths: dict[str, Any] = {}
    for name in plane.names:
        base = f"/v1/models/{name}"
        paths[base] = {"get": operation(f"the state of every version of {name}", "404")}
        paths[f"{base}/metadata"] = {"get": operation(f"the signatures of {name}", "404")}
        paths[f"{base}:predict"] = {
            "post": operation(f"inference with {name}: rows or columns", "404", "500", "504", body=body, timed=True)
        }
    return paths
