"""Messages of the Open Inference Protocol's REST form, and what servax adds to them.

Added, and free to be ignored: `details` beside `error` (the parts of an error), `functions` in a model's metadata
(every signature with its dimension names), `state` and `programs` in readiness, `parameters.function` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from servax.core import errors
from servax.core.errors import ExecutionError, InvalidInput, ServaxError
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.dataplane import DataPlane, ModelMetadata, ModelStatus
from servax.protocols.open_inference.codec import datatype_of, jsonable
from servax.protocols.wording import short
from servax.runtime.servable import State

Message = dict[str, Any]
Parameters = dict[str, Any]

_PARTS = ("where", "seen", "expected", "remedy")
_LONGEST = 2000
"""Characters of one part of an error: a request may have put thousands of names into it."""


class InputTensor(msgspec.Struct):
    """`request_input`; `data` stays text until the datatype is known, and is empty where it is missing."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: Parameters | None = None


class OutputChoice(msgspec.Struct):
    """`request_output`."""

    name: str
    parameters: Parameters | None = None


class InferBody(msgspec.Struct):
    """`inference_request`."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[OutputChoice] | None = None


_BODY = msgspec.json.Decoder(InferBody)


def read_body(body: bytes | bytearray) -> InferBody:
    """The request that a body holds.

    Raises:
      InvalidInput: this is no JSON, or no inference request; says where.
    """
    try:
        return _BODY.decode(body)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        raise InvalidInput(
            "the body is not an inference request of the Open Inference Protocol",
            where=where.strip("`") or None,
            seen=what,
            expected='{"inputs": [{"name": ..., "datatype": ..., "shape": [...], "data": [...]}]}',
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("the body is not JSON", seen=str(error) if body else "an empty body") from None
    except RecursionError:
        raise InvalidInput(
            "the body is nested too deeply",
            where="the body",
            seen="lists or objects in one another, deeper than can be read",
            expected="`data` nested as deep as the tensor has axes, or flat data",
        ) from None


def server_metadata(version: str) -> Message:
    """`GET /v2`."""
    return {"name": "servax", "version": version, "extensions": ["model_repository(index)"]}


def model_metadata(model: ModelMetadata) -> Message:
    """`GET /v2/models/{m}`: tensors of the default function, sizes unknown ahead as -1; `functions` has them all."""
    default = model.functions.get(model.default)
    texts = [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in model.texts.get(model.default, {})]
    return {
        "name": model.name,
        "versions": list(model.versions),
        "platform": model.platform,
        "inputs": [] if default is None else [*map(_tensor, default.inputs), *texts],
        "outputs": [] if default is None else list(map(_tensor, default.outputs)),
        "functions": {
            name: write_signature(signature, model.texts.get(name, {})) for name, signature in model.functions.items()
        },
    }


def write_signature(signature: Signature, texts: Mapping[str, str]) -> Message:
    """A signature with all that a client of ours needs."""
    return {
        "inputs": list(map(_spec, signature.inputs)),
        "outputs": list(map(_spec, signature.outputs)),
        "batch": signature.batch,
        "lengths": dict(signature.lengths),
        "texts": dict(texts),
    }


def model_ready(status: ModelStatus) -> Message:
    """`GET /v2/models/{m}/ready`."""
    ready = status.state is State.READY
    return {"name": status.name, "ready": ready, "live": ready, **_progress(status)}


def server_ready(plane: DataPlane) -> Message:
    """`GET /v2/health/ready`, with what is left to do.

    The specification's example of this answer shows the key `live`, its text `ready`: both are sent, and mean ready.
    """
    message: Message = {"ready": plane.ready, "live": plane.ready}
    if plane.loading is not None:
        message["loading"] = [
            {"step": each.step, "done": each.done, "total": each.total, "seconds": each.seconds}
            for each in plane.loading()
        ]
    message["models"] = [{"name": status.name, **_progress(status)} for status in plane.list()]
    return message


def repository_index(plane: DataPlane) -> list[Message]:
    """`POST /v2/repository/index`."""
    return [
        {
            "name": status.name,
            "version": status.version,
            "state": "READY" if status.state is State.READY else "UNAVAILABLE",
            "reason": status.reason or ("" if status.state is State.READY else status.state.value),
        }
        for status in plane.list()
    ]


def write_error(error: ServaxError) -> Message:
    """`{"error": "..."}`, with the parts apart beside it, each cut to a length that a log can take."""
    parts = {part: short(text, _LONGEST) for part in _PARTS if (text := getattr(error, part)) is not None}
    what = short(error.what, _LONGEST)
    details = {"type": type(error).__name__, "what": what, **parts}
    return {"error": ServaxError(what, **parts).sentence(), "details": details}


def read_error(status: int, message: Any) -> ServaxError:
    """The error that a server answered with: of its own class where the server is ours, else the status' class."""
    fields: Message = message if isinstance(message, dict) else {}
    details: Message = fields["details"] if isinstance(fields.get("details"), dict) else {}
    kind = getattr(errors, str(details.get("type", "")), None)
    if isinstance(kind, type) and issubclass(kind, ServaxError):
        parts = {part: text for part in _PARTS if isinstance(text := details.get(part), str)}
        return kind(str(details.get("what", "")), **parts)
    text = short(str(fields.get("error", message)), 300)
    kinds = (errors.NotFound, errors.TooLarge, errors.DeadlineExceeded, errors.NotReady)
    for each in kinds:
        if each.status == status:
            return each(text)
    return InvalidInput(text) if 400 <= status < 500 else ExecutionError(text, seen=f"HTTP status {status}")


def _tensor(spec: TensorSpec) -> Message:
    return {
        "name": spec.name,
        "datatype": datatype_of(spec.dtype),
        "shape": [dim if isinstance(dim, int) else -1 for dim in spec.shape],
    }


def _spec(spec: TensorSpec) -> Message:
    record: Message = {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
    if spec.pad != 0:
        record["pad"] = jsonable(spec.pad)
    if spec.default is not None:
        record["default"] = jsonable(spec.default)
    return record


def _progress(status: ModelStatus) -> Message:
    message: Message = {"version": status.version, "state": status.state.value}
    if status.reason is not None:
        message["reason"] = status.reason
    if status.progress.done or status.progress.left:
        message["programs"] = {"done": list(status.progress.done), "left": list(status.progress.left)}
    return message
