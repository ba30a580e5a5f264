"""Golden samples: inputs with the outputs that the source function gave for them, one safetensors file a bucket.

Small files hold every tensor. Past `LIMIT` bytes a file holds the recipe of each input, and of each output its
Euclidean norm and elements at seeded positions. Needs no JAX, so that a child without JAX can read the samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from servax.core.errors import BundleError
from servax.core.tensors import Scalar, dtype_of
from servax.targets.tensorfile import tensors_from_bytes, tensors_to_bytes

FORMAT = 1
LIMIT = 16 * 2**20
"""Bytes of tensors that one file may hold."""

SAMPLED = 4096
"""Elements that are kept of an output whose file would exceed `LIMIT`."""

_CHUNK = 1 << 20
"""Elements looked at together."""

STATE = "state/"
"""Before a state's name, where outputs and state stand beside one another."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Draw:
    """The recipe of one input, from NumPy's `RandomState`, whose streams are frozen across versions of NumPy.

    Attributes:
      seed: of the stream.
      kind: `integers` in `low..high`, both included; `normal` and `positive` (its absolute value) of scale `high`;
        `coin`: true or false; `lengths`: the numbers in `lengths`.
      dtype: name of the dtype.
      shape: of what is drawn, before `row` is taken.
      row: takes only this index of axis `row_axis`, as one row.
      lengths: true length of each row; what lies past it on `length_axis` is `fill`.
    """

    seed: int
    kind: Literal["integers", "normal", "positive", "coin", "lengths"]
    dtype: str
    shape: tuple[int, ...]
    low: int = 0
    high: float = 1.0
    row: int | None = None
    row_axis: int = 0
    lengths: tuple[int, ...] | None = None
    length_axis: int = 1
    fill: Scalar = 0

    def array(self) -> Array:
        """The array that the recipe describes."""
        stream = np.random.RandomState(self.seed)
        dtype = dtype_of(self.dtype)
        if self.kind == "lengths":
            return np.asarray(self.lengths, dtype)
        if self.kind == "integers":
            # uint64 words are the one integer draw that covers every dtype's range.
            words = stream.randint(0, 2**63, size=self.shape, dtype=np.uint64)
            values = (words % np.uint64(int(self.high) - self.low + 1)).astype(np.int64) + self.low
        elif self.kind == "coin":
            values = stream.randint(0, 2, size=self.shape)
        else:
            values = stream.standard_normal(self.shape) * self.high
            values = np.abs(values) if self.kind == "positive" else values
            if dtype.kind == "c":
                values = values + 1j * stream.standard_normal(self.shape) * self.high
        array = np.asarray(values).astype(dtype)
        if self.lengths is not None:
            past = np.arange(array.shape[self.length_axis]) >= np.asarray(self.lengths)[:, None]
            array = np.moveaxis(array, (self.row_axis, self.length_axis), (0, 1)).copy()
            array[past] = self.fill
            array = np.moveaxis(array, (0, 1), (self.row_axis, self.length_axis))
        if self.row is not None:
            array = np.take(array, [self.row], axis=self.row_axis)
        return np.ascontiguousarray(array).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class Expected:
    """What an output, or a state's new value, should be.

    Attributes:
      shape: of the whole.
      values: the whole, or `[n]` elements of it.
      indices: flat positions of `values`; None: they are the whole.
      norm: Euclidean norm of the whole's finite elements, where only elements are kept.
    """

    shape: tuple[int, ...]
    values: Array
    indices: Array | None = None
    norm: float | None = None

    @classmethod
    def of(cls, array: Array) -> Expected:
        """The whole of `array`."""
        return cls(array.shape, array)

    def reduced(self, seed: int) -> Expected:
        """The same by `SAMPLED` elements and the norm; itself where it is no larger than that.

        Of an array that is mostly zeros, as a cache is, half of the elements are of those that are not.
        """
        if self.indices is not None or self.values.size <= SAMPLED:
            return self
        flat, stream = self.values.reshape(-1), np.random.RandomState(seed)
        indices = stream.randint(0, flat.size, size=SAMPLED)
        filled = np.flatnonzero(_bits(flat))
        if 0 < filled.size < flat.size // 2:
            indices[: SAMPLED // 2] = filled[stream.randint(0, filled.size, size=SAMPLED // 2)]
        indices.sort()
        return Expected(self.shape, flat[indices], indices, norm_of(self.values))

    def like(self, array: Array) -> Expected:
        """Of `array` what this keeps of its own, copied."""
        if self.indices is None:
            return Expected.of(np.array(array))
        return Expected(array.shape, array.reshape(-1)[self.indices], self.indices, norm_of(array))


@dataclass(frozen=True, slots=True)
class Step:
    """One call: inputs by name, the outputs it should give, and the state it should leave (stateful functions)."""

    draws: Mapping[str, Draw]
    outputs: Mapping[str, Expected]
    state: Mapping[str, Expected] = field(default_factory=dict[str, Expected])
    inputs: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """Every input of the signature, `lengths` inputs too, at the sample's true sizes, without padding."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Calls that follow one another; the state starts as zeros.

    Attributes:
      name: `full`: exactly the bucket's sizes. `padded`: smaller in every dimension that can be. `alone`: one row
        of `full`.
      sizes: true size of every dimension. Where the function takes lengths, those of `padded` differ row by row, and
        its tensors hold the pad value past them.
    """

    name: str
    sizes: Mapping[str, int]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far rounding alone may carry an output, relative to its scale.

    Attributes:
      unit: largest unit roundoff of the operations on the way to it.
      error: their roundings added in quadrature along the longest path.
    """

    unit: float
    error: float


@dataclass(frozen=True, slots=True)
class Golden:
    """The samples of one function at one bucket.

    Attributes:
      rounding: by name of the output (`state/NAME`: of the state) and by platform.
      precision: largest difference of the outputs to the same function with float32 parameters, relative to the
        output's scale; None where the model does not offer float32, or is no less precise.
    """

    function: str
    bucket: str
    samples: tuple[Sample, ...]
    rounding: Mapping[str, Mapping[str, Rounding]] = field(default_factory=dict[str, Mapping[str, Rounding]])
    precision: float | None = None


class _Kept(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    norm: float | None = None


class _Step(msgspec.Struct, frozen=True):
    draws: dict[str, Draw]
    outputs: dict[str, _Kept]
    state: dict[str, _Kept]


class _Sample(msgspec.Struct, frozen=True):
    name: str
    sizes: dict[str, int]
    steps: tuple[_Step, ...]


class _Header(msgspec.Struct, frozen=True):
    format: int
    function: str
    bucket: str
    samples: tuple[_Sample, ...]
    rounding: dict[str, dict[str, Rounding]]
    precision: float | None


def kept(state: Mapping[str, Array]) -> dict[str, Expected]:
    """A state, copied; past `LIMIT` bytes elements and norms of it, since several samples are made at once."""
    large = sum(array.nbytes for array in state.values()) > LIMIT
    return {
        name: Expected.of(array).reduced(seed) if large and array.size > SAMPLED else Expected.of(np.array(array))
        for seed, (name, array) in enumerate(state.items())
    }


def _bits(flat: Array) -> Array:
    """An array of 16 bits an element as whole numbers, which are looked at many times faster."""
    return flat.view(np.uint16) if flat.dtype.itemsize == 2 else flat


def norm_of(array: Array) -> float:
    """The Euclidean norm of the finite elements, in float64."""
    square, flat = 0.0, np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        if not part.view(np.uint8).any():  # as most of a cache is
            continue
        wide = part.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        found = float(np.vdot(wide, wide).real)
        if not np.isfinite(found):
            wide = wide[np.isfinite(wide)]
            found = float(np.vdot(wide, wide).real)
        square += found
    return math.sqrt(square)


def to_bytes(golden: Golden, limit: int = LIMIT) -> bytes:
    """The safetensors file of `golden`, reduced to recipes, elements and norms where it would exceed `limit` bytes."""
    total = sum(
        array.nbytes
        for sample in golden.samples
        for step in sample.steps
        for array in (*step.inputs.values(), *(e.values for e in (*step.outputs.values(), *step.state.values())))
    )
    reduced = total > limit
    tensors: dict[str, Array] = {}
    samples: list[_Sample] = []
    for sample in golden.samples:
        steps: list[_Step] = []
        for number, step in enumerate(sample.steps):
            prefix = f"{sample.name}/{number}"
            if not reduced:
                tensors |= {f"{prefix}/inputs/{name}": array for name, array in step.inputs.items()}
            kept: dict[str, dict[str, _Kept]] = {}
            for kind, arrays in (("outputs", step.outputs), ("state", step.state)):
                kept[kind] = {}
                for seed, (name, whole) in enumerate(arrays.items()):
                    each = whole.reduced(seed) if reduced else whole
                    tensors[f"{prefix}/{kind}/{name}"] = each.values
                    if each.indices is not None:
                        tensors[f"{prefix}/{kind}.indices/{name}"] = each.indices
                    kept[kind][name] = _Kept(each.shape, each.norm)
            steps.append(_Step(dict(step.draws), kept["outputs"], kept["state"]))
        samples.append(_Sample(sample.name, dict(sample.sizes), tuple(steps)))
    header = _Header(
        FORMAT,
        golden.function,
        golden.bucket,
        tuple(samples),
        {name: dict(platforms) for name, platforms in golden.rounding.items()},
        golden.precision,
    )
    return tensors_to_bytes(tensors, {"golden": msgspec.json.encode(header).decode()})


def from_bytes(data: bytes, name: str = "golden") -> Golden:
    """The samples that `to_bytes` wrote.

    Raises:
      BundleError: the file, `name`, is damaged or of another format.
    """
    try:
        tensors, metadata = tensors_from_bytes(data)
        header = msgspec.json.decode(metadata["golden"], type=_Header)
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        raise BundleError("golden samples cannot be read", where=name, seen=str(error)) from error
    if header.format != FORMAT:
        raise BundleError(
            "golden samples of another format",
            where=name,
            seen=f"format {header.format}",
            expected=f"format {FORMAT}",
            remedy="read the bundle with the servax that wrote it, or build it again",
        )

    def expected(prefix: str, kind: str, kept: Mapping[str, _Kept]) -> dict[str, Expected]:
        return {
            each: Expected(
                meta.shape,
                tensors[f"{prefix}/{kind}/{each}"],
                tensors.get(f"{prefix}/{kind}.indices/{each}"),
                meta.norm,
            )
            for each, meta in kept.items()
        }

    samples: list[Sample] = []
    for sample in header.samples:
        steps: list[Step] = []
        for number, step in enumerate(sample.steps):
            prefix = f"{sample.name}/{number}"
            stored = {each: tensors.get(f"{prefix}/inputs/{each}") for each in step.draws}
            inputs = {each: step.draws[each].array() if array is None else array for each, array in stored.items()}
            steps.append(
                Step(
                    step.draws,
                    expected(prefix, "outputs", step.outputs),
                    expected(prefix, "state", step.state),
                    inputs,
                )
            )
        samples.append(Sample(sample.name, sample.sizes, tuple(steps)))
    return Golden(header.function, header.bucket, tuple(samples), header.rounding, header.precision)
