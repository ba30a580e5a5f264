"""Named arrays in a safetensors file, in every dtype that JAX has, read without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from servax.core.safetensors_header import DTYPES, parse_header
from servax.core.tensors import dtype_of

Array = np.ndarray[Any, Any]


def tensors_to_bytes(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file; dtypes that the format lacks (`int4`, `complex128`) are bytes in it, named in the header."""
    import safetensors.numpy

    as_bytes: dict[str, str] = {}
    stored: dict[str, Array] = {}
    for name, array in tensors.items():
        whole = np.ascontiguousarray(array).reshape(array.shape)
        if whole.dtype.name not in DTYPES.values():
            as_bytes[name] = f"{whole.dtype.name}:{','.join(map(str, whole.shape))}"
            whole = np.frombuffer(whole.tobytes(), np.uint8)
        stored[name] = whole
    notes = dict(metadata or {})
    if as_bytes:
        # Only where it is needed: safetensors writes several notes in an order that changes from run to run.
        notes["as_bytes"] = msgspec.json.encode(as_bytes).decode()
    return safetensors.numpy.save(stored, notes)


def tensors_from_bytes(data: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors and metadata of a safetensors file; the tensors are read-only views of `data`.

    Raises:
      ValueError: this is not such a file.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("not a safetensors file, or cut short")
    entries, metadata = parse_header(data[8 : 8 + length])
    as_bytes: dict[str, str] = msgspec.json.decode(metadata.pop("as_bytes", "{}"))
    everything = np.frombuffer(data, np.uint8)
    tensors: dict[str, Array] = {}
    for name, entry in entries.items():
        if 8 + length + entry.end > len(data):
            raise ValueError(f"tensor {name!r} is cut short")
        array = everything[8 + length + entry.start : 8 + length + entry.end].view(entry.dtype)
        if name in as_bytes:
            original, _, text = as_bytes[name].partition(":")
            array = array.view(dtype_of(original)).reshape(tuple(int(each) for each in text.split(",") if each))
        else:
            array = array.reshape(entry.shape)
        tensors[name] = array
    return tensors, metadata
