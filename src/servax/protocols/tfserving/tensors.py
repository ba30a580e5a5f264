"""`tensorflow.TensorProto` to arrays and back."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import dtype_of
from servax.protocols.tfserving.names import DATA_TYPES
from servax.protocols.wording import short

Array = np.ndarray[Any, Any]

MOST_REPEATED = 64 * 1024 * 1024
"""Bytes that a tensor may have whose elements are repeated to fill its shape: a short message could name any size."""

_MOST_AXES = 64  # NumPy's own limit
_MOST_ELEMENTS = 2**58  # of 16 bytes: NumPy's own limit, which holds for arrays without elements too
_DTYPES = {number: dtype for dtype, (_, number) in DATA_TYPES.items()}
_LAYOUTS = {number: dtype_of(dtype).newbyteorder("<") for number, dtype in _DTYPES.items() if dtype != "string"}
_NUMBERS = {dtype_of(dtype): number for number, dtype in _DTYPES.items() if dtype != "string"}
_STRING, _BOOL = DATA_TYPES["string"][1], DATA_TYPES["bool"][1]

_LISTS = {
    "float32": "float_val",
    "float64": "double_val",
    **dict.fromkeys(("int32", "uint8", "int16", "int8", "uint16", "int4", "uint4"), "int_val"),
    "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
    "int64": "int64_val",
    "bool": "bool_val",
    **dict.fromkeys(("bfloat16", "float16"), "half_val"),
    "uint32": "uint32_val",
    "uint64": "uint64_val",
}
"""The list that holds a tensor's elements where they are no bytes, by dtype."""


def read_tensor(name: str, tensor: Any) -> Array:
    """The array that a `TensorProto` holds; of strings an object array of bytes.

    The array may be a view of the message, and read-only. A list of elements that is shorter than the shape asks for
    goes on with its last element, and is zeros where it is empty, as in TensorFlow.

    Raises:
      InvalidInput: the type is unknown, or the elements do not fit type and shape.
    """
    label = short(name)
    shape = _shape(label, tensor.tensor_shape)
    content: bytes = tensor.tensor_content
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None:
        if tensor.dtype != _STRING:
            raise _unknown(label, tensor.dtype)
        if content:
            raise _wrong(label, "tensor_content", "string_val for DT_STRING")
        return _filled(label, _strings(tensor.string_val), shape)
    if not content:
        return _filled(label, _listed(label, tensor, layout), shape)
    if (size := math.prod(shape) * layout.itemsize) != len(content):
        raise _wrong(
            label,
            f"{len(content)} bytes of tensor_content",
            short(f"{size} for {_type(tensor.dtype)} of shape {list(shape)}"),
        )
    if tensor.dtype == _BOOL and max(content) > 1:
        raise _wrong(label, f"the byte {max(content)}", "0 or 1 for DT_BOOL")
    return np.frombuffer(content, layout).reshape(shape)


def write_tensor(name: str, array: Array, tensor: Any) -> None:
    """Writes an array into an empty `TensorProto`, as bytes.

    Raises:
      InvalidInput: TensorFlow has no type for the dtype.
    """
    number = _NUMBERS.get(array.dtype)
    if number is None:
        raise InvalidInput(
            f"output {name!r} has a dtype that TensorFlow has no type for",
            where=name,
            seen=array.dtype.name,
            expected="one of " + ", ".join(DATA_TYPES),
            remedy="convert it inside the function, or leave it out by output_filter",
        )
    tensor.dtype = number
    shape = tensor.tensor_shape
    shape.SetInParent()  # of a scalar too: it has a shape, without axes
    for size in array.shape:
        shape.dim.add(size=size)
    if sys.byteorder == "big":
        array = array.byteswap()
    tensor.tensor_content = array.tobytes()


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    sizes = tuple([dim.size for dim in shape.dim])
    if shape.unknown_rank:
        raise _wrong(name, "a shape of unknown rank", "the size of every axis")
    if len(sizes) > _MOST_AXES:
        raise _wrong(name, f"{len(sizes)} axes", f"as many as the signature has, at most {_MOST_AXES}")
    if any(size < 0 for size in sizes):
        raise _wrong(name, short(f"shape {list(sizes)}"), "sizes of at least 0")
    if 0 in sizes and math.prod(filter(None, sizes)) > _MOST_ELEMENTS:
        raise _wrong(name, short(f"shape {list(sizes)}"), "a shape that an array can have")
    return sizes


def _listed(name: str, tensor: Any, layout: np.dtype) -> Array:
    """The elements of the typed list, in one row."""
    dtype = layout.name
    field = _LISTS.get(dtype)
    if field is None:  # float8: bytes, but of a field of its own
        return np.frombuffer(tensor.float8_val, layout)
    values = getattr(tensor, field)
    if field == "half_val":
        return _narrowed(name, np.fromiter(values, np.int64, len(values)), np.dtype(np.uint16)).view(layout)
    if field in ("scomplex_val", "dcomplex_val"):
        if len(values) % 2:
            raise _wrong(name, f"{len(values)} parts in {field}", "real and imaginary parts by turns")
        parts = np.float32 if field == "scomplex_val" else np.float64
        return np.fromiter(values, parts, len(values)).view(layout.newbyteorder("="))
    if field == "int_val" and dtype != "int32":
        return _narrowed(name, np.fromiter(values, np.int64, len(values)), layout)
    return np.fromiter(values, layout.newbyteorder("="), len(values))


def _narrowed(name: str, values: Array, dtype: np.dtype) -> Array:
    narrow = values.astype(dtype)
    changed = narrow.astype(values.dtype) != values
    if changed.any():
        raise _wrong(name, f"the value {values[changed][0]}", f"values in the range of {dtype.name}")
    return narrow


def _strings(values: Any) -> Array:
    array = np.empty(len(values), object)
    array[:] = list(values)
    return array


def _filled(name: str, values: Array, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    if len(values) == count:
        return values.reshape(shape)
    if len(values) > count:
        raise _wrong(name, f"{len(values)} elements", short(f"{count} for shape {list(shape)}"))
    if count * values.dtype.itemsize > MOST_REPEATED:
        raise _wrong(
            name,
            short(f"{len(values)} elements for shape {list(shape)}"),
            f"at most {MOST_REPEATED} bytes that are filled up with the last element; send tensor_content",
        )
    whole = np.empty(count, values.dtype)
    whole[: len(values)] = values
    whole[len(values) :] = values[-1] if len(values) else (b"" if values.dtype == object else 0)
    return whole.reshape(shape)


def _type(number: int) -> str:
    dtype = _DTYPES.get(number)
    return f"type {number}" if dtype is None else DATA_TYPES[dtype][0]


def _unknown(name: str, number: int) -> InvalidInput:
    return InvalidInput(
        f"input {name!r} has a type that is not known here" if number else f"input {name!r} has no type",
        where=name,
        seen=f"dtype {number}",
        expected="one of " + ", ".join(data_type for data_type, _ in DATA_TYPES.values()),
    )


def _wrong(name: str, seen: str, expected: str) -> InvalidInput:
    return InvalidInput(f"input {name!r} is no tensor of its type and shape", where=name, seen=seen, expected=expected)
