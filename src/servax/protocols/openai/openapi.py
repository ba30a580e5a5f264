"""The OpenAI API's paths in an OpenAPI document."""

from __future__ import annotations

from typing import Any

from servax.generation.servable import LanguageServable
from servax.protocols.dataplane import DataPlane
from servax.protocols.openai.models import usable
from servax.protocols.openapi import ANYTHING, Schema, operation

_INTEGERS: Schema = {"type": "array", "items": {"type": "integer"}}
_TEXTS: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _INTEGERS],
}
_SAMPLING: Schema = {
    "n": {"type": "integer", "minimum": 1},
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "seed": {"type": "integer"},
}
_STREAMED: Schema = {"application/json": ANYTHING, "text/event-stream": {"type": "string"}}


def describe(plane: DataPlane) -> Schema:
    """The paths of the present models: those of generating only where one generates, and so on."""
    found = list(usable(plane))
    paths: Schema = {
        "/v1/models": {"get": operation("the models that generate or embed")},
        "/health": {"get": operation("whether all models answer", answer={"text/plain": {"type": "string"}})},
    }
    generating = [each.name for each in found if isinstance(each, LanguageServable)]
    embedding = [each.name for each in found if not isinstance(each, LanguageServable)]
    if generating:
        message: Schema = {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}}
        messages: Schema = {"type": "array", "items": message, "minItems": 1}
        paths["/v1/completions"] = _generation("continues a prompt", generating, {"prompt": _TEXTS})
        paths["/v1/chat/completions"] = _generation("answers a conversation", generating, {"messages": messages})
        paths["/tokenize"] = _post("the token ids of a prompt", generating, {"prompt": {"type": "string"}})
        paths["/detokenize"] = _post("the text of token ids", generating, {"tokens": _INTEGERS})
    if embedding:
        paths["/v1/embeddings"] = _post("a vector for each text", embedding, {"input": _TEXTS})
    return paths


def _generation(summary: str, models: list[str], fields: Schema) -> Schema:
    return _post(summary, models, fields, _SAMPLING, answer=_STREAMED)


def _post(
    summary: str, models: list[str], fields: Schema, optional: Schema | None = None, *, answer: Schema = ANYTHING
) -> Schema:
    body: dict[str, Any] = {
        "type": "object",
        "required": ["model", *fields],
        "properties": {"model": {"enum": models}, **fields, **(optional or {})},
    }
    return {
        "post": operation(
            summary, "404", "500", "504", answer=answer, body={"application/json": body}, timed=True, error=_ERROR
        )
    }


_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}
