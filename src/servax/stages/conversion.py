"""Values of a request -> NumPy arrays of a tensor's dtype: strict, lossless, without a copy where none is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import TensorSpec, dtype_of

Array = np.ndarray[Any, Any]

_PYTHON = (list, tuple, bool, int, float, complex, str)


class Fault(Exception):
    """One thing wrong with one tensor of a request; `padding.check` collects them into one error."""

    def __init__(self, tensor: str, seen: str, expected: str, remedy: str | None = None) -> None:
        super().__init__(f"{tensor}: {seen}")
        self.tensor = tensor
        self.seen = seen
        self.expected = expected
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different length along one axis.

    Attributes:
      flat: the rows joined along that axis, which is moved to the front: `[sum of lengths, ...]`.
      lengths: of each row, `int32[rows]`.
      axis: of the tensor, rows counted as axis 0, so at least 1.
    """

    flat: Array
    lengths: Array
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds all rows, each filled up to the longest."""
        rest = list(self.flat.shape[1:])
        rest.insert(self.axis - 1, int(self.lengths.max()))
        return (len(self.lengths), *rest)


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor of the spec's dtype and rank; `owned` says that no one else holds its memory."""

    value: Array | Ragged
    owned: bool


def convert(value: Any, spec: TensorSpec) -> Converted:
    """The value as an array, or as ragged rows, of the spec's dtype and rank; named dimensions are not looked at.

    Integers are taken into another integer dtype when all of them are in its range, floats into another float dtype
    when no bit is lost. Values that came as Python lists have no dtype of their own: there floats are rounded, and
    integers are taken for floats. A bool is never a number. (A list that mixes both is what NumPy makes of it:
    numbers.)

    Raises:
      Fault: the value cannot be taken as such a tensor.
    """
    rows = _rows(value)
    if rows is None:
        array = _array(value, spec)
        python = isinstance(value, _PYTHON)
    elif (ragged := _ragged(rows, spec)) is not None:
        flat, _ = _cast(ragged.flat, spec, python=isinstance(rows[0], _PYTHON))
        return Converted(Ragged(flat, ragged.lengths, ragged.axis), owned=True)
    else:
        array = _array(rows, spec)
        python = not rows or isinstance(rows[0], _PYTHON)
    if array.ndim != len(spec.shape) and not (array.size == 0 and python):
        remedy = None
        if array.ndim == len(spec.shape) - 1:
            remedy = f"a single row still needs its axis {spec.shape[0]!r}: {spec.name}[None]"
        raise Fault(
            spec.name, f"{described(array)}, {array.ndim} axes", f"{spec.text()}, {len(spec.shape)} axes", remedy
        )
    if array.ndim != len(spec.shape):
        raise Fault(spec.name, "no rows", spec.text())
    array, cast = _cast(array, spec, python=python)
    return Converted(array, owned=cast or rows is not None or python)


def check_unicode(name: str, texts: Iterable[str]) -> None:
    """Refuses texts that are not Unicode: half of a surrogate pair, which neither UTF-8 nor a tokenizer takes.

    Raises:
      InvalidInput: names every such text, by its index in row-major order.
    """
    faults: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            faults.append((index, f"U+{ord(text[error.start]):04X} at character {error.start}"))
    if faults:
        rest = "" if len(faults) <= 8 else f", and {len(faults) - 8} more"
        raise InvalidInput(
            f"tensor {name!r} holds text that is not Unicode",
            where=", ".join(f"{name}[{index}]" for index, _ in faults[:8]) + rest,
            seen=", ".join(dict.fromkeys(seen for _, seen in faults[:8])),
            expected="text that has a form in UTF-8: no half of a surrogate pair",
        )


def described(array: Array) -> str:
    """An array's dtype and shape as a spec is written: `float64[2, 3]`."""
    name = array.dtype.name
    if _family(array.dtype) == "string" and all(isinstance(item, str) for item in array.flat[:1]):
        name = "string"
    return f"{name}[{', '.join(map(str, array.shape))}]"


def _rows(value: Any) -> Sequence[Any] | None:
    """The value's rows where it is a sequence of them rather than one array."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1 and value.size:
        return None if isinstance(value[0], str) else list(value)
    return None


def _array(value: Any, spec: TensorSpec) -> Array:
    if isinstance(value, list | tuple) and value and not isinstance(value[0], _PYTHON):
        value = [np.asarray(row) for row in value]  # rows on a device are copied whole, not number by number
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise Fault(
            spec.name, f"a {type(value).__name__} that is not an array: {str(error).partition('.')[0]}", spec.text()
        ) from None


def _ragged(rows: Sequence[Any], spec: TensorSpec) -> Ragged | None:
    """The rows joined, where they differ in shape; None where they stack into one array."""
    rank = len(spec.shape)
    if rank < 2 or len(rows) < 2 or not all(hasattr(row, "__len__") and not isinstance(row, str) for row in rows):
        return None
    if rank == 2 and all(isinstance(row, list | tuple) for row in rows):
        lengths = [len(row) for row in rows]
        if min(lengths) == max(lengths):
            return None
        flat = _array(list(chain.from_iterable(rows)), spec)
        axis = 0
    else:
        arrays = [row if isinstance(row, np.ndarray) else _array(row, spec) for row in rows]
        shapes = [array.shape for array in arrays]
        if len(set(shapes)) == 1:
            return None
        axis = _ragged_axis(shapes, spec)
        families = set(map(_family, {array.dtype for array in arrays if array.size}))
        if len(families) > 1:
            raise Fault(spec.name, "rows of different dtypes: " + ", ".join(sorted(families)), spec.text())
        along = arrays if axis == 0 else [np.moveaxis(array, axis, 0) for array in arrays]
        flat = np.concatenate([array for array in along if array.size] or along)
        lengths = [shape[axis] for shape in shapes]
    if flat.ndim != rank - 1:
        raise Fault(spec.name, f"rows with {flat.ndim} axes", f"{spec.text()}: rows with {rank - 1}")
    if isinstance(spec.shape[axis + 1], int):
        raise Fault(spec.name, f"rows of lengths {_few(lengths)}", f"{spec.text()}: rows of {spec.shape[axis + 1]}")
    if min(lengths) == 0:
        empty = [row for row, length in enumerate(lengths) if length == 0]
        raise Fault(
            spec.name, f"rows without elements: {_few(empty)}", f"{spec.text()}: at least 1 element in each row"
        )
    return Ragged(flat, np.asarray(lengths, np.int32), axis + 1)


def _ragged_axis(shapes: Sequence[tuple[int, ...]], spec: TensorSpec) -> int:
    ranks = {len(shape) for shape in shapes}
    if ranks != {len(spec.shape) - 1}:
        raise Fault(
            spec.name, f"rows with {_few(sorted(ranks))} axes", f"{spec.text()}: rows with {len(spec.shape) - 1}"
        )
    axes = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(axes) > 1:
        raise Fault(
            spec.name,
            f"rows that differ in {len(axes)} axes: " + ", ".join(str(spec.shape[axis + 1]) for axis in axes),
            f"{spec.text()}: rows that differ in one named dimension at most",
        )
    return axes[0]


def _cast(array: Array, spec: TensorSpec, *, python: bool) -> tuple[Array, bool]:
    """The array in the spec's dtype, and whether it is a new one."""
    wanted = numpy_dtype(spec.dtype)
    if array.dtype == wanted and wanted.kind != "O":
        return array, False
    source, target = _family(array.dtype), _family(wanted)
    if array.size == 0 and python:
        return np.empty(array.shape, wanted), True
    if target == "string":
        if source != "string" or not all(isinstance(item, str) for item in array.flat):
            raise Fault(spec.name, described(array), spec.text())
        return array.astype(object), True
    if source == target == "integer":
        _check_range(array, wanted, spec)
        return array.astype(wanted), True
    if source == target or (python and (source, target) in _WIDENED):
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(wanted)
            if not np.can_cast(array.dtype, wanted):
                _check_loss(array, cast, spec, rounded=python)
        return cast, True
    raise Fault(
        spec.name,
        described(array),
        spec.text(),
        f"convert it: {spec.name}.astype({spec.dtype!r})" if not python and "string" not in (source, target) else None,
    )


_WIDENED = {("integer", "float"), ("integer", "complex"), ("float", "complex")}


def _check_range(array: Array, wanted: np.dtype, spec: TensorSpec) -> None:
    if np.can_cast(array.dtype, wanted) or array.size == 0:
        return
    limits = ml_dtypes.iinfo(wanted)
    low, high = int(array.min()), int(array.max())
    if low < int(limits.min) or high > int(limits.max):
        raise Fault(
            spec.name,
            f"{described(array)} with values from {low} to {high}",
            f"{spec.text()}, values from {limits.min} to {limits.max}",
        )


def _check_loss(array: Array, cast: Array, spec: TensorSpec, *, rounded: bool) -> None:
    if rounded:
        lost = np.isfinite(array) & ~np.isfinite(cast)
        what = "beyond the range of"
    else:
        lost = (cast.astype(array.dtype) != array) & (array == array)  # noqa: PLR0124 - NaN is what differs from itself
        what = "that change in"
    if count := int(np.count_nonzero(lost)):
        raise Fault(
            spec.name,
            f"{described(array)} with {count} of {array.size} values {what} {spec.dtype}, e.g. {array[lost][0]}",
            spec.text(),
            f"convert it: {spec.name}.astype({spec.dtype!r})" if not rounded else None,
        )


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """`core.tensors.dtype_of`, remembered: it is asked for each tensor of each request."""
    return dtype_of(name)


@functools.cache
def _family(dtype: np.dtype) -> str:
    if dtype.kind in "OUST":
        return "string"
    if dtype.kind == "b":
        return "bool"
    if dtype.kind == "c":
        return "complex"
    if dtype.kind in "iu" or dtype.name in ("int4", "uint4", "int2", "uint2"):
        return "integer"
    return "float" if dtype.kind == "f" or "float" in dtype.name else dtype.name


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
