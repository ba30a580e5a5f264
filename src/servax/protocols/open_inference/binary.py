"""The binary tensor data extension: a body that is JSON and behind it the bytes of the tensors, in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature
from servax.protocols.bodies import Body
from servax.protocols.open_inference.codec import DTYPES, datatype_of
from servax.protocols.open_inference.messages import Message, write_message
from servax.protocols.open_inference.raw import decode_raw, encode_raw
from servax.protocols.wording import short

EXTENSION = "binary_tensor_data"
HEADER = b"inference-header-content-length"
CONTENT_TYPE = b"application/octet-stream"

_SIZE = "binary_data_size"
_NAME = "Inference-Header-Content-Length"


def header_length(text: bytes, body: Body) -> int:
    """The bytes of a body that are JSON, by its header.

    Raises:
      InvalidInput: the header is no length, or longer than the body.
    """
    if not text.isdigit() or len(text) > 18 or int(text) > len(body):
        raise InvalidInput(
            "the length of the JSON before the binary tensors is wrong",
            where=f"header {_NAME}",
            seen=short(text.decode("latin-1")),
            expected=f"0 to {len(body)}, the bytes of the body",
        )
    return int(text)


def binary_data(tensors: Sequence[Any], rest: memoryview) -> list[memoryview | None]:
    """The bytes of each tensor; None for those whose data are in the JSON.

    Args:
      tensors: of the message.
      rest: what follows the JSON.

    Raises:
      InvalidInput: names the tensor whose size is wrong, or whose bytes are missing; or bytes are left over.
    """
    pieces: list[memoryview | None] = []
    place = 0
    for tensor in tensors:
        size = None if tensor.parameters is None else tensor.parameters.get(_SIZE)
        if size is None:
            pieces.append(None)
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise _wrong(tensor.name, "has no size that can be read", short(repr(size)), "bytes, an integer from 0")
        if len(tensor.data):
            raise _wrong(tensor.name, "has data in JSON and in bytes", "both", f"`data` or `{_SIZE}`")
        if size > len(rest) - place:
            raise _wrong(
                tensor.name,
                "is longer than the body",
                f"{len(rest) - place} bytes left for it",
                short(f"{size}, as its {_SIZE} says"),
            )
        pieces.append(rest[place : place + size])
        place += size
    if place != len(rest):
        raise InvalidInput(
            "the body is longer than its tensors",
            where="the body",
            seen=f"{len(rest)} bytes after the JSON",
            expected=f"{place}, the sum of each {_SIZE}",
            remedy=f"give every binary tensor its {_SIZE}, in the order of the bytes",
        )
    return pieces


def require_no_binary(name: str, parameters: Mapping[str, Any] | None) -> None:
    """Raises InvalidInput where a tensor is said to be binary in a body that is all JSON."""
    if parameters is not None and _SIZE in parameters:
        raise _wrong(name, "is said to be binary, but the body is all JSON", _SIZE, f"the header {_NAME}")


def raw_tensor(signature: Signature, data: Body, texts: Mapping[str, str]) -> dict[str, np.ndarray[Any, Any]]:
    """The one input of a function from a body that is nothing but its bytes (header length 0).

    One size may be unknown ahead; where two are, the batch is one row.

    Raises:
      InvalidInput: the function has not exactly one required input of numbers, or the bytes do not fit its shape.
    """
    required = [spec for spec in signature.inputs if spec.required and spec.name not in signature.lengths]
    if len(required) != 1 or texts or required[0].dtype not in DTYPES.values():
        raise InvalidInput(
            "a body without JSON is one tensor, and the function takes another number of them",
            where=f"header {_NAME}",
            seen="0",
            expected=f"a JSON header that names {', '.join(spec.name for spec in signature.inputs) or 'the inputs'}",
        )
    (spec,) = required
    item = spec.numpy_dtype.itemsize
    sizes: dict[str, int] = {}
    if len(spec.dims) > 1 and signature.batch in spec.dims:
        sizes[str(signature.batch)] = 1
    unknown = [dim for dim in spec.shape if isinstance(dim, str) and dim not in sizes]
    known = math.prod(dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in spec.shape)
    if len(unknown) > 1 or len(data) % (known * item or 1):
        raise _wrong(
            spec.name,
            "cannot be read from its bytes alone",
            f"{len(data)} bytes",
            f"a whole number of {known * item} bytes" if len(unknown) < 2 else "one size that is not known ahead",
            "send JSON before the bytes that says the shape",
        )
    size = len(data) // (known * item or 1)
    shape = [dim if isinstance(dim, int) else sizes.get(dim, size) for dim in spec.shape]
    return {spec.name: decode_raw(spec.name, datatype_of(spec.dtype), shape, memoryview(data))}


def write_binary(
    message: Message, key: str, tensors: Sequence[Message], arrays: Mapping[str, Any]
) -> tuple[bytes, int]:
    """A body and the length of its JSON; tensors without `data` follow as bytes.

    Args:
      message: without its tensors.
      key: of the tensors in it: `inputs` or `outputs`.
      tensors: of which those without `data` are binary.
      arrays: by name.

    Raises:
      InvalidInput: a dtype has no name in the protocol, or the message a text that is not Unicode.
    """
    pieces: list[bytes | memoryview] = [b""]
    for tensor in tensors:
        if "data" not in tensor:
            piece = encode_raw(tensor["name"], arrays[tensor["name"]])
            tensor["parameters"] = {_SIZE: len(piece)}
            pieces.append(piece)
    pieces[0] = write_message({**message, key: tensors})
    return b"".join(pieces), len(pieces[0])


def _wrong(name: str, what: str, seen: str, expected: str, remedy: str | None = None) -> InvalidInput:
    label = short(name)
    return InvalidInput(f"tensor {label!r} {what}", where=label, seen=seen, expected=expected, remedy=remedy)
