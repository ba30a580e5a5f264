"""The Open Inference Protocol's paths in an OpenAPI document, with each model's own tensors."""

from __future__ import annotations

from typing import Any

from servax.core.tensors import Signature, TensorSpec
from servax.protocols.dataplane import DataPlane, ModelMetadata
from servax.protocols.open_inference.codec import NON_FINITE, datatype_of
from servax.protocols.openapi import Schema, operation

_BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
_FLAG: Schema = {"type": "boolean"}
_INFER = ("404", "500", "504")


def describe(plane: DataPlane) -> dict[str, Any]:
    """The paths of the present models and of the server."""
    paths: dict[str, Any] = {
        "/v2": {"get": operation("server metadata, with the extensions it has")},
        "/v2/health/live": {"get": operation("whether the server lives")},
        "/v2/health/ready": {"get": operation("whether every model answers, and what is left to do")},
        "/v2/models/stats": {"get": operation("statistics of every model")},
        "/v2/repository/index": {
            "post": operation(
                "every version of every model",
                body={"application/json": {"type": "object", "properties": {"ready": _FLAG}}},
                answer={"type": "array", "items": {"type": "object", "required": ["name", "version", "state"]}},
                required=False,
            )
        },
    }
    for name in plane.names:
        metadata = plane.metadata(name)
        for base in (f"/v2/models/{name}", *(f"/v2/models/{name}/versions/{each}" for each in metadata.versions)):
            paths[base] = {"get": operation(f"metadata of {name}", "404")}
            paths[f"{base}/ready"] = {"get": operation(f"whether {name} answers", "404")}
            paths[f"{base}/config"] = {"get": operation(f"configuration of {name}, in Triton's words", "404")}
            paths[f"{base}/stats"] = {"get": operation(f"statistics of {name}", "404")}
            paths[f"{base}/infer"] = {"post": _infer(metadata)}
        if plane.repository is not None:
            for verb in ("load", "unload"):
                body = {"application/json": {"type": "object", "properties": {"parameters": {"type": "object"}}}}
                paths[f"/v2/repository/models/{name}/{verb}"] = {
                    "post": operation(f"{verb} {name}", "404", "500", body=body, required=False)
                }
    return paths


def _infer(model: ModelMetadata) -> Schema:
    functions = [
        _function(name, signature, list(model.texts.get(name, {})), default=name == model.default)
        for name, signature in model.functions.items()
    ]
    return operation(
        f"inference with {model.name}",
        *_INFER,
        body={
            "application/json": {"anyOf": functions},
            "application/octet-stream": _BYTES
            | {"description": "JSON and binary tensors behind it, by Inference-Header-Content-Length"},
            "application/msgpack": _BYTES | {"description": "the same message, `data` as bin or list"},
            "application/x-npy": _BYTES | {"description": "the one required input, as numpy.save writes it"},
        },
        answer={
            "application/json": _answer(),
            "application/octet-stream": _BYTES,
            "application/msgpack": _BYTES,
            "application/x-npy": _BYTES,
        },
        timed=True,
    )


def _function(name: str, signature: Signature, texts: list[str], *, default: bool) -> Schema:
    tensors = [_tensor(spec) for spec in signature.inputs]
    tensors += [_tensor(TensorSpec(text, "string", ("batch",))) for text in texts]
    parameters: Schema = {
        "type": "object",
        "properties": {
            "function": {"const": name},
            "priority": {"type": "integer"},
            "timeout": {"type": "integer", "minimum": 1, "maximum": 2**53, "description": "microseconds"},
            "binary_data_output": _FLAG,
        },
    }
    required = ["inputs"]
    if not default:
        parameters["required"] = ["function"]
        required.append("parameters")
    return {
        "title": name,
        "type": "object",
        "required": required,
        "properties": {
            "id": {"type": ["string", "null"]},
            "parameters": parameters if not default else {"anyOf": [parameters, {"type": "null"}]},
            "inputs": {"type": "array", "minItems": 1, "maxItems": len(tensors), "items": {"anyOf": tensors}},
            "outputs": {
                "type": ["array", "null"],
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"enum": [spec.name for spec in signature.outputs]},
                        "parameters": {"type": ["object", "null"], "properties": {"binary_data": _FLAG}},
                    },
                },
            },
        },
    }


def _answer() -> Schema:
    return {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"type": "object", "required": ["name", "datatype", "shape"]}},
        },
    }


def _tensor(spec: TensorSpec) -> Schema:
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
                    {"const": dim} if isinstance(dim, int) else {"type": "integer", "minimum": 1} for dim in spec.shape
                ],
                "minItems": len(spec.shape),
                "maxItems": len(spec.shape),
            },
            "data": {
                "type": "array",
                "items": {"$ref": f"#/components/schemas/{_values(spec)}"},
                "description": "flat in row-major order, or nested as the shape says",
            },
            "parameters": {"type": ["object", "null"]},
        },
    }


def _values(spec: TensorSpec) -> str:
    kind = spec.numpy_dtype.kind
    return {"b": "Booleans", "i": "Integers", "u": "Integers", "O": "Texts"}.get(kind, "Numbers")


def schemas() -> dict[str, Schema]:
    """The values of `data`, or lists of them: what the descriptions of tensors refer to."""
    values: dict[str, Schema] = {
        "Booleans": {"type": "boolean"},
        "Integers": {"type": "integer"},
        "Texts": {"type": "string"},
        "Numbers": {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]},
    }
    return {
        name: {"anyOf": [value, {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}]}
        for name, value in values.items()
    }
