"""Tensors of the Open Inference Protocol in gRPC messages: `raw_input_contents` and typed `contents` in, raw out."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature, dtype_of
from servax.protocols.open_inference.codec import (
    DTYPES,
    check_shape,
    datatype_of_array,
    no_shape,
    require_known,
)
from servax.protocols.open_inference.raw import decode_raw, encode_raw
from servax.protocols.wording import short

FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of typed `contents` by datatype; those without one travel in raw contents only."""

_LONG = 100
"""Characters of a name that an error repeats whole."""

_ID = 0x1A
_RAW = 0x32
"""The tags of `id` and `raw_output_contents` in ModelInferResponse."""


def read_tensors(request: Any, signature: Signature) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a ModelInferRequest by name; views of its bytes where they are raw.

    Args:
      request: the message.
      signature: of its function; long names that it does not have are cut, as errors repeat them.

    Raises:
      InvalidInput: names the tensor that cannot be read, what was seen and what was expected.
    """
    inputs, raw = request.inputs, request.raw_input_contents
    if raw and len(raw) != len(inputs):
        require_plain(inputs)
        raise InvalidInput(
            "raw contents and inputs do not match",
            where="raw_input_contents",
            seen=f"{len(raw)} for {len(inputs)} inputs",
            expected="one for each input, or none and typed `contents` in each input",
        )
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for index, tensor in enumerate(inputs):
        name = tensor.name
        if len(name) > _LONG and all(spec.name != name for spec in signature.inputs):
            name = short(name)
        if name in tensors:
            name = short(name)
            raise InvalidInput(
                f"tensor {name!r} was sent twice", where=name, seen="two tensors of this name", expected="one"
            )
        if not raw:
            require_plain((tensor,))
            tensors[name] = _typed(name, tensor.datatype, tensor.shape, tensor.contents)
        elif tensor.HasField("contents"):
            name = short(name)
            raise InvalidInput(
                f"tensor {name!r} has typed contents beside raw ones",
                where=name,
                seen="both",
                expected="raw_input_contents for every input, or `contents` in each of them",
            )
        else:
            tensors[name] = decode_raw(name, tensor.datatype, tensor.shape, raw[index])
    return tensors


def require_plain(tensors: Iterable[Any]) -> None:
    """Raises InvalidInput where a tensor is sent, or asked for, in a form that servax does not have."""
    for tensor in tensors:
        name = short(tensor.name)
        if "shared_memory_region" in tensor.parameters:
            raise InvalidInput(
                f"tensor {name!r} is in shared memory",
                where=name,
                seen="parameter `shared_memory_region`",
                expected="the tensor in the message",
                remedy="send and take it in the message; servax has no shared memory extension",
            )
        if "classification" in tensor.parameters and tensor.parameters["classification"].int64_param:
            raise InvalidInput(
                f"tensor {name!r} is asked for as a classification",
                where=name,
                seen="parameter `classification`",
                expected="the tensor itself",
                remedy="take the top of it in the client, or add a function that does (`jax.lax.top_k`)",
            )


def write_response(
    response: Any,
    model: tuple[str, str],
    parameters: tuple[tuple[str, str | bool], ...],
    request_id: str,
    tensors: Mapping[str, np.ndarray[Any, Any]],
) -> bytes:
    """A serialized ModelInferResponse; the tensors' bytes are copied once, into it.

    Args:
      response: class of the message.
      model: name and version.
      parameters: of the answer, by name.
      request_id: of the request; empty where it had none.
      tensors: the outputs to send, by name.

    Raises:
      InvalidInput: an output's dtype has no name in the protocol.
    """
    shapes = tuple((name, datatype_of_array(array), array.shape) for name, array in tensors.items())
    parts: list[bytes | memoryview] = [_head(response, model, parameters, shapes)]
    if request_id:
        parts += field(_ID, request_id.encode())
    for name, array in tensors.items():
        parts += field(_RAW, encode_raw(name, array))
    return b"".join(parts)


@functools.lru_cache(1024)
def _head(
    response: Any,
    model: tuple[str, str],
    parameters: tuple[tuple[str, str | bool], ...],
    shapes: tuple[tuple[str, str, tuple[int, ...]], ...],
) -> bytes:
    """What answers of the same model, bucket and shapes have in common; the rest of the message follows it."""
    message = response(model_name=model[0], model_version=model[1])
    for key, value in parameters:
        if isinstance(value, bool):
            message.parameters[key].bool_param = value
        else:
            message.parameters[key].string_param = value
    for name, datatype, shape in shapes:
        message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()


def field(tag: int, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """A field of bytes as it stands on the wire: its tag (number << 3 | 2), its length, and the bytes."""
    head, rest = bytearray((tag,)), len(data)
    while rest > 0x7F:
        head.append(rest & 0x7F | 0x80)
        rest >>= 7
    head.append(rest)
    return bytes(head), data


def _typed(name: str, datatype: str, shape: Sequence[int], contents: Any) -> np.ndarray[Any, Any]:
    name = short(name)
    require_known(name, datatype)
    check_shape(name, shape)
    field = FIELDS.get(datatype)
    if field is None:
        raise InvalidInput(
            f"tensor {name!r} is {datatype}, which typed contents do not carry",
            where=name,
            seen=datatype,
            expected="raw_input_contents for FP16 and BF16",
        )
    if wrong := [each.name for each, _ in contents.ListFields() if each.name != field]:
        raise InvalidInput(
            f"tensor {name!r} has values in a field of another datatype",
            where=name,
            seen=", ".join(wrong),
            expected=f"{field} for {datatype}",
        )
    values: list[Any] = getattr(contents, field)[:]
    count = math.prod(shape)
    if len(values) != count:
        raise InvalidInput(
            f"tensor {name!r} has the wrong number of values",
            where=name,
            seen=f"{len(values)} values",
            expected=short(f"{count} for shape {list(shape)}"),
        )
    array = _array(name, datatype, values)
    try:
        return array.reshape(shape)
    except ValueError:
        raise no_shape(name, shape, "sizes of an array that can be addressed") from None


def _array(name: str, datatype: str, values: list[Any]) -> np.ndarray[Any, Any]:
    dtype = dtype_of(DTYPES[datatype])
    try:
        if datatype == "BYTES":
            array = np.empty(len(values), object)
            array[:] = [str(value, "utf-8") for value in values]
            return array
        return np.array(values, dtype)
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"a string of tensor {name!r} is not UTF-8", where=name, seen=error.reason, expected="UTF-8"
        ) from None
    except OverflowError:
        limits = np.iinfo(dtype)
        raise InvalidInput(
            f"tensor {name!r} holds a value out of the range of its datatype",
            where=name,
            seen=str(next(value for value in values if not limits.min <= value <= limits.max)),
            expected=datatype,
        ) from None
