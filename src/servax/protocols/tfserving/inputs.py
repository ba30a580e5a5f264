"""Inputs in the JSON of TensorFlow Serving's REST API: nested lists, their dtype and rank those of the signature.

`instances` hold a value for each row (row format), `inputs` a value for each tensor (columnar). Bytes travel as
`{"b64": ...}`; NaN and infinities as bare words, which strict JSON lacks.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import struct
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, cast

import ml_dtypes
import msgspec
import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.tfserving.names import input_name
from servax.protocols.wording import short
from servax.stages.conversion import numpy_dtype
from servax.stages.padding import SEED

Array = np.ndarray[Any, Any]

_BYTES = "b64"
_KINDS = {"integer": int, "float": float, "bool": bool}
_CODES = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}
"""Of `struct`, by dtype."""

_NON_FINITE = (b"NaN", b"Infinity")


def read(body: bytes | bytearray) -> Any:
    """The value that a JSON text holds, bare NaN and Infinity included.

    Raises:
      InvalidInput: it is not JSON.
    """
    try:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            if not any(word in body for word in _NON_FINITE):
                raise
            return json.loads(body)
    except RecursionError:
        raise InvalidInput(
            "the body is nested too deeply",
            where="the body",
            seen="lists or objects in one another, deeper than can be read",
            expected="values nested as deep as the tensor has axes",
        ) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(
            "the body is not JSON", where="the body", seen=short(str(error)) if body else "an empty body"
        ) from None


def from_instances(instances: Any, signature: Signature, texts: Mapping[str, str]) -> dict[str, Array | list[Any]]:
    """The tensors of a request in row format.

    Args:
      instances: a value for each row; an object of values by name where there are several tensors.
      signature: of the function.
      texts: text tensors, each with the input it is turned into.

    Raises:
      InvalidInput: names the tensor, what was seen and what is expected.
    """
    if not isinstance(instances, list) or not instances:
        raise InvalidInput(
            "`instances` is no list of rows",
            where="instances",
            seen=_shown(instances) if not isinstance(instances, list) else "an empty list",
            expected="a list with a value for each row",
        )
    rows = cast("list[Any]", instances)
    if not _is_named(rows[0]):
        if any(map(_is_named, rows)):
            raise _mixed("objects among plain values")
        return {name: _column(name, rows, signature, texts) for name in [_only(rows, signature, texts, "instances")]}
    names = list(rows[0])
    if any(not _is_named(row) for row in rows):
        raise _mixed("plain values among objects")
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise InvalidInput(
                "rows of `instances` do not name the same tensors",
                where=f"instances[{index}]",
                seen=_list(row),
                expected=_list(names),
            )
    return _columns({name: [row[name] for row in rows] for name in names}, signature, texts)


def from_inputs(inputs: Any, signature: Signature, texts: Mapping[str, str]) -> dict[str, Array | list[Any]]:
    """The tensors of a request in columnar format; as `from_instances`.

    Args:
      inputs: the tensor, or an object of tensors by name.
      signature: of the function.
      texts: text tensors, each with the input it is turned into.
    """
    if _is_named(inputs):
        return _columns(inputs, signature, texts)
    name = _only(inputs, signature, texts, "inputs")
    return {name: _column(name, inputs, signature, texts)}


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not _is_bytes(value)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get(_BYTES), str)


def _mixed(seen: str) -> InvalidInput:
    return InvalidInput(
        "`instances` mixes plain values and objects",
        where="instances",
        seen=seen,
        expected="a value for each row, or an object for each row",
    )


def _only(value: Any, signature: Signature, texts: Mapping[str, str], where: str) -> str:
    """The tensor that a value without a name is for: the one that every request must carry, or its text."""
    needed = [
        spec.name
        for spec in signature.inputs
        if spec.required and spec.name not in signature.lengths and spec.name != SEED
    ]
    if len(needed) != 1 and len(signature.inputs) == 1:
        needed = [signature.inputs[0].name]
    if len(needed) != 1:
        raise InvalidInput(
            f"`{where}` holds values without names, but the function takes several tensors",
            where=where,
            seen="plain values",
            expected="an object with " + ", ".join(spec.name for spec in signature.inputs),
        )
    if texts and isinstance(next(_leaves(value), None), str | dict):
        return next((text for text, turned_into in texts.items() if turned_into == needed[0]), needed[0])
    return needed[0]


def _columns(values: Mapping[str, Any], signature: Signature, texts: Mapping[str, str]) -> dict[str, Array | list[Any]]:
    tensors: dict[str, Array | list[Any]] = {}
    for sent, value in values.items():
        name = input_name(sent, signature, texts)
        if name in tensors:
            raise InvalidInput(f"input {name!r} was sent twice", where=name, seen=f"{sent} as well", expected="one")
        tensors[name] = _column(name, value, signature, texts)
    return tensors


def _column(name: str, value: Any, signature: Signature, texts: Mapping[str, str]) -> Array | list[Any]:
    return _texts(name, value) if name in texts else array_of(signature.input(name), value)


def array_of(spec: TensorSpec, value: Any) -> Array:
    """The array that nested lists hold, in the spec's dtype and rank.

    Integers are taken for floats, which are rounded to the spec's precision; nothing else is converted.

    Raises:
      InvalidInput: names the tensor, what was seen and what is expected.
    """
    dtype = numpy_dtype(spec.dtype)
    kind = _kind(dtype)
    if kind is None:
        raise _wrong(
            spec, _shown(next(_leaves(value), value)), "a tensor without a form in TensorFlow Serving's JSON; use gRPC"
        )
    try:
        checked = msgspec.convert(value, _nested(kind, len(spec.shape)))
    except msgspec.ValidationError as error:
        raise _misfit(spec, value, str(error)) from None
    except RecursionError:
        raise _wrong(spec, "lists in lists, deeper than can be read", _expected(spec)) from None
    shape, values = _flattened(spec, checked)
    return _array(spec, values, dtype).reshape(shape)


def _kind(dtype: np.dtype) -> str | None:
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu" or dtype.name in ("int4", "uint4"):
        return "integer"
    return "float" if dtype.kind == "f" or "float" in dtype.name else None


@functools.cache
def _nested(kind: str, rank: int) -> Any:
    return _KINDS[kind] if rank == 0 else list[_nested(kind, rank - 1)]


def _flattened(spec: TensorSpec, nested: Any) -> tuple[list[int], list[Any]]:
    """The shape of nested lists, and their values in row-major order."""
    shape: list[int] = []
    values: list[Any] = [nested]
    for axis in range(len(spec.shape)):
        lengths = {len(row) for row in values}
        if len(lengths) > 1:
            seen = ", ".join(map(str, sorted(lengths)[:8]))
            raise _wrong(spec, f"rows of {seen} values at axis {axis}", f"{_expected(spec)}: rows of one length")
        shape += lengths
        values = values[0] if len(values) == 1 else list(chain.from_iterable(values))
        if not values:
            raise _wrong(spec, "no values", _expected(spec))
    return shape, values


def _array(spec: TensorSpec, values: list[Any], dtype: np.dtype) -> Array:
    """The values in memory; packing them is several times as fast as `np.array`."""
    code = _CODES.get(dtype.name)
    if code is not None:
        try:
            return np.frombuffer(struct.pack(f"={len(values)}{code}", *values), dtype)
        except (struct.error, OverflowError):
            raise _out_of_range(spec, values, dtype) from None
    try:
        wide = np.array(values, np.int64 if "int" in dtype.name else np.float64)
    except OverflowError:
        raise _out_of_range(spec, values, dtype) from None
    with np.errstate(over="ignore", invalid="ignore"):
        array = wide.astype(dtype)
    if wide.dtype == np.int64 and (array.astype(np.int64) != wide).any():
        raise _out_of_range(spec, values, dtype)
    if wide.dtype == np.float64 and (np.isfinite(wide) & ~np.isfinite(array)).any():
        raise _out_of_range(spec, values, dtype)
    return array


def _out_of_range(spec: TensorSpec, values: list[Any], dtype: np.dtype) -> InvalidInput:
    if _kind(dtype) == "float":
        limit = float(ml_dtypes.finfo(dtype).max)
        wrong = max(filter(math.isfinite, values), key=abs)
        return _wrong(spec, str(wrong), f"{_expected(spec)}: values from {-limit:g} to {limit:g}")
    limits = ml_dtypes.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    wrong = next(value for value in values if not low <= value <= high)
    return _wrong(
        spec,
        short(str(wrong)) if abs(wrong) < 10**100 else "a huge integer",
        f"{_expected(spec)}: values from {low} to {high}",
    )


def _misfit(spec: TensorSpec, value: Any, message: str) -> InvalidInput:
    """What `msgspec` has found, in the words of tensors."""
    _, _, place = message.partition(" - at `$")
    seen = value
    indices = [int(index) for index in place.rstrip("`").strip("[]").split("][") if index.isdigit()]
    for index in indices:
        seen = seen[index]
    where = "".join(f"[{index}]" for index in indices)
    axes = (
        "a list"
        if len(indices) < len(spec.shape)
        else {"float": "a number", "integer": "an integer", "bool": "true or false"}[
            _kind(numpy_dtype(spec.dtype)) or "float"
        ]
    )
    return _wrong(spec, _shown(seen), f"{axes} there, for {_expected(spec)}", where)


def _wrong(spec: TensorSpec, seen: str, expected: str, place: str = "") -> InvalidInput:
    return InvalidInput(
        f"input {spec.name!r} does not fit its signature", where=f"{spec.name}{place}", seen=seen, expected=expected
    )


def _expected(spec: TensorSpec) -> str:
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"


def _texts(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _no_texts(name, _shown(value))
    return [_text(f"{name}[{index}]", item) for index, item in enumerate(cast("list[Any]", value))]


def _text(where: str, item: Any) -> str | bytes:
    if isinstance(item, str):
        return item
    if not _is_bytes(item):
        raise _no_texts(where, _shown(item))
    encoded: str = item[_BYTES]
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(
            "bytes are not in base64", where=where, seen=short(str(error)), expected='{"b64": "..."}, standard alphabet'
        ) from None


def _no_texts(where: str, seen: str) -> InvalidInput:
    return InvalidInput(
        "a text tensor holds something else",
        where=where,
        seen=seen,
        expected='string[batch]: a list of strings, or of {"b64": "..."}',
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Values that are no lists, the first of them without looking at the rest; no deeper than an array goes."""
    stack: list[Iterator[Any]] = [iter([value])]
    while stack:
        item = next(stack[-1], stack)
        if item is stack:
            stack.pop()
        elif isinstance(item, list):
            stack.append(iter(cast("list[Any]", item)))
        else:
            yield item


def _shown(value: Any) -> str:
    """A JSON value in short; lists and objects by their kind, as they may be nested without end."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "bytes" if _is_bytes(value) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return short(repr(value), 60) if not isinstance(value, int) or abs(value) < 10**60 else "a huge integer"


def _list(names: Any) -> str:
    return short(", ".join(map(short, list(names)[:16])), 300) or "none"
