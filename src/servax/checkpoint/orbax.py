"""Orbax checkpoints, v0 and v1 layouts, read through Orbax's v1 API: metadata first, then the wanted leaves alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import re
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from servax.checkpoint.memory import returned_when_freed
from servax.checkpoint.stored import Location, StoredLeaf, Wanted
from servax.core.errors import CheckpointError
from servax.core.trees import KeyPath

_ONE_READ = 128 << 20
"""Bytes as stored. Less than this is read at once, whatever that takes for the moment."""

_LOCAL_FILE = re.compile(r'local file "([^"]+)"')
_FAILED_READ = re.compile(r"async_deserialize|_read_array_index_and_device_put|tensorstore_spec")
_CAUSE = re.compile(r"^[A-Z_]+: (.*?)(?: \[tensorstore_spec=|\s*$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Item:
    """One tree of a checkpoint: its structure as Orbax gives it, and the place of each leaf in it."""

    name: str | None
    structure: Any
    places: Mapping[KeyPath, int]
    count: int


@dataclass(frozen=True, slots=True)
class OrbaxSource:
    """An Orbax checkpoint whose metadata has been read."""

    location: Location
    leaves: Mapping[KeyPath, StoredLeaf]
    items: tuple[_Item, ...] = field(repr=False)

    def read(self, targets: Mapping[KeyPath, Wanted]) -> dict[KeyPath, jax.Array]:
        """As `Source.read`. Every other leaf is a placeholder: its bytes are not read."""
        arrays: dict[KeyPath, jax.Array] = {}
        logging.getLogger("asyncio").addFilter(_quiet_reads)
        with _as_checkpoint_errors(self.location), returned_when_freed():
            for group in read_groups(self.leaves, targets):
                for item in self.items:
                    wanted = {path: targets[path] for path in group if path in item.places}
                    if wanted:
                        arrays |= self._load(item, wanted)
        return arrays

    def _load(self, item: _Item, wanted: Mapping[KeyPath, Wanted]) -> dict[KeyPath, jax.Array]:
        abstract: list[Any] = [ocp.PLACEHOLDER] * item.count
        for path, target in wanted.items():
            leaf = self.leaves[path]
            abstract[item.places[path]] = jax.ShapeDtypeStruct(leaf.shape, target.dtype, sharding=target.sharding)
        loaded = ocp.load(self.location.directory, item.structure.unflatten(abstract), checkpointable_name=item.name)
        leaves = jax.tree.leaves(loaded)
        arrays = {path: leaves[item.places[path]] for path in wanted}
        jax.block_until_ready(arrays)
        gc.collect(0)  # JAX lets go of the host arrays it has copied in a callback of the garbage collector.
        return arrays


def open_orbax(location: Location) -> OrbaxSource:
    """Reads the metadata of every item of `location`; no array.

    Raises:
      CheckpointError: the metadata is missing or damaged.
    """
    leaves: dict[KeyPath, StoredLeaf] = {}
    items: list[_Item] = []
    for name in location.items:
        with _as_checkpoint_errors(location):
            metadata = _metadata(location.directory, name)
        keyed, structure = jax.tree_util.tree_flatten_with_path(metadata)
        keys = _random_keys(location, name)
        prefix: KeyPath = (name,) if name is not None and len(location.items) > 1 else ()
        places: dict[KeyPath, int] = {}
        for place, (raw, value) in enumerate(keyed):
            parts = tuple(_key_text(key) for key in raw)
            leaf = _stored(value, ".".join(parts) in keys)
            if leaf is not None:
                path = (*prefix, *(part for text in parts for part in text.split("/")))
                leaves[path] = leaf
                places[path] = place
        items.append(_Item(name, structure, places, len(keyed)))
    return OrbaxSource(location, leaves, tuple(items))


def _metadata(directory: epath.Path, item: str | None) -> Any:
    """The tree of one item with a description at each leaf.

    Of a damaged item Orbax gives nothing and logs why; asking the tree's own handler raises it.
    """
    metadata = ocp.metadata(directory, checkpointable_name=item).metadata
    if not jax.tree.leaves(metadata):
        tree = ocp.handlers.PyTreeHandler().metadata(directory / item if item else directory)
        with ThreadPoolExecutor(1) as thread:  # A notebook's main thread has an event loop running already.
            metadata = thread.submit(asyncio.run, tree).result()
    return metadata


def read_groups(leaves: Mapping[KeyPath, StoredLeaf], targets: Mapping[KeyPath, Wanted]) -> Iterator[list[KeyPath]]:
    """Leaves in the groups they are read in, largest first, so that memory peaks early, when little is held yet.

    While a leaf is read its bytes exist up to three times: compressed, decoded, and as they are handed to the
    device. A group may take what is still free below the final size, and never less than a third of that size.
    Orbax's own limit (`read_concurrent_bytes`) keeps no order and refuses a leaf larger than itself.
    """
    sizes = {path: leaves[path].dtype.itemsize * _elements(leaves[path]) for path in targets}
    kept = {path: target.dtype.itemsize * _elements(leaves[path]) for path, target in targets.items()}
    total = sum(kept.values())
    if sum(sizes.values()) < _ONE_READ:
        yield list(targets)
        return
    held = taken = 0
    group: list[KeyPath] = []
    for path in sorted(targets, key=lambda path: (-sizes[path], path)):
        needs = kept[path] + 2 * sizes[path]
        if group and taken + needs > max(total - held, total // 3):
            yield group
            held += sum(kept[member] for member in group)
            group, taken = [], 0
        group.append(path)
        taken += needs
    if group:
        yield group


def _elements(leaf: StoredLeaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def _stored(value: Any, random: bool) -> StoredLeaf | None:
    """The leaf that a metadata value describes; None for what is no array: strings, and values of other types."""
    if getattr(value, "shape", None) is not None and getattr(value, "dtype", None) is not None:
        return StoredLeaf(tuple(value.shape), np.dtype(value.dtype), random)
    if isinstance(value, bool | int | float):
        return StoredLeaf((), np.dtype({bool: "bool", int: "int32", float: "float32"}[type(value)]))
    return None


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _random_keys(location: Location, item: str | None) -> set[str]:
    """Names of the leaves that are typed PRNG keys. Orbax stores their data and notes the type in `array_metadatas`."""
    folder = (location.directory / item if item else location.directory) / "array_metadatas"
    names: set[str] = set()
    if not folder.exists():
        return names
    for file in folder.iterdir():
        try:
            recorded: Any = json.loads(file.read_text())
        except ValueError as error:
            raise _damaged(location, str(file), str(error)) from error
        for entry in recorded.get("array_metadatas", []):
            array = entry.get("array_metadata", {})
            if "random_key_impl" in (array.get("ext_metadata") or {}):
                names.add(str(array["param_name"]))
    return names


@contextlib.contextmanager
def _as_checkpoint_errors(location: Location) -> Generator[None]:
    """Whatever Orbax and TensorStore raise, as a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        messages = [str(each) for each in _chain(error)]
        files = [file for message in reversed(messages) for file in reversed(_LOCAL_FILE.findall(message))]
        message = next((match[1] for text in reversed(messages) if (match := _CAUSE.match(text))), messages[-1])
        file = files[0] if files else _unreadable_json(location) or str(location.directory)
        raise _damaged(location, file, message or type(error).__name__) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, as a traceback would show it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _unreadable_json(location: Location) -> str | None:
    """The first metadata file that is no JSON: Orbax's own message does not name it."""
    for item in location.items:
        file = (location.directory / item if item else location.directory) / "_METADATA"
        try:
            json.loads(file.read_text())
        except (ValueError, OSError):
            return str(file)
    return None


def _quiet_reads(record: logging.LogRecord) -> bool:
    """Drops asyncio's report of each read that failed after the first; the first is raised."""
    return not _FAILED_READ.search(record.getMessage())


def _damaged(location: Location, file: str, message: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint's data is damaged or incomplete",
        where=file,
        seen=" ".join(message.split()),
        remedy=f"copy {location.path} again from where it was written, or choose another step",
    )
