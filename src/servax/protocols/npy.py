"""Arrays as NumPy's `.npy` format has them (NEP 1), in bodies of HTTP; nothing is unpickled."""

from __future__ import annotations

import functools
import io
import math
from tokenize import TokenError
from typing import Any

import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import TensorSpec
from servax.protocols.bodies import Body
from servax.protocols.wording import short

CONTENT_TYPE = b"application/x-npy"

_LONGEST_HEADER = 4096
_VERSIONS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BAD = (ValueError, TypeError, KeyError, SyntaxError, TokenError, OverflowError, RecursionError, MemoryError)


def read_npy(spec: TensorSpec, body: Body) -> np.ndarray[Any, Any]:
    """The array of a body, a view of it; text becomes an object array of str.

    bfloat16 and float8, which NumPy writes as bytes without a type, are taken by the spec's dtype.

    Raises:
      InvalidInput: this is not an `.npy` file, holds Python objects, or is not as long as its header says.
    """
    try:
        length = _header_length(body)
        shape, fortran, dtype = _header(bytes(body[:length]))
    except _BAD as error:
        raise _wrong(spec, short(str(error).partition("\n")[0]) or type(error).__name__, "an .npy file") from None
    wanted = spec.numpy_dtype
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None and wanted.kind == "V":
        dtype = wanted if dtype.itemsize == wanted.itemsize else dtype
    if not dtype.itemsize or dtype.hasobject or dtype.names is not None or (dtype.kind == "V" and dtype != wanted):
        raise _wrong(spec, f"dtype {short(str(dtype))}", f"{spec.text()}: numbers, booleans or text")
    if dtype.kind in "SU" and wanted.kind != "O":  # unpacked, text takes many times the room
        raise _wrong(spec, f"dtype {short(str(dtype))}", spec.text())
    data = memoryview(body)[length:]
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise _wrong(
            spec,
            f"{len(data)} bytes after the header",
            short(f"{math.prod(shape) * dtype.itemsize} for {dtype} of shape {list(shape)}"),
        )
    try:
        array = np.frombuffer(data, dtype) if len(data) else np.empty(math.prod(shape), dtype)
        array = array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
        if array.dtype.kind in "SU":
            return array.astype(str).astype(object)
    except _BAD as error:
        raise _wrong(spec, short(str(error)), "a shape that an array can have, and text of ASCII or Unicode") from None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _header_length(body: Body) -> int:
    """Bytes before the array: magic, version, a length of two or four bytes, and the header of that length."""
    wide = 4 if body[6:7] == b"\x02" else 2
    length = 8 + wide + int.from_bytes(body[8 : 8 + wide], "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes, or no magic string of NumPy's")
    return length


@functools.lru_cache(maxsize=64)
def _header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype; remembered, as a client's arrays are often alike and NumPy parses Python here."""
    start = io.BytesIO(head)
    read = _VERSIONS[np.lib.format.read_magic(start)]
    return read(start, max_header_size=_LONGEST_HEADER)


def write_npy(array: np.ndarray[Any, Any]) -> bytes:
    """An array as the bytes of an `.npy` file; objects as text."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array.astype(str) if array.dtype.kind == "O" else array, allow_pickle=False)
    return out.getvalue()


def _wrong(spec: TensorSpec, seen: str, expected: str) -> InvalidInput:
    return InvalidInput(
        f"tensor {spec.name!r} cannot be read from the body", where=spec.name, seen=seen, expected=expected
    )
