"""The header of a safetensors file, which the checkpoints of others and our own golden samples have in common.

The format is a length of 8 bytes, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors#format). The library of that name reads local files only, gives NumPy
neither bfloat16 nor float8 (0.8) and drops the metadata.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from servax.core.tensors import dtype_of

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
"""The format's name of a dtype -> JAX's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype and shape, and where its bytes lie behind the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class UnknownDtype(ValueError):
    """A dtype that JAX does not have; `tensor` and `dtype` are its tensor's name and its own."""

    def __init__(self, tensor: str, dtype: str) -> None:
        super().__init__(f"tensor {tensor!r}: dtype {dtype!r} is unknown")
        self.tensor = tensor
        self.dtype = dtype


class _Stored(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_header(text: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a header by name, and the metadata.

    Raises:
      ValueError: it is no such header, or a tensor's bytes are not as many as its shape asks for; UnknownDtype.
    """
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        stored = {name: msgspec.json.decode(raw, type=_Stored) for name, raw in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the header cannot be read: {error}") from error
    entries: dict[str, Entry] = {}
    for name, each in stored.items():
        if each.dtype not in DTYPES:
            raise UnknownDtype(name, each.dtype)
        dtype, (start, end) = dtype_of(DTYPES[each.dtype]), each.data_offsets
        if start < 0 or end - start != math.prod(each.shape) * dtype.itemsize:
            raise ValueError(f"{name} is {dtype.name}{list(each.shape)} in {end - start} bytes")
        entries[name] = Entry(dtype, each.shape, start, end)
    return entries, metadata
