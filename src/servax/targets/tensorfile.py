"""Named arrays in a safetensors file, in every dtype that JAX has, read without JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

Array = np.ndarray[Any, Any]

_NATIVE = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float16", "float32")
_NAMES = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_STORED = (*_NATIVE, "float64", *(name for name in _NAMES.values() if name != "bool"))


def tensors_to_bytes(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file; dtypes that the format lacks (`int4`, `complex128`) are bytes in it, named in the header."""
    import safetensors.numpy

    as_bytes: dict[str, str] = {}
    stored: dict[str, Array] = {}
    for name, array in tensors.items():
        whole = np.ascontiguousarray(array).reshape(array.shape)
        if whole.dtype.name not in _STORED:
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
    # safetensors.numpy knows neither bfloat16 nor float8 on reading (0.8), and its readers drop the metadata.
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("not a safetensors file, or cut short")
    header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, Any])
    metadata: dict[str, str] = header.pop("__metadata__", {})
    as_bytes: dict[str, str] = msgspec.json.decode(metadata.pop("as_bytes", "{}"))
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        dtype, shape = _stored_dtype(entry["dtype"]), tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if name in as_bytes:
            original, _, text = as_bytes[name].partition(":")
            dtype, shape = np.dtype(_extended(original)), tuple(int(each) for each in text.split(",") if each)
        if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > len(data):
            raise ValueError(f"tensor {name!r} is cut short")
        tensors[name] = np.frombuffer(data, dtype, math.prod(shape), 8 + length + start).reshape(shape)
    return tensors, metadata


def _stored_dtype(name: str) -> np.dtype[Any]:
    if name in _NAMES:
        return np.dtype(_extended(_NAMES[name]))
    kind = {"F": "float", "I": "int", "U": "uint"}.get(name[:1])
    if kind is None or not name[1:].isdigit():
        raise ValueError(f"dtype {name!r} is unknown")
    return np.dtype(f"{kind}{name[1:]}")


def _extended(name: str) -> Any:
    return getattr(ml_dtypes, name, None) or np.dtype(name)
