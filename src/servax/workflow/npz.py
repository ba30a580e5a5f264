"""Rows in `.npz` files, read and written a chunk at a time.

An input is an array with the rows as its first axis. Rows of different length are joined along the axis in which they
differ, which comes first, with `NAME.offsets` beside them: `[rows + 1]`, where each row begins, and the end. Nothing is
unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from servax.core.errors import UsageError
from servax.core.tensors import Signature, TensorSpec
from servax.workflow.rows import ERROR, OFFSETS, Array, Column, Layout

_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class _Header:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize


class NpzRows:
    """A source of rows; see `rows.RowSource`.

    Raises:
      UsageError: it is no such file, an array would have to be unpickled, or is stored in Fortran's order.
    """

    def __init__(self, path: str, signature: Signature) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise UsageError("this is no .npz file", where=path, seen=str(error)) from error
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._headers = {
            name.removesuffix(".npy"): self._header(name) for name in self._archive.namelist() if name.endswith(".npy")
        }
        self._joined = {
            name for name in self._headers if name + OFFSETS in self._headers and name + OFFSETS not in self._specs
        }
        columns = [
            name for name in self._headers if name.removesuffix(OFFSETS) not in self._joined or name in self._joined
        ]
        self.shapes = {name: self._shape(name) for name in columns}
        self.counts = {
            name: self._headers[name + OFFSETS].shape[0] - 1
            if name in self._joined
            else (*self._headers[name].shape, 1)[0]
            for name in columns
        }
        rows = max(1, *self.counts.values(), 1)
        self.row_bytes = (
            sum(header.row_bytes * header.shape[0] for header in self._headers.values() if header.shape) // rows
        )

    def chunks(self, names: Sequence[str], size: int) -> Iterator[dict[str, Column]]:
        readers = {name: self._ragged(name) if name in self._joined else self._dense(name) for name in names}
        left = min(self.counts[name] for name in names)
        while left > 0:
            rows = min(size, left)
            yield {name: read(rows) for name, read in readers.items()}
            left -= rows

    def close(self) -> None:
        self._archive.close()

    def _shape(self, name: str) -> tuple[int, ...] | None:
        header = self._headers[name]
        return None if name in self._joined or header.dtype.kind in "US" else header.shape[1:]

    def _header(self, member: str) -> _Header:
        with self._archive.open(member) as file:
            return _read_header(file, f"{self.path}:{member}")

    def _open(self, name: str) -> IO[bytes]:
        file = self._archive.open(name + ".npy")
        _read_header(file, f"{self.path}:{name}")
        return file

    def _dense(self, name: str) -> Callable[[int], Column]:
        file, header = self._open(name), self._headers[name]
        return lambda rows: self._typed(name, _read(file, header, rows))

    def _ragged(self, name: str) -> Callable[[int], Column]:
        file, header = self._open(name), self._headers[name]
        offsets, reached = self._dense(name + OFFSETS), 0
        spec = self._specs.get(name)
        (first,) = offsets(1)
        if first != 0:
            raise UsageError(f"{name}{OFFSETS} does not begin with 0", where=self.path, seen=str(first))

        def read(rows: int) -> Column:
            nonlocal reached
            ends = np.asarray(offsets(rows), np.int64)
            starts = np.concatenate([[reached], ends[:-1]])
            if (ends < starts).any() or ends[-1] > header.shape[0]:
                raise UsageError(
                    f"{name}{OFFSETS} does not rise from 0 to the number of elements",
                    where=self.path,
                    expected=f"at most {header.shape[0]}, and never less than the one before",
                )
            values = self._typed(name, _read(file, header, int(ends[-1]) - reached))
            parts = np.split(values, (ends - reached)[:-1])
            reached = int(ends[-1])
            axis = _ragged_axis(spec) if spec is not None else 0
            return [np.moveaxis(part, 0, axis) for part in parts] if axis else list(parts)

        return read

    def _typed(self, name: str, array: Array) -> Array:
        """NumPy writes what only JAX knows, bfloat16 say, as bytes: they are what the signature says."""
        spec = self._specs.get(name)
        if array.dtype.kind == "V" and spec is not None and spec.numpy_dtype.itemsize == array.dtype.itemsize:
            return array.view(spec.numpy_dtype)
        return array


def write_npz(
    path: str,
    outputs: Sequence[Layout],
    rows: int,
    parts: Sequence[Callable[[], Mapping[str, Array]]],
    errors: Iterable[tuple[int, str]],
) -> None:
    """Writes outputs, one after the other and a part at a time.

    Args:
      path: of the file.
      outputs: how each stands in it.
      rows: of all parts together.
      parts: each gives the arrays of `Gathered.arrays`; members are read as they are asked for.
      errors: row and message of those without an answer; `error` holds the messages, `error.rows` the rows.
    """
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for each in outputs:
            if each.axis is None:
                _write(archive, each.name, each.dtype, (rows, *each.shape), (part()[each.name] for part in parts))
                continue
            ends = [int(part()[each.name + OFFSETS][-1]) for part in parts]
            total = sum(ends)
            _write(archive, each.name, each.dtype, (total, *each.shape), (part()[each.name] for part in parts))
            shifted = _shifted(ends, (part()[each.name + OFFSETS] for part in parts))
            _write(archive, each.name + OFFSETS, np.dtype(np.int64), (rows + 1,), shifted)
        failed = list(errors)
        if failed:
            name = ERROR if ERROR not in {each.name for each in outputs} else f"servax_{ERROR}"
            texts = np.array([message for _, message in failed])
            _write(archive, name, texts.dtype, texts.shape, [texts])
            _write(archive, f"{name}.rows", np.dtype(np.int64), texts.shape, [np.array([row for row, _ in failed])])


def _shifted(ends: Sequence[int], offsets: Iterable[Array]) -> Iterator[Array]:
    yield np.zeros(1, np.int64)
    reached = 0
    for end, of_part in zip(ends, offsets, strict=True):
        yield of_part[1:] + reached
        reached += end


def _write(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], parts: Iterable[Array]
) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).tobytes())


def _read_header(file: IO[bytes], where: str) -> _Header:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise UsageError("an array has named fields", where=where, expected="a plain array")
    if dtype.hasobject:
        raise UsageError(
            "an array of Python objects would have to be unpickled, which runs code of its own",
            where=where,
            expected="numbers or texts; rows of different length joined, with NAME.offsets beside them",
            remedy="np.savez(FILE, tokens=np.concatenate(rows), "
            "**{'tokens.offsets': np.cumsum([0, *map(len, rows)])}), or write parquet with a list column",
        )
    if fortran and len(shape) > 1:
        raise UsageError(
            "an array is stored column by column, so its rows cannot be read one after the other",
            where=where,
            remedy="save np.ascontiguousarray(ARRAY)",
        )
    return _Header(shape, dtype)


def _read(file: IO[bytes], header: _Header, rows: int) -> Array:
    shape = (rows, *header.shape[1:])
    array = np.empty(shape, header.dtype)
    if not array.nbytes:
        return array
    into = memoryview(array.reshape(-1).view(np.uint8))
    reached = 0
    while reached < len(into):
        try:
            block = file.read(min(_AT_ONCE, len(into) - reached))
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UsageError("an array is damaged", seen=f"{type(error).__name__}: {error}") from error
        if not block:
            raise UsageError("an array ends before its last row", seen=f"{reached} bytes", expected=f"{len(into)}")
        into[reached : reached + len(block)] = block
        reached += len(block)
    return array


def _ragged_axis(spec: TensorSpec) -> int:
    """The axis of a row, batch left out, in which rows of this tensor differ: its first named one."""
    return next((axis for axis, dim in enumerate(spec.shape[1:]) if isinstance(dim, str)), 0)
