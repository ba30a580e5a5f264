"""An OpenAPI description of what the server answers, with each model's own tensors."""

from __future__ import annotations

from typing import Any

from servax.core.tensors import TensorSpec
from servax.protocols.dataplane import DataPlane, ModelMetadata
from servax.protocols.open_inference.codec import datatype_of

_TYPES = {"b": {"type": "boolean"}, "i": {"type": "integer"}, "u": {"type": "integer"}, "O": {"type": "string"}}
_STATUSES = {
    "200": "the answer",
    "400": "a tensor does not fit; the error names it",
    "404": "no such model, version or function",
    "413": "the body, or a dimension, is too large",
    "500": "the device failed",
    "503": "not ready",
    "504": "the deadline passed",
}


def describe(plane: DataPlane, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the present models."""
    paths: dict[str, Any] = {
        "/v2": _get("server metadata"),
        "/v2/health/live": _get("whether the server lives"),
        "/v2/health/ready": _get("whether every model answers, and what is left to do", "503"),
        "/metrics": _get("metrics in Prometheus' text form"),
    }
    for name in plane.names:
        base = f"/v2/models/{name}"
        paths[base] = _get(f"metadata of {name}")
        paths[f"{base}/ready"] = _get(f"whether {name} answers", "503")
        paths[f"{base}/infer"] = _infer(plane.metadata(name))
    return {"openapi": "3.1.0", "info": {"title": "servax", "version": version}, "paths": paths}


def _get(summary: str, *statuses: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses("200", *statuses)}}


def _responses(*statuses: str) -> dict[str, Any]:
    return {status: {"description": _STATUSES[status]} for status in statuses}


def _infer(model: ModelMetadata) -> dict[str, Any]:
    functions: list[dict[str, Any]] = []
    for name, signature in model.functions.items():
        tensors = [_tensor(spec) for spec in signature.inputs]
        tensors += [_tensor(TensorSpec(text, "string", ("batch",))) for text in model.texts.get(name, {})]
        function: dict[str, Any] = {
            "title": name,
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": {"type": "string"},
                "parameters": {"type": "object", "properties": {"function": {"const": name}}},
                "inputs": {"type": "array", "items": {"anyOf": tensors}},
                "outputs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"enum": [spec.name for spec in signature.outputs]}},
                    },
                },
            },
        }
        functions.append(function)
    return {
        "post": {
            "summary": f"inference with {model.name}",
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"anyOf": functions}}}},
            "responses": _responses(*_STATUSES),
        }
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "title": f"{spec.name}: {spec.text()}",
        "type": "object",
        "required": ["name", "datatype", "shape", "data"],
        "properties": {
            "name": {"const": spec.name},
            "datatype": {"const": datatype_of(spec.dtype)},
            "shape": {
                "type": "array",
                "prefixItems": [
                    {"const": d} if isinstance(d, int) else {"type": "integer", "minimum": 1} for d in spec.shape
                ],
                "minItems": len(spec.shape),
                "maxItems": len(spec.shape),
            },
            "data": {
                "type": "array",
                "description": f"flat or nested {_TYPES.get(spec.numpy_dtype.kind, {'type': 'number'})['type']}s",
            },
        },
    }
