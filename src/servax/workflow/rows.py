"""Rows of a file: columns in, and the layout of columns out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from servax.core.errors import UsageError
from servax.core.tensors import Signature, TensorSpec, evaluate_dim

Array = np.ndarray[Any, Any]

Column = Array | list[Any]
"""Rows of one input: an array `[rows, ...]`, or a list of rows that may differ in length, None where one is missing."""

ERROR = "error"
"""The column that says what was wrong with a row."""

OFFSETS = ".offsets"
"""After the name of joined rows: where each begins, `[rows + 1]`."""


class RowSource(Protocol):
    """A file of rows, read a chunk at a time.

    Attributes:
      path: of the file.
      shapes: by column, the shape of its rows; None where they differ in length, or are texts.
      counts: rows by column.
      row_bytes: of all columns together, about.
    """

    @property
    def path(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...] | None]: ...
    @property
    def counts(self) -> Mapping[str, int]: ...
    @property
    def row_bytes(self) -> int: ...

    def chunks(self, names: Sequence[str], size: int) -> Iterator[dict[str, Column]]:
        """The columns of these names, `size` rows at a time, the last one with fewer."""
        ...

    def close(self) -> None: ...


def open_rows(path: str, signature: Signature) -> RowSource:
    """The rows of an `.npz` or a `.parquet` file.

    Raises:
      UsageError: it is neither, cannot be read, or pyarrow is not installed.
    """
    suffix = os.path.splitext(path)[1]
    try:
        if suffix == ".npz":
            from servax.workflow.npz import NpzRows

            return NpzRows(path, signature)
        if suffix == ".parquet":
            from servax.workflow.parquet import ParquetRows

            return ParquetRows(path)
    except (OSError, ValueError) as error:
        raise UsageError("the file of rows cannot be read", where=path, seen=str(error)) from error
    raise UsageError(
        "the kind of a file of rows is told by its ending", where=path, expected="a name that ends in .npz or .parquet"
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """How one output stands in a file.

    Attributes:
      dtype: of the file; bfloat16 and other types that only JAX knows become the next wider one of NumPy's.
      shape: of a row; without `axis` where rows differ in length.
      axis: of a row, along which rows differ in length; it comes first in the file. None: all rows have `shape`.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axis: int | None = None


def layouts(signature: Signature, sizes: Mapping[str, int], wanted: Sequence[str] = ()) -> tuple[Layout, ...]:
    """The layout of each output.

    Args:
      signature: of the function.
      sizes: of the dimensions in which all rows are equal.
      wanted: names of outputs; all where empty.

    Raises:
      UsageError: no such output, one that is not by row, or one whose rows differ in more than one axis.
    """
    names = [spec.name for spec in signature.outputs]
    if unknown := [name for name in wanted if name not in names]:
        raise UsageError("no such output", seen=", ".join(unknown), expected=", ".join(names))
    return tuple(
        _layout(spec, signature.batch, sizes) for spec in signature.outputs if not wanted or spec.name in wanted
    )


def _layout(spec: TensorSpec, batch: str | None, sizes: Mapping[str, int]) -> Layout:
    if batch is not None and batch not in spec.shape:
        raise UsageError(
            f"the output {spec.name!r} is not by row", seen=spec.text(), remedy="name the others with --outputs"
        )
    dims = [dim for dim in spec.shape if dim != batch]
    ragged = [axis for axis, dim in enumerate(dims) if isinstance(dim, str) and not _known(dim, sizes)]
    if len(ragged) > 1:
        raise UsageError(
            f"rows of the output {spec.name!r} differ in more than one axis",
            seen=spec.text(),
            expected="one axis whose length differs from row to row",
            remedy="name the other outputs with --outputs, or give rows of one length",
        )
    shape = tuple(evaluate_dim(dim, sizes) for axis, dim in enumerate(dims) if axis not in ragged)
    return Layout(spec.name, _plain(spec.numpy_dtype), shape, ragged[0] if ragged else None)


def _known(dim: str, sizes: Mapping[str, int]) -> bool:
    try:
        evaluate_dim(dim, sizes)
    except KeyError:
        return False
    return True


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.isbuiltin == 1:
        return dtype
    return np.dtype(np.float32) if "float" in dtype.name else np.dtype(np.uint8 if "uint" in dtype.name else np.int8)


class Gathered:
    """The outputs of one chunk, as its rows come in, in whatever order.

    A row without an answer is NaN, 0 where there is no NaN, and without elements where rows differ in length.
    """

    def __init__(self, layouts: Sequence[Layout], rows: int) -> None:
        self._layouts = layouts
        self._dense = {each.name: _empty(each, rows) for each in layouts if each.axis is None}
        self._ragged = {
            each.name: [np.empty((0, *each.shape), each.dtype)] * rows for each in layouts if each.axis is not None
        }

    def put(self, row: int, name: str, value: Array) -> None:
        """Takes one row of an output, cut to its own size."""
        if name in self._dense:
            self._dense[name][row] = value
        else:
            self._ragged[name][row] = value

    def arrays(self) -> dict[str, Array]:
        """As they are stored: rows of different length joined, with `NAME.offsets`."""
        stored = dict(self._dense)
        for name, rows in self._ragged.items():
            stored[name] = np.concatenate(rows)
            stored[name + OFFSETS] = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return stored


def _empty(layout: Layout, rows: int) -> Array:
    fill = np.nan if layout.dtype.kind in "fc" else 0
    return np.full((rows, *layout.shape), fill, layout.dtype)
