"""A request's tensors: checked against the signature, padded up to a bucket, and its outputs cut back."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
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
        region = tuple(slice(size_of(dim, sizes)) for dim in spec.shape)
        result[spec.name] = np.array(output[region], order="C")
    return result


def size_of(dim: Dim, sizes: Mapping[str, int]) -> int:
    """`core.tensors.evaluate_dim`, quick for plain names."""
    if isinstance(dim, int):
        return dim
    return sizes[dim] if dim in sizes else evaluate_dim(dim, sizes)


def write(signature: Signature, spec: TensorSpec, into: Array, checked: CheckedTensors) -> None:
    """Writes one input of a request into an array of at least its size, and padding into the rest; see `pad`."""
    value = checked.tensors.get(spec.name)
    if isinstance(value, Ragged):
        into.fill(spec.pad)
        by_row = np.moveaxis(into, value.axis, 1)
        region = by_row[(slice(len(value.lengths)), slice(None), *map(slice, value.flat.shape[1:]))]
        region[np.arange(into.shape[value.axis]) < value.lengths[:, None]] = value.flat
    elif value is not None:
        if value.shape != into.shape:
            into.fill(1 if spec.name in signature.lengths else spec.pad)
        into[tuple(map(slice, value.shape))] = value
    elif spec.name in signature.lengths:
        dim = signature.lengths[spec.name]
        into.fill(1)
        into[tuple(map(slice, spec.concrete(checked.sizes)))] = checked.row_lengths.get(dim, checked.sizes[dim])
    else:
        _write_default(spec, signature.batch, into, checked)


def new_buffer(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array, not filled; a large one is aligned so that a CPU device takes it without a copy."""
    large = math.prod(shape) * dtype.itemsize >= _ALIGNED_FROM
    return aligned(shape, dtype) if large else np.empty(shape, dtype)


def _padded(spec: TensorSpec, signature: Signature, bucket: Mapping[str, int], checked: CheckedTensors) -> Array:
    value = checked.tensors.get(spec.name)
    shape = tuple(dim if isinstance(dim, int) else bucket[dim] for dim in spec.shape)
    if isinstance(value, np.ndarray) and spec.name in checked.owned and passes(value, shape):
        return value
    buffer = new_buffer(shape, numpy_dtype(spec.dtype))
    write(signature, spec, buffer, checked)
    return buffer


def passes(value: Array, shape: tuple[int, ...]) -> bool:
    """Whether an array can go to the device as it is, in place of a buffer of this shape."""
    return value.shape == shape and value.flags.c_contiguous


def _write_default(spec: TensorSpec, batch: str | None, into: Array, checked: CheckedTensors) -> None:
    into.fill(spec.pad)
    true_shape = spec.concrete(checked.sizes)
    into[tuple(map(slice, true_shape))] = spec.default
    if batch is None or not spec.shape or spec.shape[0] != batch:
        return
    for axis, dim in enumerate(spec.shape[1:], start=1):
        if isinstance(dim, str) and dim in checked.row_lengths:
            lengths = checked.row_lengths[dim]
            beyond = np.arange(into.shape[axis]) >= lengths[:, None]
            np.moveaxis(into, axis, 1)[: len(lengths)][beyond] = spec.pad


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
    missing = [spec for spec in signature.inputs if spec.name not in tensors and not is_optional(spec, signature)]
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


def is_optional(spec: TensorSpec, signature: Signature) -> bool:
    """Whether a request may leave this input out."""
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
