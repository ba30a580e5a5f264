"""What is asked of new parameters before they go live, and what is told of them: finiteness and drift (contract 4)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from servax.core.errors import CheckpointError
from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import KeyPath, path_text
from servax.runtime.executor import Executor
from servax.runtime.runner import Buffers, Runner, ServedFunction
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import FlatArrays

_CHUNK = 1 << 20
"""Elements looked at together, so that a large leaf needs no mask of its own size."""


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What a swap did.

    Attributes:
      checkpoint: where the new parameters came from.
      leaves: how many arrays were replaced.
      bytes: their size on the device.
      seconds: from the call until requests saw them.
      finite: whether the new parameters hold neither NaN nor infinity.
      drift: how far the answers moved, by function: the largest difference between the outputs of new and old
        parameters over the largest absolute old output, for the same inputs at the function's smallest bucket.
        Functions with a state or without floating outputs are left out.
    """

    checkpoint: str
    leaves: int
    bytes: int
    seconds: float
    finite: bool
    drift: Mapping[str, float]


def require_finite(
    paths: Sequence[KeyPath], fresh: FlatArrays, present: FlatArrays, *, allow: bool, checkpoint: str
) -> bool:
    """Whether all of `fresh` is finite; leaves that `present` holds non-finite as well are let through.

    Raises:
      CheckpointError: leaves hold NaN or infinity that were finite before, unless `allow`; lists them all.
    """
    broken = [index for index, leaf in enumerate(fresh) if not is_finite(leaf)]
    new = [path_text(paths[index]) for index in broken if is_finite(present[index])]
    if new and not allow:
        raise CheckpointError(
            f"{len(new)} of {len(fresh)} new parameters hold NaN or infinity",
            where=checkpoint,
            seen=", ".join(new),
            expected="finite values, as the present parameters have",
            remedy="take another step of the run, or pass allow_nonfinite=True",
        )
    return not broken


def is_finite(leaf: Any) -> bool:
    """Whether a floating array, on any device, holds neither NaN nor infinity; True for one of another kind."""
    if not _is_floating(leaf.dtype):
        return True
    # The shard is an object of its own: fetching `leaf` itself would keep the host's copy alive as long as it lives.
    shard = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
    flat = np.asarray(shard).reshape(-1)
    return all(bool(np.isfinite(flat[start : start + _CHUNK]).all()) for start in range(0, flat.size, _CHUNK))


def drift(
    executor: Executor, runner: Runner, functions: Mapping[str, ServedFunction], grid: BucketGrid, fresh: FlatArrays
) -> dict[str, float]:
    """How far `fresh` moves the answers of each stateless function; runs wait their turn as requests do.

    Raises:
      ExecutionError: a program failed with the new parameters.
      NotReady: the servable was closed meanwhile.
    """
    moved: dict[str, float] = {}
    for name, function in functions.items():
        if function.stateful:
            continue
        bucket = min(grid[name], key=Bucket.volume)
        buffers = sample(function.signature, bucket)
        old = executor.call(_run(runner, name, bucket, buffers, runner.params))
        new = executor.call(_run(runner, name, bucket, buffers, fresh))
        if found := [difference(a, b) for a, b in zip(old, new, strict=True) if _is_floating(a.dtype)]:
            moved[name] = max(found)
    return moved


def sample(signature: Signature, bucket: Bucket) -> Buffers:
    """Inputs of a bucket's full size, the same each time: defaults, normally distributed floats, else zeros."""
    sizes = bucket.mapping()

    def filled(spec: TensorSpec) -> np.ndarray[Any, Any]:
        shape = spec.concrete(sizes)
        if spec.name in signature.lengths:
            return np.full(shape, sizes[signature.lengths[spec.name]], spec.numpy_dtype)
        if spec.default is not None:
            return np.full(shape, spec.default, spec.numpy_dtype)
        if _is_floating(spec.numpy_dtype):
            return np.random.default_rng(zlib.crc32(spec.name.encode())).normal(size=shape).astype(spec.numpy_dtype)
        return np.zeros(shape, spec.numpy_dtype)

    return tuple(filled(spec) for spec in sorted(signature.inputs, key=lambda spec: spec.name))


def difference(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> float:
    """The largest difference over the largest absolute old value; infinite where only one of the two is finite."""
    wide = np.complex128 if np.iscomplexobj(old) else np.float64
    a, b = old.astype(wide), new.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    moved, scale = np.abs(b[finite] - a[finite]).max(initial=0.0), np.abs(a[finite]).max(initial=0.0)
    if moved == 0:
        return 0.0
    return float(moved / scale) if scale else float("inf")


def _run(runner: Runner, name: str, bucket: Bucket, buffers: Buffers, params: FlatArrays) -> Any:
    # Copied on the device's thread, before another run can write to what the outputs are views of.
    return lambda: tuple(np.array(each) for each in runner.run(name, bucket, buffers, params=params)[0])


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.inexact))
