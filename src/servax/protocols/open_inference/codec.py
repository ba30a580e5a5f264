"""Tensors of the Open Inference Protocol (KServe V2) as lists of values: datatype names, `data` -> NumPy and back.

Flat (row-major) and nested `data` are both read. JSON has no NaN and no infinities: they are written, and read, as
the strings "NaN", "Infinity" and "-Infinity", as Protocol Buffers' JSON mapping has them.

Flat numbers in JSON go straight into memory (simdjson). Others go from text to Python's list in one pass and from the
list to memory in another (`struct`), both several times faster than NumPy's own ways. Either way floats are rounded
once, from float64.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import dtype_of
from servax.protocols.wording import short

try:
    import simdjson
except ImportError:  # there is no wheel for this Python
    simdjson = None

DATATYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
}
"""dtype -> datatype, for the dtypes that the protocol has a name for."""

DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_BY_DTYPE = {dtype_of(dtype): datatype for dtype, datatype in DATATYPES.items()}
"""The same by NumPy's dtype, whose name takes microseconds."""

_NOT_IN_JSON = {"FP16", "BF16"}
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON has no form for, by the strings they travel as."""

_KINDS: dict[str, Any] = {"b": bool, "i": int, "u": int, "f": float, "O": str}
_NUMPY = {datatype: dtype_of(dtype) for datatype, dtype in DTYPES.items()}
_KIND = {datatype: "f" if datatype == "BF16" else dtype.kind for datatype, dtype in _NUMPY.items()}
_CODES = {
    "BOOL": "?",
    **{
        f"{sign}INT{bits}": code
        for sign, codes in (("", "bhiq"), ("U", "BHIQ"))
        for bits, code in zip((8, 16, 32, 64), codes, strict=True)
    },
    "FP32": "f",
    "FP64": "d",
}
"""`struct`'s letter by datatype."""
_BUFFERS = {"f": ("d", np.float64), "i": ("i", np.int64), "u": ("u", np.uint64)}
"""By kind of a dtype, how simdjson names the numbers it reads and their dtype."""
_parsers = threading.local()
"""A parser for each thread: its memory is used again."""
_PIECE = 1 << 20
"""Bytes of JSON that are read at once: a list of numbers takes up to sixteen times the room of its text."""
_MOST_AXES = 64  # NumPy's own limit
_MOST_SIZE = 2**63 - 1
_TYPES: dict[str, type | tuple[type, ...]] = {"b": bool, "i": int, "u": int, "f": (int, float), "O": str}
_NAMES = {"b": "true or false", "i": "integers", "u": "integers", "f": "numbers", "O": "strings"}


class Notation:
    """How lists of values are written: JSON or MessagePack, by msgspec's decoder of it."""

    def __init__(self, decoder: Callable[[Any], Any]) -> None:
        self._decoder = decoder
        self.any = decoder(Any)
        self.flat = {kind: decoder(list[each]) for kind, each in _KINDS.items()}
        self._nested: dict[tuple[Any, int], Any] = {}

    def nested(self, kind: Any, axes: int) -> Any:
        """The decoder of values of a Python type, in lists that are `axes` deep."""
        if (kind, axes) not in self._nested:
            each = kind
            for _ in range(axes):
                each = list[each]
            self._nested[kind, axes] = self._decoder(each)
        return self._nested[kind, axes]


JSON = Notation(msgspec.json.Decoder)
MSGPACK = Notation(msgspec.msgpack.Decoder)


def datatype_of(dtype: str) -> str:
    """The datatype of a dtype's name; the dtype's own name where the protocol has none."""
    return DATATYPES.get(dtype, dtype)


def datatype_of_array(array: np.ndarray[Any, Any]) -> str:
    """The datatype of an array; BYTES for text."""
    datatype = _BY_DTYPE.get(array.dtype)
    if datatype is not None:
        return datatype
    return "BYTES" if array.dtype.kind in "OUS" else datatype_of(array.dtype.name)


def decode(
    name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview, notation: Notation = JSON
) -> np.ndarray[Any, Any]:
    """The array that a tensor's `data` hold; text becomes an object array of str.

    Args:
      name: of the tensor, for errors.
      datatype: as sent.
      shape: as sent.
      data: the text of `data`, a list.
      notation: of the text.

    Raises:
      InvalidInput: the datatype is unknown or does not travel in JSON, or the data do not fit datatype and shape.
    """
    label = short(name)
    require_known(label, datatype)
    if notation is JSON:
        require_json(label, datatype)
    dtype = _NUMPY[datatype]
    check_shape(label, shape)
    count = math.prod(shape)
    if len(data) > _PIECE and notation is JSON and dtype.kind != "O":
        data = bytes(data)
        _require_count(label, data, count, shape)
        if (array := _piecewise(label, datatype, data, dtype, count)) is not None:
            return _shaped(label, array, shape)
    elif notation is JSON and (array := _numbers(data, dtype)) is not None:
        return _shaped(label, array, shape)
    return _shaped(label, _array(label, _values(label, data, datatype, shape, notation), dtype, datatype), shape)


def encode(name: str, array: np.ndarray[Any, Any]) -> list[Any]:
    """The flat `data` of an array, in row-major order.

    Raises:
      InvalidInput: the dtype does not travel in JSON.
    """
    require_json(name, datatype_of_array(array))
    values: list[Any] = array.ravel().tolist()
    if array.dtype.kind == "f" and not math.isfinite(sum(values)):  # the cheapest way to find that all of them are
        return [jsonable(value) for value in values]
    if array.dtype.kind in "OUS":
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    return values


def jsonable(value: float) -> float | str:
    """A number as JSON takes it: NaN and infinities as strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def travels(datatype: str) -> bool:
    """Whether a datatype has a form in the protocol's JSON."""
    return datatype in DTYPES and datatype not in _NOT_IN_JSON


def require_known(name: str, datatype: str) -> None:
    """Raises InvalidInput where the protocol has no such datatype."""
    if datatype not in DTYPES:
        raise InvalidInput(
            f"tensor {name!r} has an unknown datatype",
            where=name,
            seen=short(datatype),
            expected="one of " + ", ".join(DTYPES),
        )


def require_json(name: str, datatype: str) -> None:
    """Raises InvalidInput where a datatype does not travel in JSON, saying what to do."""
    if datatype in _NOT_IN_JSON:
        raise InvalidInput(
            f"tensor {name!r} is {datatype}, which the Open Inference Protocol does not carry in JSON",
            where=name,
            seen=datatype,
            expected="FP32 or another datatype with a JSON form",
            remedy="cast it inside the function (`x.astype(jnp.float32)`), or ask for other tensors by `outputs`",
        )
    if datatype not in DTYPES:
        raise InvalidInput(
            f"tensor {name!r} has a dtype that the Open Inference Protocol has no name for",
            where=name,
            seen=datatype,
            expected="one of " + ", ".join(DATATYPES),
            remedy="convert it inside the function",
        )


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raises InvalidInput where no array has such a shape: too many axes, a negative size or one beyond 2**63 - 1."""
    if len(shape) > _MOST_AXES:
        raise InvalidInput(
            f"tensor {name!r} has too many axes",
            where=name,
            seen=f"{len(shape)} axes",
            expected=f"as many as the model's metadata says, at most {_MOST_AXES}",
        )
    if min(shape, default=0) < 0:
        raise InvalidInput(
            f"tensor {name!r} has a negative size",
            where=name,
            seen=short(f"shape {list(shape)}"),
            expected="sizes of at least 0",
        )
    if max(shape, default=0) > _MOST_SIZE:
        raise no_shape(name, shape, f"sizes of at most {_MOST_SIZE}")


def no_shape(name: str, shape: Sequence[int], expected: str) -> InvalidInput:
    """The error for a shape that cannot be addressed."""
    return InvalidInput(
        f"tensor {name!r} has a shape that no array has",
        where=name,
        seen=short(f"shape {list(shape)}"),
        expected=expected,
    )


def _values(name: str, data: bytes | memoryview, datatype: str, shape: Sequence[int], notation: Notation) -> list[Any]:
    """The values in row-major order, each of the datatype's kind."""
    kind = _KIND[datatype]
    try:
        try:
            return notation.flat[kind].decode(data)
        except msgspec.ValidationError:
            return _nested_values(name, data, datatype, shape, notation)
    except RecursionError:
        raise InvalidInput(
            f"the data of tensor {name!r} are nested too deeply",
            where=name,
            seen="lists in lists, deeper than can be read",
            expected=f"lists nested {len(shape)} deep, or flat data",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # beyond every datatype, or text that is not Unicode
        what, _, place = str(error).partition(" - at `$")
        raise InvalidInput(
            f"the data of tensor {name!r} cannot be read",
            where=name,
            seen=f"{what} at {place.rstrip('`')}" if place else what,
            expected=f"{datatype}: {_NAMES[kind]}",
        ) from None


def _nested_values(
    name: str, data: bytes | memoryview, datatype: str, shape: Sequence[int], notation: Notation
) -> list[Any]:
    kind, axes = _KIND[datatype], max(1, len(shape))
    try:
        return _flattened(name, notation.nested(_KINDS[kind], axes).decode(data), shape)
    except msgspec.ValidationError as error:
        for depth in (axes, 1) if kind == "f" else ():
            with contextlib.suppress(msgspec.ValidationError):
                items = _flattened(name, notation.nested(float | str, depth).decode(data), shape)
                break
        else:
            if len(data) > _PIECE:  # whatever they hold is not worth the room it takes: its place has to do
                raise error
            items = _flattened(name, notation.any.decode(data), shape)
    return [_value(name, item, kind, datatype) for item in items]


def _numbers(data: bytes | memoryview, dtype: np.dtype) -> np.ndarray[Any, Any] | None:
    """Flat numbers of a dtype, straight from their text; None where the text holds anything else, or cannot be read.

    What is wrong with it is found, and told, by the slower way.
    """
    kind = _BUFFERS.get(dtype.kind)
    text = bytes(data)
    if simdjson is None or kind is None or text.find(b"[", 1) >= 0:  # its buffers flatten lists without a look
        return None
    parser: Any = getattr(_parsers, "parser", None)
    if parser is None:
        parser = _parsers.parser = simdjson.Parser()
    try:
        values: Any = parser.parse(text)
        wide = np.frombuffer(values.as_buffer(of_type=kind[0]), kind[1])
        with np.errstate(over="raise"):
            narrow = wide.astype(dtype)
    except (ValueError, TypeError, AttributeError, RuntimeError, FloatingPointError):
        return None
    return narrow if dtype.kind == "f" or np.array_equal(narrow, wide) else None


def _require_count(name: str, data: bytes, count: int, shape: Sequence[int]) -> None:
    """Raises InvalidInput where long data hold another number of values or lists than the shape says.

    Counting costs no memory, reading does: numbers as short as `1,` take sixteen times the room.
    """
    values = data.count(b",") + 1
    lists, size = 1, 1
    for each in shape[:-1]:
        size *= each
        lists += size
    if values != count or data.count(b"[") > lists or b"{" in data:
        raise _wrong_count(name, f"{values} values in {data.count(b'[')} lists", count, shape)


def _piecewise(name: str, datatype: str, data: bytes, dtype: np.dtype, count: int) -> np.ndarray[Any, Any] | None:
    """The array of long flat data, read piece by piece; None where they are nested or hold no mere numbers."""
    array = np.empty(count, dtype)
    decoder = JSON.flat[dtype.kind]
    begin, end = data.find(b"[") + 1, data.rfind(b"]")
    place = 0
    while begin < end:
        stop = end if end - begin <= _PIECE else data.rfind(b",", begin, begin + _PIECE)
        if stop < 0:
            return None
        try:
            values = decoder.decode(b"[" + data[begin:stop] + b"]")
        except msgspec.DecodeError:
            return None
        if place + len(values) > count:
            return None
        array[place : place + len(values)] = _array(name, values, dtype, datatype)
        place += len(values)
        begin = stop + 1
    return array if place == count else None


def _flattened(name: str, value: Any, shape: Sequence[int]) -> list[Any]:
    """Values in row-major order of data that are nested as the shape says, or flat."""
    if not isinstance(value, list):
        raise InvalidInput(
            f"the data of tensor {name!r} are not a list", where=name, seen=type(value).__name__, expected="a list"
        )
    rows: list[Any] = [value]
    if not any(isinstance(item, list) for item in value):
        return value
    for axis, size in enumerate(shape):
        if wrong := sorted({len(row) if isinstance(row, list) else 0 for row in rows} - {size}):
            raise InvalidInput(
                f"the data of tensor {name!r} are not nested as its shape says",
                where=name,
                seen=f"{', '.join(map(str, wrong[:8]))} values at axis {axis}",
                expected=short(f"{size} for shape {list(shape)}") + ", or flat data",
            )
        rows = list(chain.from_iterable(rows))
    return rows


def _value(name: str, item: Any, kind: str, datatype: str) -> Any:
    if kind == "f" and isinstance(item, str) and item in NON_FINITE:
        return NON_FINITE[item]
    if isinstance(item, _TYPES[kind]) and (kind == "b" or not isinstance(item, bool)):
        return item
    raise InvalidInput(
        f"tensor {name!r} holds a value that is not of its datatype",
        where=name,
        seen=_shown(item),
        expected=f"{datatype}: {_NAMES[kind]}",
    )


def _shown(item: Any) -> str:
    """A JSON value in short; lists and objects by their kind, as they may be nested without end."""
    if isinstance(item, list | dict):
        return "a list" if isinstance(item, list) else "an object"
    return "null" if item is None else short(repr(item))


def _array(name: str, values: list[Any], dtype: np.dtype, datatype: str) -> np.ndarray[Any, Any]:
    """The values in memory; they are of the dtype's kind."""
    if dtype.kind == "O":
        array = np.empty(len(values), object)
        array[:] = values
        return array
    try:
        if (code := _CODES.get(datatype)) is not None:
            return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype)
        with np.errstate(over="raise"):
            wide = np.array(values, np.float32)
            array = wide.astype(dtype)
        if (np.isinf(array) & ~np.isinf(wide)).any():  # bfloat16 raises nothing
            raise OverflowError
        return array
    except (struct.error, OverflowError, FloatingPointError):
        raise InvalidInput(
            f"tensor {name!r} holds a value out of the range of its datatype",
            where=name,
            seen=short(str(_out_of_range(values, dtype))),
            expected=datatype,
        ) from None


def _shaped(name: str, array: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    if array.size != (count := math.prod(shape)):
        raise _wrong_count(name, f"{array.size} values", count, shape)
    try:
        return array.reshape(shape)
    except ValueError:
        raise no_shape(name, shape, "sizes of an array that can be addressed") from None


def _wrong_count(name: str, seen: str, count: int, shape: Sequence[int]) -> InvalidInput:
    return InvalidInput(
        f"tensor {name!r} has the wrong number of values",
        where=name,
        seen=seen,
        expected=short(f"{count} for shape {list(shape)}"),
    )


def _out_of_range(values: list[Any], dtype: np.dtype) -> Any:
    """The first value that the dtype does not hold."""
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    else:
        high = int(float(ml_dtypes.finfo(dtype).max))  # exact: the largest float is a whole number
        low = -high
    return next(value for value in values if (value < low or value > high) and abs(value) != math.inf)
