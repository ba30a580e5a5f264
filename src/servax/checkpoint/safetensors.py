"""safetensors, one file or several with an index: read tensor by tensor, straight into the array that is placed.

The `safetensors` library opens local files only and, for NumPy, makes a second copy of each tensor; here ranges are
read through `etils.epath`, from local files and URLs alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import jax
import numpy as np
from etils import epath

from servax.checkpoint.placement import put
from servax.checkpoint.stored import Location, StoredLeaf, Wanted
from servax.core.buffers import aligned
from servax.core.errors import CheckpointError
from servax.core.safetensors_header import DTYPES, UnknownDtype, parse_header
from servax.core.trees import KeyPath

_MOST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

_CAST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Range:
    file: epath.Path
    start: int


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """Safetensors files whose headers have been read."""

    leaves: Mapping[KeyPath, StoredLeaf]
    ranges: Mapping[KeyPath, _Range] = field(repr=False)

    def read(self, targets: Mapping[KeyPath, Wanted]) -> dict[KeyPath, jax.Array]:
        """As `Source.read`."""
        arrays: dict[KeyPath, jax.Array] = {}
        for file in dict.fromkeys(self.ranges[path].file for path in targets):
            here = [path for path in targets if self.ranges[path].file == file]
            with file.open("rb") as stream:
                for path in sorted(here, key=lambda path: self.ranges[path].start):
                    stream.seek(self.ranges[path].start)
                    array = aligned(self.leaves[path].shape, targets[path].dtype)
                    _read_cast(stream, file, array, self.leaves[path].dtype)
                    arrays[path] = put(array, targets[path].sharding)
        return arrays


def open_safetensors(location: Location) -> SafetensorsSource:
    """Reads the headers of the files of `location`; no tensor.

    Raises:
      CheckpointError: a header is damaged, a file of the index is missing, or a file is shorter than its header says.
    """
    leaves: dict[KeyPath, StoredLeaf] = {}
    ranges: dict[KeyPath, _Range] = {}
    for file in _tensor_files(location):
        for name, leaf, start in _header(file):
            path = key_path(name)
            if path in leaves:
                raise CheckpointError(
                    "two files of the folder hold the same tensor",
                    where=str(location.path),
                    seen=f"{name} in {ranges[path].file.name} and {file.name}",
                    remedy="name one of the files as the item, or remove the other",
                )
            leaves[path] = leaf
            ranges[path] = _Range(file, start)
    return SafetensorsSource(leaves, ranges)


def key_path(name: str) -> KeyPath:
    """The key path of a tensor's name: `encoder.layer.0.weight` and `encoder/layer/0/weight` alike."""
    return tuple(part for part in re.split(r"[./]", name) if part)


def read_exactly(stream: IO[bytes], file: epath.Path, into: memoryview) -> None:
    """Fills `into` from `stream`.

    Raises:
      CheckpointError: the file ends before.
    """
    reader: Any = stream
    filled = 0
    while filled < len(into):
        count = reader.readinto(into[filled:])
        if not count:
            raise _damaged(file, f"the file ends {len(into) - filled} bytes early")
        filled += count


def _read_cast(stream: IO[bytes], file: epath.Path, array: np.ndarray[Any, Any], stored: np.dtype[Any]) -> None:
    flat = array.reshape(-1)
    if stored == array.dtype:
        read_exactly(stream, file, memoryview(flat.view(np.uint8)))
        return
    block = np.empty(min(flat.size, _CAST_BYTES // stored.itemsize), stored)
    for start in range(0, flat.size, max(block.size, 1)):
        part = block[: flat.size - start]
        read_exactly(stream, file, memoryview(part.view(np.uint8)))
        flat[start : start + part.size] = part.astype(array.dtype)


def _tensor_files(location: Location) -> list[epath.Path]:
    files: dict[epath.Path, None] = {}
    for file in location.files:
        if not file.name.endswith(".json"):
            files[file] = None
            continue
        try:
            names = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _damaged(file, f"not an index of safetensors files: {error}") from error
        missing = [name for name in names if not (file.parent / name).exists()]
        if missing:
            raise CheckpointError(
                "files of the checkpoint are missing",
                where=str(file),
                seen=f"no {', '.join(missing)}",
                expected="every file that the index names",
                remedy="copy them beside the index",
            )
        files.update(dict.fromkeys(file.parent / name for name in names))
    return list(files)


def _header(file: epath.Path) -> list[tuple[str, StoredLeaf, int]]:
    size = file.stat().length
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise _damaged(file, f"a header of {length} bytes in a file of {size}")
        text = stream.read(length)
    try:
        entries, _ = parse_header(text)
    except UnknownDtype as error:
        raise CheckpointError(
            f"tensor {error.tensor} has a dtype that JAX does not know",
            where=str(file),
            seen=error.dtype,
            expected=f"one of {', '.join(DTYPES)}",
        ) from error
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    end = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if end > size:
        raise _damaged(file, f"{size} bytes of the {end} that the header promises")
    return [(name, StoredLeaf(entry.shape, entry.dtype), 8 + length + entry.start) for name, entry in entries.items()]


def _damaged(file: epath.Path, seen: str) -> CheckpointError:
    return CheckpointError(
        "the file is damaged or incomplete",
        where=str(file),
        seen=seen,
        remedy="copy it again from where it was written",
    )
