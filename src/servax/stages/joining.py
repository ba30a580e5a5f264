"""Requests of one function joined in a bucket's buffers, and its outputs cut apart again: rows stay whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from servax.core.buffers import aligned
from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.stages.conversion import Array, Ragged
from servax.stages.padding import CheckedTensors, passes, size_of, write

_COMPARED = 1 << 12
"""Bytes of an input that requests may share; two larger ones are not compared, and their requests run apart."""

_SHARED_COPY = 1 << 20
"""Bytes of an output that is copied once for all its requests. Rows of a larger one are copied one by one, so that
who keeps one row does not keep them all."""


class Joiner:
    """How the requests of one function are joined.

    Attributes:
      joins: whether several requests may run together: every output tells its rows apart, or does not depend on them.
      splits: whether a request may run in parts: inputs and outputs have rows throughout.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        batch = signature.batch
        self._inputs = tuple(
            (spec, _axis(spec, batch), all(isinstance(dim, int) for dim in spec.shape[1:]))
            for spec in sorted(signature.inputs, key=lambda spec: spec.name)
        )
        self._outputs = tuple(
            (spec, _axis(spec, batch), all(isinstance(dim, int) for dim in spec.shape[1:]))
            for spec in sorted(signature.outputs, key=lambda spec: spec.name)
        )
        self._shared = tuple(spec for spec, axis, _ in self._inputs if axis is None)
        mixed = any(
            (axis is None and batch in spec.dims) or spec.shape.count(str(batch)) > 1
            for spec, axis, _ in (*self._inputs, *self._outputs)
        )
        self.joins = batch is not None and batch in signature.dims and not mixed
        self.splits = self.joins and all(axis is not None for _, axis, _ in self._outputs)

    def key(self, checked: CheckedTensors) -> object:
        """What requests must have in common to be joined: the inputs without rows; None where there are none."""
        if not self._shared:
            return None
        parts: list[object] = []
        for spec in self._shared:
            value = checked.tensors.get(spec.name)
            if value is None:
                parts.append(tuple(checked.sizes[dim] for dim in spec.dims))
            elif isinstance(value, Ragged) or value.nbytes > _COMPARED:
                return object()  # equal to nothing else
            else:
                parts.append((value.shape, value.tobytes()))
        return tuple(parts)

    def buffers(self, bucket: Bucket) -> tuple[Array, ...]:
        """New host buffers of a bucket, in order of input name, on boundaries that a CPU device takes as they are."""
        sizes = bucket.mapping()
        return tuple(aligned(spec.concrete(sizes), spec.numpy_dtype) for spec, _, _ in self._inputs)

    def fill(self, buffers: Sequence[Array], requests: Sequence[CheckedTensors]) -> tuple[Array, ...]:
        """The requests, one below the other, in the buffers of a bucket that holds them, with padding around them.

        An owned array of a request that is alone and has the bucket's very shape takes the buffer's place.
        """
        return tuple(
            self._filled(buffer, spec, axis, fixed, requests)
            for buffer, (spec, axis, fixed) in zip(buffers, self._inputs, strict=True)
        )

    def cut(self, requests: Sequence[CheckedTensors], outputs: Sequence[Array]) -> list[dict[str, Array]]:
        """Each request's outputs by name, cut to its own sizes; memory of their own, never a view of the device's."""
        starts = self._starts(requests)
        results: list[dict[str, Array]] = [{} for _ in requests]
        for (spec, axis, fixed), output in zip(self._outputs, outputs, strict=True):
            if axis == 0 and fixed and output.nbytes <= _SHARED_COPY:
                whole = np.array(output[: starts[-1]], order="C")
                if len(requests) == 1:
                    results[0][spec.name] = whole
                    continue
                for index, result in enumerate(results):
                    result[spec.name] = whole[starts[index] : starts[index + 1]]
                continue
            for index, result in enumerate(results):
                sizes = requests[index].sizes
                region = [slice(size_of(dim, sizes)) for dim in spec.shape]
                if axis is not None:
                    region[axis] = slice(starts[index], starts[index + 1])
                result[spec.name] = np.array(output[tuple(region)], order="C")
        return results

    def rows(self, checked: CheckedTensors) -> int:
        """How many rows a request has; 1 where there is no batch dimension."""
        batch = self._signature.batch
        return 1 if batch is None else checked.sizes.get(batch, 1)

    def split(self, checked: CheckedTensors, most: int) -> tuple[CheckedTensors, ...]:
        """The request in parts of at most `most` rows; sizes but the rows stay those of the whole."""
        rows = self.rows(checked)
        return tuple(self._part(checked, start, min(start + most, rows)) for start in range(0, rows, most))

    def rejoin(self, parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """The outputs of a request that ran in parts."""
        return {
            spec.name: np.concatenate([part[spec.name] for part in parts], axis or 0) for spec, axis, _ in self._outputs
        }

    def _filled(
        self, buffer: Array, spec: TensorSpec, axis: int | None, fixed: bool, requests: Sequence[CheckedTensors]
    ) -> Array:
        signature = self._signature
        if len(requests) == 1 or axis is None:
            checked = requests[0]
            value = checked.tensors.get(spec.name)
            if isinstance(value, np.ndarray) and spec.name in checked.owned and passes(value, buffer.shape):
                return value
            write(signature, spec, buffer, checked)
            return buffer
        if axis == 0 and fixed and spec.name not in signature.lengths:
            values = [checked.tensors.get(spec.name) for checked in requests]
            arrays = [value for value in values if type(value) is np.ndarray]
            if len(arrays) == len(requests):
                end = sum([len(array) for array in arrays])
                np.concatenate(arrays, out=buffer[:end])
                buffer[end:] = spec.pad
                return buffer
        by_row = np.moveaxis(buffer, axis, 0)
        start = 0
        for checked in requests:
            end = start + self.rows(checked)
            write(signature, spec, np.moveaxis(by_row[start:end], 0, axis), checked)
            start = end
        by_row[start:] = 1 if spec.name in signature.lengths else spec.pad
        return buffer

    def _starts(self, requests: Sequence[CheckedTensors]) -> list[int]:
        starts = [0]
        for checked in requests:
            starts.append(starts[-1] + self.rows(checked))
        return starts

    def _part(self, checked: CheckedTensors, start: int, end: int) -> CheckedTensors:
        tensors = dict(checked.tensors)
        for spec, axis, _ in self._inputs:
            value = tensors.get(spec.name)
            if value is None or axis is None:
                continue
            if isinstance(value, Ragged):
                tensors[spec.name] = _ragged_part(value, start, end)
            else:
                tensors[spec.name] = value[(slice(None),) * axis + (slice(start, end),)]
        return replace(
            checked,
            tensors=tensors,
            sizes={**checked.sizes, str(self._signature.batch): end - start},
            row_lengths={dim: lengths[start:end] for dim, lengths in checked.row_lengths.items()},
        )


def nbytes(checked: CheckedTensors) -> int:
    """Bytes of a request's tensors."""
    total = 0
    for value in checked.tensors.values():
        total += value.flat.nbytes + value.lengths.nbytes if isinstance(value, Ragged) else value.nbytes
    return total


def _axis(spec: TensorSpec, batch: str | None) -> int | None:
    """The axis of a tensor's rows; None where it has none."""
    return spec.shape.index(batch) if batch is not None and batch in spec.shape else None


def _ragged_part(value: Ragged, start: int, end: int) -> Ragged:
    first, last = int(value.lengths[:start].sum()), int(value.lengths[:end].sum())
    return Ragged(value.flat[first:last], value.lengths[start:end], value.axis)
