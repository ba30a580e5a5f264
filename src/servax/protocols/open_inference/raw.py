"""Tensors of the Open Inference Protocol as bytes: of the binary extension in HTTP, and of `raw_*_contents` in gRPC.

Numbers are little-endian and in row-major order. Each string is its length, four bytes, and then its UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import dtype_of
from servax.protocols.open_inference.codec import DTYPES, check_shape, no_shape, require_known
from servax.protocols.wording import short

_LAYOUTS = {datatype: dtype_of(dtype).newbyteorder("<") for datatype, dtype in DTYPES.items() if datatype != "BYTES"}
_DTYPES = frozenset(_LAYOUTS.values())
_LENGTH = 4
"""Bytes of a string's length."""
_SMALL = 1 << 14
"""Bytes up to which a copy costs less than a view."""


def decode_raw(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> np.ndarray[Any, Any]:
    """The array that raw bytes hold: a read-only view of them for numbers, an object array of str for text.

    Args:
      name: of the tensor, for errors.
      datatype: as sent.
      shape: as sent.
      data: the bytes of this tensor alone.

    Raises:
      InvalidInput: the datatype is unknown, or the bytes do not fit datatype and shape.
    """
    layout = _LAYOUTS.get(datatype)
    if layout is None:
        return _decode_text(short(name), datatype, shape, data)
    if (size := math.prod(shape) * layout.itemsize) != len(data) or size <= 0:
        label = short(name)
        check_shape(label, shape)
        if size != len(data):
            raise InvalidInput(
                f"tensor {label!r} has the wrong number of bytes",
                where=label,
                seen=f"{len(data)} bytes",
                expected=short(f"{size} for {datatype} of shape {list(shape)}"),
            )
    array: np.ndarray[Any, Any] = np.frombuffer(data, layout)
    if datatype == "BOOL" and len(data) and array.view(np.uint8).max() > 1:
        label = short(name)
        raise InvalidInput(
            f"tensor {label!r} holds a byte that is neither true nor false",
            where=label,
            seen=str(array.view(np.uint8).max()),
            expected="0 or 1 for BOOL",
        )
    return _shaped(name, array, shape)


def encode_raw(name: str, array: np.ndarray[Any, Any]) -> memoryview | bytes:
    """The bytes of an array, without a copy where it is large and contiguous.

    Raises:
      InvalidInput: the dtype has no name in the protocol.
    """
    if array.dtype.kind in "OUS":
        return b"".join(map(_text, array.ravel().tolist()))
    if array.dtype not in _DTYPES:
        native = array.dtype.newbyteorder("<")
        if native not in _DTYPES:
            require_known(name, array.dtype.name)
        array = array.astype(native)
    if array.nbytes <= _SMALL:
        return array.tobytes()
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _decode_text(label: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> np.ndarray[Any, Any]:
    require_known(label, datatype)
    check_shape(label, shape)
    count = math.prod(shape)
    values: list[str] = []
    view, place = memoryview(data), 0
    while place < len(view):
        begins = place + _LENGTH
        ends = begins + int.from_bytes(view[place:begins], "little")
        if begins > len(view) or ends > len(view):
            raise InvalidInput(
                f"the strings of tensor {label!r} end too early",
                where=label,
                seen=f"{len(view) - place} bytes for string {len(values)}",
                expected="four bytes of length, and as many bytes of text",
            )
        try:
            values.append(str(view[begins:ends], "utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"string {len(values)} of tensor {label!r} is not UTF-8",
                where=label,
                seen=error.reason,
                expected="UTF-8",
            ) from None
        place = ends
        if len(values) > count:
            break
    if len(values) != count:
        raise InvalidInput(
            f"tensor {label!r} has the wrong number of strings",
            where=label,
            seen=f"more than {count}" if len(values) > count else f"{len(values)} strings",
            expected=short(f"{count} for shape {list(shape)}"),
        )
    array = np.empty(count, object)
    array[:] = values
    return _shaped(label, array, shape)


def _shaped(name: str, array: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    try:
        return array.reshape(shape)
    except ValueError:
        check_shape(short(name), shape)
        raise no_shape(short(name), shape, "sizes of an array that can be addressed") from None


def _text(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode()
    return len(data).to_bytes(_LENGTH, "little") + data
