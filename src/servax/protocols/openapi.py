"""Pieces of an OpenAPI document that every protocol's description is made of."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STATUSES = {
    "200": "the answer",
    "400": "the request is wrong; the error names what, where, what was seen and what was expected",
    "401": "the key is missing or wrong, where keys are asked for",
    "403": "the key does not open this route",
    "404": "no such model, version or function",
    "405": "the path takes another method",
    "408": "the body did not arrive in time",
    "413": "the body, or a dimension, is too large",
    "429": "the queue is full; Retry-After says when to try again",
    "500": "the device failed",
    "503": "not ready, or stopping",
    "504": "the deadline passed",
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "details": {"type": "object"}},
}
ANYTHING: Schema = {"type": "object"}
GUARDED = ("400", "401", "403", "405", "408", "413", "429", "503")
"""Statuses that any route may answer with before it looks at its model."""

_HEADERS = (
    ("Request-Timeout-Ms", "milliseconds that the answer may take", {"type": "number", "exclusiveMinimum": 0}),
    ("Request-Priority", "higher runs earlier", {"type": "integer", "minimum": -(2**31) + 1, "maximum": 2**31 - 1}),
)


def operation(
    summary: str,
    *statuses: str,
    answer: Schema = ANYTHING,
    body: Schema | None = None,
    required: bool = True,
    timed: bool = False,
    error: Schema = ERROR,
) -> Schema:
    """One method of a path.

    Args:
      summary: what it does.
      statuses: it may answer with, beside those of any route.
      answer: schema of its JSON, or schemas by content type.
      body: schemas by content type; None: it reads none.
      required: whether there must be a body.
      timed: whether deadline and priority count.
      error: schema of the JSON that tells one.
    """
    content = answer if any("/" in key for key in answer) else {"application/json": answer}
    responses: Schema = {"200": {"description": STATUSES["200"], "content": _content(content)}}
    for status in sorted({*GUARDED, *statuses} - {"200"}):
        told = ANYTHING if status == "503" else error
        responses[status] = {"description": STATUSES[status], "content": _content({"application/json": told})}
    described: Schema = {"summary": summary, "responses": responses}
    if timed:
        described["parameters"] = [
            {"name": name, "in": "header", "description": text, "schema": schema} for name, text, schema in _HEADERS
        ]
    if body is not None:
        described["requestBody"] = {"required": required, "content": _content(body)}
    return described


def _content(schemas: Schema) -> Schema:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}
