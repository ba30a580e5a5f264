"""A quick look at a function that is served without a proof: do its answers depend on padding, or on other rows?

`build` proves that op by op. A model that is loaded in process gets this: one more program, compiled at sizes that no
bucket has, whose answers need no padding, compared with a bucket's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from servax.core.device import Device
from servax.core.errors import BuildError, ModelError
from servax.core.tensors import TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad
from servax.targets.target import FlatArrays, LoadedProgram

TOLERATED = 0.05
"""Largest difference, relative to an output's scale, that is put down to rounding; a fault is usually of its size."""

Array = np.ndarray[Any, Any]


def probe(
    function: Function,
    programs: Mapping[Bucket, LoadedProgram],
    compile_at: Callable[[Bucket], LoadedProgram],
    params: FlatArrays,
    device: Device,
) -> None:
    """Compares one bucket's answers with those of a program at smaller sizes; stateful functions are left alone.

    Args:
      function: with its outputs inferred.
      programs: its compiled programs.
      compile_at: compiles the function at other sizes.
      params: flat, committed to `device`.
      device: where it runs.

    Raises:
      ModelError: an answer changes with padding or with the rows beside it.
    """
    bucket = _roomy(tuple(programs))
    if function.state is not None or bucket is None:
        return
    smaller = Bucket.of(**{dim: _smaller(dim == function.signature.batch, size) for dim, size in bucket.sizes})
    try:
        exact = compile_at(smaller)
    except (ModelError, BuildError):
        return  # it runs at the sizes of its buckets only, and then nothing can be compared

    def calling(loaded: LoadedProgram) -> Callable[[FlatArrays], Any]:
        return lambda inputs: loaded.program(params, (), jax.device_put(inputs, device))

    for seed, sign in ((0, 1.0), (1, -1.0)):
        inputs = _draw(function.signature.inputs, smaller.mapping(), seed, sign, set(function.signature.lengths))
        expected = _run(function, smaller, inputs, calling(exact))
        seen = _run(function, bucket, inputs, calling(programs[bucket]))
        apart = {name: _difference(expected[name], seen[name]) for name in expected}
        if wrong := {name: each for name, each in apart.items() if each > TOLERATED}:
            raise ModelError(
                "an output changes with padding, or with the rows beside it",
                where=f"{function.name}@{bucket.label}, asked at {smaller.label}",
                seen="; ".join(f"{name} differs by {each:.2g} of its scale" for name, each in wrong.items()),
                expected="the answer that the same request gets without padding",
                remedy='let servax give the true lengths (lengths={"n": "length"}) and mask by them; keep the batch '
                "axis in every output, and BatchNorm in evaluation mode; or pad with what changes nothing (pad=)",
            )


def _roomy(buckets: Sequence[Bucket]) -> Bucket | None:
    """The smallest bucket with room in as many dimensions as any; None where there is none."""
    roomy = [bucket for bucket in buckets if any(size > 1 for _, size in bucket.sizes)]
    return min(roomy, key=lambda bucket: (-sum(size > 1 for _, size in bucket.sizes), bucket.volume()), default=None)


def _smaller(is_batch: bool, size: int) -> int:
    return 1 if is_batch else max(1, size - 1)


def _draw(
    specs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int, sign: float, lengths: set[str]
) -> dict[str, Array]:
    """Floats of one sign, so that padding with zeros would win a maximum or lose a minimum; small integers."""
    random = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    for spec in specs:
        shape = spec.concrete(sizes)
        if spec.name in lengths:
            continue
        if spec.numpy_dtype.kind in "bui":
            drawn[spec.name] = random.integers(0, 2, shape).astype(spec.numpy_dtype)
        else:
            drawn[spec.name] = (sign * np.abs(random.standard_normal(shape))).astype(spec.numpy_dtype)
    return drawn


def _run(
    function: Function, bucket: Bucket, inputs: Mapping[str, Array], call: Callable[[FlatArrays], Any]
) -> dict[str, Array]:
    checked = check(function.signature, inputs)
    _, outputs = call(pad(function.signature, bucket, checked))
    return cut(function.signature, checked.sizes, [np.asarray(output) for output in outputs])


def _difference(expected: Array, seen: Array) -> float:
    """Largest difference relative to the scale; of integers, the share of elements that differ."""
    if expected.shape != seen.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind in "bui":
        return float(np.mean(expected != seen))
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, b = expected.astype(wide), seen.astype(wide)
    known = np.isfinite(a)
    if not np.array_equal(known, np.isfinite(b)):
        return float("inf")
    scale = np.abs(a[known]).max(initial=0.0) or 1.0
    return float(np.abs(a[known] - b[known]).max(initial=0.0) / scale)
