"""Messages of the Open Inference Protocol's REST form, and what servax adds to them.

Added, and free to be ignored: `details` beside `error` (the parts of an error), `functions` in a model's metadata
(every signature with its dimension names), `state` and `programs` in readiness, `parameters.function` of a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

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
T = TypeVar("T")

_PARTS = ("where", "seen", "expected", "remedy")
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")
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


def write_message(message: Message) -> bytes:
    """A message as JSON.

    Raises:
      InvalidInput: a text in it is not Unicode.
    """
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError as error:  # of the texts in a request, only the id is not checked before
        raise InvalidInput("the request's id is not Unicode", where="id", seen=str(error)) from None


class IndexBody(msgspec.Struct):
    """`repository_index_request`."""

    ready: bool = False


class LoadBody(msgspec.Struct):
    """`repository_load_request`, and that of unloading."""

    parameters: Parameters = {}


_JSON = msgspec.json.Decoder(InferBody)
_MSGPACK = msgspec.msgpack.Decoder(InferBody)
_NO_NUMBER = re.compile(rb"-?(?:NaN|Infinity|nan|inf)")


def read_body(body: bytes | bytearray | memoryview) -> InferBody:
    """The request that a body of JSON holds.

    Raises:
      InvalidInput: this is no JSON, or no inference request; says where.
    """
    try:
        return _JSON.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error, body, "JSON") from None


def read_packed(body: bytes | bytearray) -> InferBody:
    """As `read_body`, of MessagePack."""
    try:
        return _MSGPACK.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error, body, "MessagePack") from None


def read_index(body: bytes | bytearray) -> IndexBody:
    """What `POST /v2/repository/index` asks for; an empty body asks for everything."""
    return _read_small(body, IndexBody, '{"ready": true}')


def read_load(body: bytes | bytearray) -> LoadBody:
    """The parameters of loading or unloading; an empty body has none."""
    return _read_small(body, LoadBody, '{"parameters": {...}}')


def _read_small(body: bytes | bytearray, kind: type[T], expected: str) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(
            "the body cannot be read", where="the body", seen=short(str(error)), expected=f"{expected}, or nothing"
        ) from None


def _unreadable(error: Exception, body: bytes | bytearray | memoryview, notation: str) -> InvalidInput:
    if isinstance(error, RecursionError):
        return InvalidInput(
            "the body is nested too deeply",
            where="the body",
            seen="lists or objects in one another, deeper than can be read",
            expected="`data` nested as deep as the tensor has axes, or flat data",
        )
    if isinstance(error, msgspec.ValidationError):
        what, _, where = str(error).partition(" - at ")
        return InvalidInput(
            "the body is not an inference request of the Open Inference Protocol",
            where=short(where.strip("`")) or None,
            seen=short(what),
            expected='{"inputs": [{"name": ..., "datatype": ..., "shape": [...], "data": [...]}]}',
        )
    if (place := re.search(r"\(byte (\d+)\)", str(error))) is not None:
        near = bytes(body[max(0, int(place[1]) - 2) : int(place[1]) + 9])
        if (token := _NO_NUMBER.search(near)) is not None:
            name = token[0].decode()
            return InvalidInput(
                f"the body is not {notation}: it has no numbers like {name}",
                where=f"byte {place[1]}",
                seen=name,
                expected='a number, or one of the strings "NaN", "Infinity" and "-Infinity"',
            )
    return InvalidInput(f"the body is not {notation}", seen=short(str(error)) if len(body) else "an empty body")


def server_metadata(version: str, *, repository: bool) -> Message:
    """`GET /v2`, with the extensions that there are; `repository` says whether models are loaded and unloaded."""
    extensions = [*_EXTENSIONS, "model_repository" if repository else "model_repository(index)"]
    return {"name": "servax", "version": version, "extensions": sorted(extensions)}


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


def repository_index(plane: DataPlane, *, ready: bool = False) -> list[Message]:
    """`POST /v2/repository/index`: every version there is, or those that are ready."""
    statuses = plane.list() if plane.repository is None else plane.repository.index()
    return [
        {
            "name": status.name,
            "version": status.version,
            "state": "READY" if status.state is State.READY else "UNAVAILABLE",
            "reason": status.reason or ("" if status.state is State.READY else status.state.value),
        }
        for status in statuses
        if not ready or status.state is State.READY
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
    kinds = (errors.Unauthorized, errors.Forbidden, errors.NotFound, errors.TooLarge)
    for each in (*kinds, errors.Overloaded, errors.NotReady, errors.DeadlineExceeded):
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
