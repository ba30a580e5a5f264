"""A request's tensors: checked against the signature, padded up to a bucket, and its outputs cut back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core.buffers import aligned
from servax.core.errors import InvalidInput
from servax.core.tensors import Dim, Signature, TensorSpec, evaluate_dim
from servax.stages.buckets import Bucket
from servax.stages.conversion import Array, Fault, Ragged, convert, described, numpy_dtype

SEED = "seed"
"""The input that the operating system's randomness fills where a request leaves it out: `seed: uint32[batch]`."""

_ALIGNED_FROM = 1 << 16


@dataclass(frozen=True, slots=True)
class CheckedTensors:
    """A request's tensors as the signature wants them, with the request's own sizes.

    Attributes:
      tensors: by input name; inputs that the request left out and that have a default or a length are absent.
      sizes: of every named dimension; of a ragged one the longest row's.
      row_lengths: dimension -> `int32[rows]`, for dimensions whose rows differ or whose lengths the request gave.
      owned: names of tensors whose memory nobody else holds: they go to the device as they are where they fit.
    """

    tensors: Mapping[str, Array | Ragged]
    sizes: Mapping[str, int]
    row_lengths: Mapping[str, Array]
    owned: frozenset[str]


def check(signature: Signature, tensors: Mapping[str, Any], *, owned: bool = False) -> CheckedTensors:
    """The tensors of one request in the signature's dtypes, after every check that needs no bucket.

    Values are NumPy or JAX arrays, Python numbers or lists, and lists of rows that differ in length along one named
    dimension. Dtypes are strict, see `conversion.convert`. Values are not looked at otherwise: NaN and infinities pass.
    Inputs with a default, `lengths` inputs and `seed` may be left out.

    Args:
      signature: of the function.
      tensors: by input name.
      owned: the caller promises that nobody writes to the arrays until the answer is there; they are then not copied
        when they already have a bucket's shape.

    Raises:
      InvalidInput: names every tensor that is missing, unknown, or of the wrong dtype or shape.
    """
    faults: list[Fault] = []
    checked: dict[str, Array | Ragged] = {}
    kept: set[str] = set()
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for spec in signature.inputs:
        if spec.name not in tensors:
            continue
        try:
            converted = convert(tensors[spec.name], spec)
        except Fault as fault:
            faults.append(fault)
            continue
        checked[spec.name] = converted.value
        if owned or converted.owned:
            kept.add(spec.name)
        if isinstance(converted.value, Ragged) and spec.shape[0] != signature.batch:
            faults.append(
                Fault(
                    spec.name,
                    "rows of different length",
                    f"{spec.text()}: equal rows, as its first dimension is not the batch",
                )
            )
            continue
        faults += _check_shape(spec, converted.value, sizes, origin)
    faults += _missing_and_unknown(signature, tensors)
    if not faults:
        faults += _undetermined(signature, sizes, checked)
    row_lengths: dict[str, Array] = {}
    if not faults:
        row_lengths, faults = _row_lengths(signature, checked, sizes)
    if faults:
        raise _invalid(faults)
    for spec in signature.inputs:
        if _is_seed(spec) and spec.name not in checked:
            shape = spec.concrete(sizes)
            checked[spec.name] = np.frombuffer(os.urandom(4 * math.prod(shape)), np.uint32).reshape(shape)
            kept.add(spec.name)
    return CheckedTensors(checked, sizes, row_lengths, frozenset(kept))


def pad(signature: Signature, bucket: Bucket, checked: CheckedTensors) -> tuple[Array, ...]:
    """The inputs of the bucket's program, in order of name, for a request that fits the bucket.

    Padding holds each tensor's pad value. A `lengths` input holds the rows' true sizes, and 1 for padding rows: a
    division by the length stays finite there. A tensor left out holds its default where the request has elements, its
    pad value elsewhere. Every array is new, or `owned` by the request; none is shared with the caller.
    """
    sizes = bucket.mapping()
    return tuple(
        _padded(spec, signature, sizes, checked) for spec in sorted(signature.inputs, key=lambda spec: spec.name)
    )


def cut(signature: Signature, sizes: Mapping[str, int], outputs: Sequence[Any]) -> dict[str, Array]:
    """The outputs by name, cut to the sizes of the request.

    Args:
      signature: of the function, outputs inferred.
      sizes: the request's own, `CheckedTensors.sizes`; rows that are ragged are cut to the longest.
      outputs: in order of name; NumPy arrays, or device arrays, which are copied to the host first.

    Returns:
      Arrays with memory of their own, never views of a device's buffer.
    """
    if not all(isinstance(output, np.ndarray) for output in outputs):
        import jax

        outputs = jax.device_get(list(outputs))
    specs = sorted(signature.outputs, key=lambda spec: spec.name)
    result: dict[str, Array] = {}
    for spec, output in zip(specs, outputs, strict=True):
        region = tuple(slice(_size(dim, sizes)) for dim in spec.shape)
        result[spec.name] = np.array(output[region], order="C")
    return result


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return sizes[dim] if dim in sizes else evaluate_dim(dim, sizes)


def _padded(spec: TensorSpec, signature: Signature, bucket: Mapping[str, int], checked: CheckedTensors) -> Array:
    value = checked.tensors.get(spec.name)
    shape = tuple(dim if isinstance(dim, int) else bucket[dim] for dim in spec.shape)
    if isinstance(value, Ragged):
        buffer = _filled(spec, shape)
        by_row = np.moveaxis(buffer, value.axis, 1)
        region = by_row[(slice(len(value.lengths)), slice(None), *map(slice, value.flat.shape[1:]))]
        region[np.arange(shape[value.axis]) < value.lengths[:, None]] = value.flat
        return buffer
    if value is None and spec.name in signature.lengths:
        return _lengths(spec, signature.lengths[spec.name], shape, checked)
    if value is None:
        return _default(spec, signature.batch, shape, checked)
    if value.shape == shape:
        if spec.name in checked.owned and value.flags.c_contiguous:
            return value
        buffer = _new(shape, value.dtype, np.empty)
        buffer[...] = value
        return buffer
    if spec.name in signature.lengths:
        spec = TensorSpec(spec.name, spec.dtype, spec.shape, pad=1)
    buffer = _filled(spec, shape)
    buffer[tuple(map(slice, value.shape))] = value
    return buffer


def _lengths(spec: TensorSpec, dim: str, shape: tuple[int, ...], checked: CheckedTensors) -> Array:
    buffer = np.ones(shape, numpy_dtype(spec.dtype))
    rows = tuple(map(slice, spec.concrete(checked.sizes)))
    buffer[rows] = checked.row_lengths.get(dim, checked.sizes[dim])
    return buffer


def _default(spec: TensorSpec, batch: str | None, shape: tuple[int, ...], checked: CheckedTensors) -> Array:
    buffer = _filled(spec, shape)
    true_shape = spec.concrete(checked.sizes)
    buffer[tuple(map(slice, true_shape))] = spec.default
    if batch is None or not spec.shape or spec.shape[0] != batch:
        return buffer
    for axis, dim in enumerate(spec.shape[1:], start=1):
        if isinstance(dim, str) and dim in checked.row_lengths:
            lengths = checked.row_lengths[dim]
            beyond = np.arange(shape[axis]) >= lengths[:, None]
            np.moveaxis(buffer, axis, 1)[: len(lengths)][beyond] = spec.pad
    return buffer


def _filled(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    if spec.pad == 0:
        return _new(shape, numpy_dtype(spec.dtype), np.zeros)
    buffer = _new(shape, numpy_dtype(spec.dtype), np.empty)
    buffer.fill(spec.pad)
    return buffer


def _new(shape: tuple[int, ...], dtype: np.dtype, allocate: Callable[[Any, Any], Array]) -> Array:
    """A new array; a large one is aligned so that a CPU device takes it without a copy."""
    large = math.prod(shape) * dtype.itemsize >= _ALIGNED_FROM
    return aligned(shape, dtype, allocate) if large else allocate(shape, dtype)


def _check_shape(spec: TensorSpec, value: Array | Ragged, sizes: dict[str, int], origin: dict[str, str]) -> list[Fault]:
    """Faults of a tensor's sizes; fills in the sizes of dimensions seen for the first time and where they came from."""
    seen: list[str] = []
    expected: list[str] = []
    for dim, size in zip(spec.shape, value.shape, strict=True):
        if isinstance(dim, int):
            if size != dim:
                seen.append(f"size {size}")
                expected.append(f"{dim}")
        elif size == 0:
            seen.append(f"{dim}=0")
            expected.append(f"{dim} at least 1")
        elif sizes.setdefault(dim, size) != size:
            seen.append(f"{dim}={size}")
            expected.append(f"{dim}={sizes[dim]}, as in {origin[dim]}")
        else:
            origin.setdefault(dim, spec.name)
    if not seen:
        return []
    shape = described(value) if isinstance(value, np.ndarray) else f"{spec.dtype}{list(value.shape)}"
    return [Fault(spec.name, f"{shape}: {', '.join(seen)}", f"{spec.text()}: {', '.join(expected)}")]


def _missing_and_unknown(signature: Signature, tensors: Mapping[str, Any]) -> list[Fault]:
    names = {spec.name for spec in signature.inputs}
    missing = [spec for spec in signature.inputs if spec.name not in tensors and not _optional(spec, signature)]
    faults = [Fault(spec.name, "missing", spec.text()) for spec in missing]
    known = ", ".join(sorted(names)) or "no inputs"
    return faults + [Fault(name, "unknown", f"one of {known}") for name in tensors if name not in names]


def _undetermined(signature: Signature, sizes: Mapping[str, int], checked: Mapping[str, Any]) -> list[Fault]:
    """Inputs that may be left out but whose dimension then has no size."""
    return [
        Fault(spec.name, f"left out, but no other tensor has its dimension {dim!r}", spec.text())
        for spec in signature.inputs
        if spec.name not in checked
        for dim in spec.dims
        if dim not in sizes
    ]


def _row_lengths(
    signature: Signature, checked: Mapping[str, Array | Ragged], sizes: Mapping[str, int]
) -> tuple[dict[str, Array], list[Fault]]:
    """True sizes row by row, from ragged tensors and from `lengths` inputs that the request carries."""
    lengths: dict[str, Array] = {}
    origin: dict[str, str] = {}
    faults: list[Fault] = []
    for spec in signature.inputs:
        value = checked.get(spec.name)
        if isinstance(value, Ragged):
            dim, rows = str(spec.shape[value.axis]), value.lengths
        elif value is not None and spec.name in signature.lengths:
            dim, rows = signature.lengths[spec.name], value
            if rows.min() < 1 or rows.max() > sizes[dim]:
                faults.append(Fault(spec.name, f"values from {rows.min()} to {rows.max()}", f"1 to {dim}={sizes[dim]}"))
                continue
        else:
            continue
        if dim not in lengths:
            lengths[dim], origin[dim] = rows, spec.name
        elif not np.array_equal(lengths[dim], rows):
            faults.append(
                Fault(
                    spec.name,
                    f"rows of {dim} " + ", ".join(map(str, rows[:8])),
                    f"as in {origin[dim]}: " + ", ".join(map(str, lengths[dim][:8])),
                )
            )
    return lengths, faults


def _is_seed(spec: TensorSpec) -> bool:
    return spec.name == SEED and spec.dtype == "uint32" and spec.default is None


def _optional(spec: TensorSpec, signature: Signature) -> bool:
    return spec.default is not None or spec.name in signature.lengths or _is_seed(spec)


def _invalid(faults: Sequence[Fault]) -> InvalidInput:
    if len(faults) == 1:
        (fault,) = faults
        return InvalidInput(
            f"the tensor {fault.tensor!r} does not fit the signature",
            where=fault.tensor,
            seen=fault.seen,
            expected=fault.expected,
            remedy=fault.remedy,
        )
    remedies = dict.fromkeys(fault.remedy for fault in faults if fault.remedy)
    return InvalidInput(
        f"{len(faults)} tensors do not fit the signature",
        where=", ".join(dict.fromkeys(fault.tensor for fault in faults)),
        seen="; ".join(f"{fault.tensor}: {fault.seen}" for fault in faults),
        expected="; ".join(f"{fault.tensor}: {fault.expected}" for fault in faults),
        remedy="; ".join(remedies) or None,
    )
