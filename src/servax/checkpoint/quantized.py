"""Matrices of 8 bits from a checkpoint that has them as floating ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from servax.checkpoint.placement import put_copy, sharding_of
from servax.checkpoint.restoring import Restored, restore
from servax.checkpoint.stored import PathLike
from servax.core.device import Device
from servax.core.errors import CheckpointError
from servax.core.trees import KeyPath, Tree, flatten, unflatten

SCALE = "scale"
"""The leaf beside an int8 matrix `[rows, columns]` that holds a float32 scale for each row."""


def restore_quantized(
    path: PathLike, *, like: Tree, placement: Device | jax.sharding.Sharding | None = None, **choice: Any
) -> Restored:
    """As `restore`, for a tree with matrices of 8 bits; the checkpoint holds them so, or in floating point.

    Raises:
      CheckpointError: the path is no checkpoint, is damaged, or does not match `like` with its matrices floating.
    """
    try:
        return restore(path, like=like, placement=placement, **choice)
    except CheckpointError:  # what else is wrong with it shows below
        wanted = flatten(like)
        restored = restore(path, like=floating(like), placement=placement, **choice)
    params = quantized(restored.params, wanted, placement)
    origins = {
        leaf: restored.origins[leaf if leaf in restored.origins else _matrix_of(leaf, wanted)] for leaf in wanted
    }
    return replace(restored, params=params, origins=origins)


def floating(like: Tree) -> dict[str, Any]:
    """The tree with its 8-bit matrices in float32, without their scales."""
    wanted = flatten(like)
    matrices = set(_matrices(wanted))
    scales = {_scale_of(path) for path in matrices}
    return unflatten(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, np.float32) if path in matrices else leaf
            for path, leaf in wanted.items()
            if path not in scales
        }
    )


def quantized(
    params: Tree, wanted: Mapping[KeyPath, Any], placement: Device | jax.sharding.Sharding | None
) -> dict[str, Any]:
    """The parameters of `floating(like)` with the matrices that `wanted` has in 8 bits brought to these."""
    leaves = flatten(params)
    sharding = sharding_of(placement)
    for path in _matrices(wanted):
        whole, scale = quantize(np.asarray(leaves.pop(path)))  # the floating one goes as soon as its bytes are there
        leaves[path] = put_copy(whole, np.dtype(np.int8), sharding)
        leaves[_scale_of(path)] = put_copy(scale, np.dtype(np.float32), sharding)
    return unflatten({path: leaves[path] for path in wanted})


def quantize(matrix: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The matrix `[rows, columns]` in 8 bits, and what each row is multiplied by: its largest magnitude over 127."""
    wide = matrix.astype(np.float32, copy=False)
    scale = np.maximum(np.abs(wide).max(axis=1), np.finfo(np.float32).tiny * 127) / 127
    return np.rint(wide / scale[:, None]).astype(np.int8), scale.astype(np.float32)


def _matrices(wanted: Mapping[KeyPath, Any]) -> list[KeyPath]:
    return [path for path, leaf in wanted.items() if leaf.dtype == np.int8 and _scale_of(path) in wanted]


def _scale_of(path: KeyPath) -> KeyPath:
    return (*path[:-1], SCALE)


def _matrix_of(scale: KeyPath, wanted: Mapping[KeyPath, Any]) -> KeyPath:
    return next(path for path in _matrices(wanted) if _scale_of(path) == scale)
