"""Inference over HTTP: from a body in one of its forms to a request, and from the result to an answer.

Forms, by `Content-Type`: the protocol's JSON (whatever the type says), JSON with binary tensors behind it, or one
tensor's bytes alone (by the header `Inference-Header-Content-Length`), the same message in MessagePack, and one
array as `.npy`. The answer has the form that `Accept` names, else that of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature
from servax.protocols.dataplane import DataPlane
from servax.protocols.http import JSON, Answer, Incoming, server_timing
from servax.protocols.npy import CONTENT_TYPE as NPY
from servax.protocols.npy import read_npy, write_npy
from servax.protocols.open_inference import binary, codec, messages
from servax.protocols.open_inference.codec import datatype_of_array, decode, encode
from servax.protocols.open_inference.outputs import Output, chosen
from servax.protocols.open_inference.parameters import Choices, choices_of
from servax.protocols.open_inference.raw import decode_raw, encode_raw
from servax.protocols.wording import short
from servax.runtime.request import InferRequest, InferResult

MSGPACK = b"application/msgpack"

_PACKED = (MSGPACK, b"application/x-msgpack", b"application/vnd.msgpack")
_FORMS = {NPY: NPY, **dict.fromkeys(_PACKED, MSGPACK), JSON: JSON, binary.CONTENT_TYPE: binary.CONTENT_TYPE}
_SIGNATURES = 1024
"""Signatures and forms of answers whose outputs are remembered."""

_BINARY_KINDS = (b"\xc4", b"\xc5", b"\xc6")
"""First bytes of MessagePack's `bin`."""

Tensors = dict[str, np.ndarray[Any, Any]]


class Inference:
    """Answers inference requests of every form.

    Args:
      plane: where the models are.
      timings: whether an answer says what each step took (`Server-Timing`).
    """

    def __init__(self, plane: DataPlane, *, timings: bool) -> None:
        self._plane = plane
        self._timings = timings
        self._outputs: dict[tuple[int, bytes, bool], tuple[Signature, Sequence[Output]]] = {}
        """All outputs, by identity of a signature, form of the answer, and whether all are asked for in binary."""

    async def __call__(self, model: str, version: str | None, query: bytes, incoming: Incoming) -> Answer:
        """The answer to a request for a model.

        Args:
          model: its name.
          version: None: by the plane's policy.
          query: of the URL; `function` and `outputs` count where the body has no place for them.
          incoming: the request.

        Raises:
          InvalidInput: names what is wrong with it; other errors of ours as the plane raises them.
        """
        headers = incoming.headers
        content_type = headers.get(b"content-type")
        form = JSON if content_type is None else _form(content_type)
        if form not in (NPY, MSGPACK):
            form = JSON  # with binary tensors or without: the length of the JSON tells
        length = headers.get(binary.HEADER)
        rest: memoryview | None = None
        message: messages.InferBody | None
        if length is not None and form is not NPY:
            size = binary.header_length(length, incoming.body)
            rest = memoryview(incoming.body)[size:]
            message = messages.read_body(memoryview(incoming.body)[:size]) if size else None
        elif form is NPY:
            message = None
        elif form is MSGPACK:
            message = messages.read_packed(incoming.body)
        else:
            message = messages.read_body(incoming.body)
        if message is None:
            message = messages.InferBody([], parameters=None if form is NPY else {"binary_data_output": True})
            choices, message.outputs = _queried(query, incoming)
        else:
            choices = choices_of(message.parameters, incoming.deadline, incoming.priority)
        function, signature = self._plane.signature(model, version, self._known(model, version, choices.function))
        wanted = _wanted(headers.get(b"accept"), form)
        outputs = self._chosen(message, signature, wanted)
        tensors: Mapping[str, Any]
        if form is NPY:
            tensors = self._one_array(signature, incoming)
        elif rest is not None and not len(message.inputs):
            texts = self._plane.get(model, version).texts.get(function, {})
            tensors = binary.raw_tensor(signature, incoming.body, texts)
        elif rest is not None:
            tensors = _binary_tensors(message, _names(signature), rest)
        elif form is MSGPACK:
            tensors = _packed_tensors(message, _names(signature))
        else:
            tensors = _json_tensors(message, _names(signature))
        request = InferRequest(function, tensors, message.id, choices.deadline, choices.priority, owned=True)
        result = await self._plane.infer(model, version, request)
        answered_by = result.version or version or self._plane.get(model).version
        answer = _answer((model, answered_by, function), message.id, outputs, wanted, result)
        if self._timings:
            answer.headers = (*answer.headers, server_timing(result.times))
        return answer

    def _chosen(self, message: Any, signature: Signature, wanted: bytes) -> Sequence[Output]:
        """As `chosen`, looked up where a request says nothing of outputs, as most do."""
        parameters = message.parameters
        binary_data = bool(parameters) and parameters.get("binary_data_output") is True and len(parameters) == 1
        if message.outputs is not None or (parameters and not binary_data):
            return chosen(message, signature, wanted)
        key = id(signature), wanted, binary_data
        known = self._outputs.get(key)
        if known is None or known[0] is not signature:
            if len(self._outputs) >= _SIGNATURES:
                self._outputs.clear()
            known = self._outputs[key] = signature, chosen(message, signature, wanted)
        return known[1]

    def _known(self, model: str, version: str | None, function: str | None) -> str | None:
        """A function's name as errors may repeat it."""
        if function is None or function in self._plane.metadata(model, version).functions:
            return function
        return short(function)

    def _one_array(self, signature: Signature, incoming: Incoming) -> Tensors:
        required = [spec for spec in signature.inputs if spec.required and spec.name not in signature.lengths]
        if len(required) != 1:
            raise InvalidInput(
                "an .npy body is one tensor, and the function takes another number of them",
                where="the body",
                seen="one array",
                expected=", ".join(spec.name for spec in signature.inputs) or "no input",
                remedy="send JSON, with the tensors in binary behind it where they are large",
            )
        return {required[0].name: read_npy(required[0], incoming.body)}


def _wanted(accept: bytes | None, form: bytes) -> bytes:
    """The form of the answer."""
    if accept is None or accept == b"*/*":
        return form
    for part in accept.split(b","):
        if (named := _form(part)) is not None:
            return named
        if part.partition(b";")[0].strip() in (b"*/*", b"application/*"):
            return form
    return JSON


def _form(content_type: bytes) -> bytes | None:
    return _FORMS.get(content_type) or _FORMS.get(content_type.partition(b";")[0].strip().lower())


def _queried(query: bytes, incoming: Incoming) -> tuple[Choices, list[messages.OutputChoice] | None]:
    """What a body without a message has beside it, in the URL."""
    asked = parse_qs(query.decode("latin-1"), keep_blank_values=True) if query else {}
    names = [name for text in asked.get("outputs", []) for name in text.split(",")]
    choices = Choices(asked.get("function", [None])[-1], incoming.priority, incoming.deadline)
    return choices, [messages.OutputChoice(name) for name in names] or None


def _names(signature: Signature) -> Sequence[str]:
    return [spec.name for spec in signature.inputs]


def _name(tensor: Any, known: Sequence[str], tensors: Mapping[str, Any]) -> str:
    """The name of a tensor, cut where the function does not have it, as errors repeat it."""
    name: str = tensor.name if tensor.name in known else short(tensor.name)
    if name in tensors:
        raise InvalidInput(
            f"tensor {name!r} was sent twice", where=name, seen="two tensors of this name", expected="one"
        )
    if tensor.parameters is not None and "shared_memory_region" in tensor.parameters:
        raise InvalidInput(
            f"tensor {name!r} is said to be in shared memory",
            where=name,
            seen="shared_memory_region",
            expected="its data in the body",
        )
    return name


def _data(name: str, tensor: messages.InputTensor) -> memoryview:
    data = memoryview(tensor.data)
    if not data:
        raise InvalidInput(
            f"tensor {name!r} has no data", where=name, seen="no `data`", expected="`data`, a list of values"
        )
    return data


def _binary_tensors(message: messages.InferBody, known: Sequence[str], rest: memoryview) -> Tensors:
    tensors: Tensors = {}
    for tensor, piece in zip(message.inputs, binary.binary_data(message.inputs, rest), strict=True):
        name = _name(tensor, known, tensors)
        if piece is None:
            tensors[name] = decode(name, tensor.datatype, tensor.shape, _data(name, tensor))
        else:
            tensors[name] = decode_raw(name, tensor.datatype, tensor.shape, piece)
    return tensors


def _json_tensors(message: messages.InferBody, known: Sequence[str]) -> Tensors:
    tensors: Tensors = {}
    for tensor in message.inputs:
        name = _name(tensor, known, tensors)
        binary.require_no_binary(name, tensor.parameters)
        tensors[name] = decode(name, tensor.datatype, tensor.shape, _data(name, tensor))
    return tensors


def _packed_tensors(message: messages.InferBody, known: Sequence[str]) -> Tensors:
    tensors: Tensors = {}
    for tensor in message.inputs:
        name = _name(tensor, known, tensors)
        binary.require_no_binary(name, tensor.parameters)
        data = _data(name, tensor)
        if bytes(data[:1]) in _BINARY_KINDS:
            data = msgspec.msgpack.decode(data, type=memoryview)
            tensors[name] = decode_raw(name, tensor.datatype, tensor.shape, data)
        else:
            tensors[name] = decode(name, tensor.datatype, tensor.shape, data, codec.MSGPACK)
    return tensors


def _answer(
    by: tuple[str, str, str], request_id: str | None, outputs: Sequence[Output], form: bytes, result: InferResult
) -> Answer:
    """The answer in its form; `by` are the model, its version and the function."""
    arrays = result.tensors
    if form is NPY:
        return Answer(write_npy(arrays[outputs[0].name]), content_type=NPY)
    message: messages.Message = {"model_name": by[0], "model_version": by[1]}
    if request_id is not None:
        message["id"] = request_id
    message["parameters"] = {"function": by[2], "bucket": result.bucket}
    tensors: list[messages.Message] = []
    binary_size = False
    for output in outputs:
        array = arrays[output.name]
        tensor: messages.Message = {
            "name": output.name,
            "datatype": datatype_of_array(array),
            "shape": list(array.shape),
        }
        if form is MSGPACK:
            tensor["data"] = encode_raw(output.name, array) if array.dtype.kind not in "OUS" else array.ravel().tolist()
        elif output.binary:
            binary_size = True
        else:
            tensor["data"] = encode(output.name, array)
        tensors.append(tensor)
    if binary_size:
        body, length = binary.write_binary(message, "outputs", tensors, arrays)
        return Answer(body, content_type=binary.CONTENT_TYPE, headers=((binary.HEADER, b"%d" % length),))
    message["outputs"] = tensors
    if form is MSGPACK:
        return Answer(msgspec.msgpack.encode(message), content_type=MSGPACK)
    return Answer(msgspec.json.encode(message))
