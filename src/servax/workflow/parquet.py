"""Rows in Parquet files, by pyarrow (extra `parquet`): list columns for rows of different length, strings for texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servax.core.errors import UsageError
from servax.workflow.rows import ERROR, OFFSETS, Array, Column, Layout

_BUFFER = 1 << 20
"""Bytes that are read ahead of each column."""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet  # pyright: ignore[reportUnusedImport]  # makes the attribute
    except ImportError as error:
        raise UsageError(
            "Parquet files need pyarrow, which is not installed",
            seen=str(error),
            remedy="pip install 'servax[parquet]', or use .npz files",
        ) from error
    return pyarrow


class ParquetRows:
    """A source of rows; see `rows.RowSource`. A row that is null, or holds one, is None."""

    def __init__(self, path: str) -> None:
        pa = _pyarrow()
        self.path = path
        try:
            self._file: Any = pa.parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise UsageError("this is no Parquet file", where=path, seen=str(error)) from error
        schema = self._file.schema_arrow
        self.shapes = {field.name: _shape(pa, field.type) for field in schema}
        rows: int = self._file.metadata.num_rows
        self.counts = dict.fromkeys(self.shapes, rows)
        groups = range(self._file.metadata.num_row_groups)
        self.row_bytes = sum(self._file.metadata.row_group(group).total_byte_size for group in groups) // max(1, rows)

    def chunks(self, names: Sequence[str], size: int) -> Iterator[dict[str, Column]]:
        pa = _pyarrow()
        waiting: list[Any] = []
        count = 0
        for batch in self._file.iter_batches(batch_size=size, columns=list(names)):
            waiting.append(batch)
            count += batch.num_rows
            while count >= size:
                table = pa.Table.from_batches(waiting)
                yield _columns(table.slice(0, size), names)
                waiting = table.slice(size).to_batches()
                count -= size
        if count:
            yield _columns(pa.Table.from_batches(waiting), names)

    def close(self) -> None:
        self._file.close()


def write_parquet(
    path: str,
    outputs: Sequence[Layout],
    rows: int,
    parts: Sequence[Callable[[], Mapping[str, Array]]],
    errors: Iterable[tuple[int, str]],
) -> None:
    """Writes outputs, a row group a part; as `write_npz`, but rows without an answer are null.

    Messages are in the column `error`, which is there if any row has one.
    """
    pa = _pyarrow()
    failed = dict(errors)
    fields = [(each.name, _type(pa, each)) for each in outputs]
    name = ERROR if ERROR not in {each.name for each in outputs} else f"servax_{ERROR}"
    schema = pa.schema([*fields, (name, pa.string())] if failed else fields)
    with pa.parquet.ParquetWriter(path, schema) as writer:
        reached = 0
        for part in parts:
            arrays = part()
            count = _rows_of(outputs, arrays)
            messages = [failed.get(row) for row in range(reached, reached + count)]
            missing = np.array([message is not None for message in messages], bool)
            columns = [_array(pa, each, arrays, missing) for each in outputs]
            if failed:
                columns.append(pa.array(messages, pa.string()))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            reached += count
        assert reached == rows, "the parts are those of the rows"


def _shape(pa: Any, kind: Any) -> tuple[int, ...] | None:
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return shape if numeric else None


def _columns(table: Any, names: Sequence[str]) -> dict[str, Column]:
    return {name: _column(table.column(name).combine_chunks()) for name in names}


def _column(array: Any) -> Column:
    """The rows of an Arrow array."""
    pa = _pyarrow()
    if isinstance(array, pa.ChunkedArray):  # none or several, where they could not be joined
        return [row for chunk in array.chunks for row in _column(chunk)]
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _column(array.dictionary_decode())
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        inner = _column(array.flatten())
        if isinstance(inner, np.ndarray):
            return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(array)
    if array.null_count:
        return array.to_pylist()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return array.to_pylist()
    raise UsageError("a column's type is none of numbers, lists of them, and strings", seen=str(kind))


def _lists(array: Any) -> list[Any]:
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    inner = _column(array.flatten())
    ends = np.cumsum(lengths)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    rows: list[Any] = []
    for start, end, there in zip(ends - lengths, ends, valid, strict=True):
        row: Any = inner[int(start) : int(end)]
        if isinstance(row, list):
            row = None if any(item is None for item in row) else _stacked(row)
        rows.append(row if there else None)
    return rows


def _stacked(rows: list[Any]) -> Any:
    """Inner rows as one array, where they are of one shape; else as they are, for the check that names them."""
    same = rows and all(isinstance(row, np.ndarray) and row.shape == rows[0].shape for row in rows)
    return np.stack(rows) if same else rows


def _type(pa: Any, layout: Layout) -> Any:
    if layout.dtype.kind == "c":
        raise UsageError(f"the output {layout.name!r} is complex, which Parquet has no type for", remedy="write .npz")
    kind = pa.from_numpy_dtype(layout.dtype)
    for size in reversed(layout.shape):
        kind = pa.list_(kind, size)
    return kind if layout.axis is None else pa.list_(kind)


def _array(pa: Any, layout: Layout, arrays: Mapping[str, Array], missing: np.ndarray[Any, Any]) -> Any:
    values = np.ascontiguousarray(arrays[layout.name])
    dense = layout.axis is None
    array = pa.array(values.reshape(-1), mask=missing if dense and not layout.shape else None)
    for axis in range(len(layout.shape), 0, -1):
        outermost = dense and axis == 1
        mask = pa.array(missing) if outermost and missing.any() else None
        array = pa.FixedSizeListArray.from_arrays(array, values.shape[axis], mask=mask)
    if dense:
        return array
    offsets = arrays[layout.name + OFFSETS].astype(np.int32)
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), array, mask=mask)


def _rows_of(outputs: Sequence[Layout], arrays: Mapping[str, Array]) -> int:
    first = outputs[0]
    return len(arrays[first.name]) if first.axis is None else len(arrays[first.name + OFFSETS]) - 1
