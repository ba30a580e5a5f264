"""Host arrays that XLA's CPU client takes over as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
"""Bytes. A NumPy array that begins elsewhere is copied on its way to a CPU device."""


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Callable[[Any, Any], Array] = np.empty) -> Array:
    """A new contiguous array that begins at a multiple of `ALIGNMENT`; `np.zeros` as `allocate` gives one of zeros."""
    size = math.prod(shape) * dtype.itemsize
    memory = allocate(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
