"""GGUF files: the index by the `gguf` library, tensors dequantised by it a block of rows at a time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from etils import epath

from servax.checkpoint.placement import put
from servax.checkpoint.safetensors import key_path, read_exactly
from servax.checkpoint.stored import Location, StoredLeaf, Wanted
from servax.core.buffers import aligned
from servax.core.errors import CheckpointError
from servax.core.tensors import dtype_of
from servax.core.trees import KeyPath

_PLAIN = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip
_BLOCK_BYTES = 4 << 20
"""Bytes of float32 dequantised at a time."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's type and place; `row_bytes` is what one row of the last axis takes in the file."""

    file: epath.Path
    start: int
    type: gguf.GGMLQuantizationType
    row_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """GGUF files whose headers have been read. Axes are in NumPy's order, the reverse of the file's."""

    leaves: Mapping[KeyPath, StoredLeaf]
    tensors: Mapping[KeyPath, _Tensor] = field(repr=False)

    def read(self, targets: Mapping[KeyPath, Wanted]) -> dict[KeyPath, jax.Array]:
        """As `Source.read`."""
        arrays: dict[KeyPath, jax.Array] = {}
        for path, target in targets.items():
            array = aligned(self.leaves[path].shape, target.dtype)
            tensor = self.tensors[path]
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.start)
                columns = array.size // max(tensor.rows, 1)
                rows = array.reshape(tensor.rows, columns)
                step = max(1, _BLOCK_BYTES // max(4 * columns, 1))
                for first in range(0, tensor.rows, step):
                    part = rows[first : first + step]
                    block = np.empty((len(part), tensor.row_bytes), np.uint8)
                    read_exactly(stream, tensor.file, memoryview(block.reshape(-1)))
                    part[...] = _values(block, tensor.type).astype(target.dtype, copy=False)
            arrays[path] = put(array, target.sharding)
        return arrays


def open_gguf(location: Location) -> GGUFSource:
    """Reads the headers of the files of `location`; no tensor.

    Raises:
      CheckpointError: a file is damaged, or shorter than its header says.
    """
    leaves: dict[KeyPath, StoredLeaf] = {}
    tensors: dict[KeyPath, _Tensor] = {}
    for file in location.files:
        with _local(file) as local:
            try:
                reader = gguf.GGUFReader(local)
            except (ValueError, IndexError, KeyError, UnicodeDecodeError, OSError) as error:
                raise _damaged(file, str(error)) from error
            size = local.stat().st_size
            for tensor in reader.tensors:
                path = key_path(tensor.name)
                shape = tuple(int(size) for size in reversed(tensor.shape))
                leaves[path] = StoredLeaf(shape, dtype_of(_PLAIN.get(tensor.tensor_type.name, "float32")))
                rows = int(np.prod(shape[:-1], dtype=np.int64))
                tensors[path] = _Tensor(
                    file, int(tensor.data_offset), tensor.tensor_type, int(tensor.n_bytes) // max(rows, 1), rows
                )
                if tensor.data_offset + tensor.n_bytes > size:
                    raise _damaged(file, f"tensor {tensor.name} lies beyond the end of the file")
    return GGUFSource(leaves, tensors)


def _values(block: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Rows of bytes as numbers."""
    if kind.name in _PLAIN:
        return block.view(dtype_of(_PLAIN[kind.name]))
    return gguf.dequantize(block, kind)


@contextlib.contextmanager
def _local(file: epath.Path) -> Generator[Path]:
    """The file as the library can map it: itself, or a copy on disk of one that is behind a URL."""
    if "://" not in str(file):
        yield Path(file)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        file.copy(copy)
        yield copy


def _damaged(file: epath.Path, seen: str) -> CheckpointError:
    return CheckpointError(
        "the file is damaged or incomplete",
        where=str(file),
        seen=seen,
        remedy="copy it again from where it was written",
    )
