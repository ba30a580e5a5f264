"""Arrays put onto devices: the sharding of a placement, and host arrays cast and placed without a second copy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from servax.core.buffers import aligned
from servax.core.device import Device

_CAST_ELEMENTS = 1 << 20
"""Elements cast at a time, so that a cast needs no array of its own."""


def sharding_of(placement: Device | jax.sharding.Sharding | None) -> jax.sharding.Sharding:
    """The sharding that arrays are committed to; None is the first device of the default backend."""
    if isinstance(placement, jax.sharding.Sharding):
        return placement
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0] if placement is None else placement)


def cast_into(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copies `source` into `target`, cast, block by block; both contiguous and of the same size."""
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    for start in range(0, flat_source.size, _CAST_ELEMENTS):
        block = slice(start, start + _CAST_ELEMENTS)
        flat_target[block] = flat_source[block].astype(target.dtype, copy=False)


def put(array: np.ndarray[Any, Any], sharding: jax.sharding.Sharding) -> jax.Array:
    """`array`, committed to `sharding`. The caller gives it up: on CPU the device may keep its very buffer."""
    return jax.device_put(array, sharding)


def put_copy(array: np.ndarray[Any, Any], dtype: np.dtype[Any], sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy of `array`, cast to `dtype`, committed to `sharding`."""
    copy = aligned(array.shape, dtype)
    cast_into(copy, np.ascontiguousarray(array))
    return put(copy, sharding)
