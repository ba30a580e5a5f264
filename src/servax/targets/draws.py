"""The inputs of golden samples: which sizes, and which values a function can be expected to take."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.stages.padding import SEED
from servax.targets.samples import Draw

TOKENS = 100
"""Valid values assumed of an integer input that is not seen to index anything."""

_EVERY_SEED = 2**32


@dataclass(frozen=True, slots=True)
class Ranges:
    """What the drawn inputs of a function may hold.

    Attributes:
      integers: number of valid values, 0 and up, by input; `TOKENS` where absent.
      told: smallest and largest value of integer and boolean inputs for which the function says so itself.
      most: no other integer input has more valid values than this.
      floats: normal, or the absolute value of that.
      scale: of the floats.
    """

    integers: Mapping[str, int] = field(default_factory=dict[str, int])
    told: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    most: int = 2**31
    floats: Literal["normal", "positive"] = "normal"
    scale: float = 1.0

    def narrower(self) -> Iterator[Ranges]:
        """Ranges to try in turn where outputs come out NaN: smaller integers, then positive and smaller floats."""
        for most in (TOKENS, 16, 4, 2, 1):
            yield replace(self, most=most)
        for scale in (1.0, 0.1):
            yield replace(self, floats="positive", scale=scale)
            yield replace(self, most=2, floats="positive", scale=scale)

    def draw(self, spec: TensorSpec, shape: tuple[int, ...], place: str) -> Draw:
        """The recipe of one input; `place` names it among all, and makes its stream its own."""
        seed = zlib.crc32(f"{place}/{spec.name}".encode())
        kind = spec.numpy_dtype.kind
        if spec.name in self.told:
            low, high = self.told[spec.name]
            return Draw(seed, "integers", spec.dtype, shape, low=low, high=high)
        if kind == "b":
            return Draw(seed, "coin", spec.dtype, shape)
        if spec.name == SEED and spec.dtype == "uint32":
            return Draw(seed, "integers", spec.dtype, shape, high=_EVERY_SEED - 1)
        if kind in "iu" or spec.dtype in ("int4", "uint4"):
            largest = {"int4": 7, "uint4": 15, "int8": 127}.get(spec.dtype, 255 if spec.dtype == "uint8" else 2**31 - 1)
            count = min(self.integers.get(spec.name, TOKENS), self.most, largest + 1)
            return Draw(seed, "integers", spec.dtype, shape, high=count - 1)
        return Draw(seed, self.floats, spec.dtype, shape, high=self.scale)


def full(signature: Signature, bucket: Bucket, ranges: Ranges, place: str) -> dict[str, Draw]:
    """Inputs of exactly the bucket's sizes."""
    sizes = bucket.mapping()
    draws: dict[str, Draw] = {}
    for spec in signature.inputs:
        shape = spec.concrete(sizes)
        if spec.name in signature.lengths:
            rows = (sizes[signature.lengths[spec.name]],) * shape[0]
            draws[spec.name] = Draw(0, "lengths", spec.dtype, shape, lengths=rows)
        else:
            draws[spec.name] = ranges.draw(spec, shape, place)
    return draws


def smaller(bucket: Bucket) -> dict[str, int]:
    """Sizes that have to be padded: about five eighths of every dimension that is larger than 1."""
    return {dim: max(1, size * 5 // 8) for dim, size in bucket.sizes}


def padded(signature: Signature, bucket: Bucket, ranges: Ranges, place: str) -> dict[str, Draw]:
    """Inputs of the sizes that `smaller` gives; where the function takes lengths, its rows differ in length."""
    sizes = smaller(bucket)
    draws = full(signature, Bucket.of(**sizes), ranges, place)
    dim = ragged_dim(signature)
    if dim is None or signature.batch is None:
        return draws
    rows = sizes[signature.batch]
    lengths = tuple(max(1, sizes[dim] * (rows - row) // rows) for row in range(rows))
    for spec in signature.inputs:
        if signature.lengths.get(spec.name) == dim:
            draws[spec.name] = replace(draws[spec.name], lengths=lengths)
        elif signature.batch in spec.shape and dim in spec.shape:
            draws[spec.name] = replace(
                draws[spec.name],
                lengths=lengths,
                row_axis=spec.shape.index(signature.batch),
                length_axis=spec.shape.index(dim),
                fill=spec.pad,
            )
    return draws


def ragged_dim(signature: Signature) -> str | None:
    """The dimension in which rows of a `padded` sample differ; None without a batch dimension or lengths."""
    return next(iter(signature.lengths.values()), None) if signature.batch else None


def one_sided(of: Mapping[str, Draw], *, negative: bool) -> dict[str, np.ndarray[Any, Any]] | None:
    """The drawn inputs with every float of one sign, pad values past a row's length as they were.

    A maximum over normal values lies above padding with zeros, and a minimum below it; over values of one sign, one of
    the two does not. None where no input holds floats.
    """
    if all(draw.kind not in ("normal", "positive") for draw in of.values()):
        return None
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    for name, draw in of.items():
        if draw.kind not in ("normal", "positive"):
            inputs[name] = draw.array()
        elif negative:
            inputs[name] = -replace(draw, kind="positive", fill=-float(draw.fill)).array()
        else:
            inputs[name] = replace(draw, kind="positive").array()
    return inputs


def alone(signature: Signature, of: Mapping[str, Draw], row: int) -> dict[str, Draw]:
    """One row of a full sample's inputs, as a batch of one."""
    draws = dict(of)
    for spec in signature.inputs:
        draw = of[spec.name]
        if draw.kind == "lengths" and draw.lengths is not None:
            draws[spec.name] = replace(draw, shape=(1,), lengths=(draw.lengths[row],))
        elif signature.batch in spec.shape:
            draws[spec.name] = replace(draw, row=row, row_axis=spec.shape.index(signature.batch))
    return draws
