"""What a file of rows and a function have in common, decided before the first row is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core.errors import UsageError
from servax.core.tensors import Signature
from servax.workflow.rows import Layout, RowSource, layouts

_CHUNK_ROWS = 1024
_CHUNK_BYTES = 32 * 2**20
_ELEMENTS = 128
"""Assumed of a row of an output whose rows differ in length."""


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """How a file is worked through.

    Attributes:
      outputs: names of those that are kept; all where empty.
      chunk: rows that are read, computed and stored at a time; None: as many as fit into 32 MiB, at most 1024.
      request: the most rows of one request; None: of the bucket that costs least a row (32 against a server).
      in_flight: requests that are on their way at a time; None: 8, and 64 where each has but one row.
      restart: begin anew, whatever partial results are there.
    """

    outputs: Sequence[str] = ()
    chunk: int | None = None
    request: int | None = None
    in_flight: int | None = None
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a file and a function have in common.

    Attributes:
      names: inputs that the file has a column of.
      dims: those in which rows differ and whose size is known of each row, by the input that tells.
      alone: whether each row must be a request of its own.
    """

    signature: Signature
    names: tuple[str, ...]
    outputs: tuple[Layout, ...]
    rows: int
    chunk: int
    dims: Mapping[str, tuple[str, int]]
    alone: bool

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.rows // self.chunk)


def plan_of(
    function: str, signature: Signature, texts: Mapping[str, str], rows: RowSource, options: OfflineOptions
) -> Plan:
    """The plan of a function and a file.

    Args:
      function: its name.
      signature: its tensors.
      texts: text tensors that it takes, each with the input it is turned into.
      rows: the file.
      options: sizes and limits.

    Raises:
      UsageError: no column is an input, columns differ in their number of rows, or an output cannot be stored by row.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    names = tuple(name for name in rows.counts if name in specs or name in texts)
    batch = signature.batch
    if not names:
        raise UsageError(
            f"no column is an input of {function}",
            where=rows.path,
            seen=", ".join(rows.counts) or "no columns",
            expected=", ".join([*specs, *texts]),
        )
    counts = {name: rows.counts[name] for name in names}
    if len(set(counts.values())) > 1:
        raise UsageError(
            "columns differ in their number of rows",
            where=rows.path,
            seen=", ".join(f"{name}: {count}" for name, count in counts.items()),
        )
    sizes: dict[str, int] = {}
    dims: dict[str, tuple[str, int]] = {}
    for name in names:
        if name not in specs:
            continue
        of_row = [dim for dim in specs[name].shape if dim != batch]
        shape = rows.shapes[name]
        for axis, dim in enumerate(of_row):
            if isinstance(dim, str) and shape is not None and len(shape) == len(of_row):
                sizes[dim] = shape[axis]
            elif isinstance(dim, str) and shape is None:
                dims.setdefault(dim, (name, axis))
    dims = {dim: where for dim, where in dims.items() if dim not in sizes}
    outputs = layouts(signature, sizes, options.outputs)
    unknown = [each.name for each in outputs if each.axis is not None and not _told(signature, each.name, dims)]
    alone = batch is None or bool(unknown)
    out_bytes = sum(
        each.dtype.itemsize * int(np.prod(each.shape)) * (1 if each.axis is None else _ELEMENTS) for each in outputs
    )
    fitting = _CHUNK_BYTES // max(1, rows.row_bytes, out_bytes)
    count = next(iter(counts.values()))
    chunk = options.chunk or max(1, min(_CHUNK_ROWS, fitting))
    return Plan(signature, names, outputs, count, chunk, dims, alone)


def _told(signature: Signature, output: str, dims: Mapping[str, Any]) -> bool:
    """Whether a row's own size of an output follows from its inputs."""
    return all(dim in dims for dim in signature.output(output).dims if dim != signature.batch)
