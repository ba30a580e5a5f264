"""What each bucket costs, measured before any bundle exists: time, rows per second, compilation, memory."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from servax.core.errors import UsageError
from servax.core.events import StepAdvanced, emit, step
from servax.core.table import Table, bytes_text, seconds_text
from servax.core.tensors import Signature
from servax.model.model import Model
from servax.runtime.local import LocalServable
from servax.runtime.request import InferRequest
from servax.runtime.stages_table import StageRow
from servax.stages.buckets import Bucket
from servax.targets.draws import Ranges, full

Sizes = Mapping[str, Sequence[int]]

_ROUNDS = 5
_FEWEST = 3
"""Runs of a bucket in a round; as many before the first round are not counted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One bucket.

    Attributes:
      sizes: by dimension.
      ran: label of the bucket that ran; another one where the planner found that to be much cheaper.
      rows: of a run; 1 without a batch dimension.
      runs: that were measured, one after the other.
      p50, p95: seconds from call to answer.
      device: median seconds of it on the device, with copies.
      compile: seconds of tracing, lowering and compiling; of loading, where an executable was there.
      program_bytes: of code and of temporary memory; None where XLA does not say.
      argument_bytes: of parameters and inputs.
    """

    sizes: Mapping[str, int]
    ran: str
    rows: int
    runs: int
    p50: float
    p95: float
    device: float
    compile: float
    program_bytes: int | None
    argument_bytes: int | None

    @property
    def label(self) -> str:
        """The bucket's label."""
        return Bucket.of(**self.sizes).label

    @property
    def rows_per_second(self) -> float:
        """Rows that it computes in a second, one run after the other."""
        return self.rows / self.p50


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements of one function, and the sizes worth keeping.

    Attributes:
      gain: by how much a size has to be better than the one before.
      kept: sizes by dimension.
      several: whether the model has other functions.
    """

    function: str
    batch: str | None
    measured: tuple[Measured, ...]
    gain: float
    kept: Sizes
    several: bool = False

    @property
    def bucket_options(self) -> str:
        """What to paste behind `servax build`."""
        prefix = f"{self.function}:" if self.several else ""
        return " ".join(f"--bucket {prefix}{dim}={','.join(map(str, sizes))}" for dim, sizes in self.kept.items())

    @property
    def rule(self) -> str:
        """Why these sizes and no others, of the dimensions that were swept."""
        swept = [dim for dim in self.kept if len({each.sizes[dim] for each in self.measured}) > 1]
        parts: list[str] = []
        if self.batch in swept:
            parts.append(f"a larger {self.batch} is kept if it computes {self.gain:.0%} more rows a second")
        if others := [dim for dim in swept if dim != self.batch]:
            parts.append(f"a smaller {' or '.join(others)} is kept if a run takes {self.gain:.0%} less time")
        return f"{'; '.join(parts)} than the size kept before it" if parts else "nothing was swept"

    def as_json(self) -> dict[str, Any]:
        """The measurements as JSON values."""
        return {
            "function": self.function,
            "buckets": [{**asdict(each), "rows_per_second": each.rows_per_second} for each in self.measured],
            "gain": self.gain,
            "kept": {dim: list(sizes) for dim, sizes in self.kept.items()},
            "bucket_options": self.bucket_options,
        }

    def table(self) -> Table:
        """A line a bucket."""
        lengths = [dim for dim in self.measured[0].sizes if dim != self.batch]
        per_second = ["tokens/s" if dim == "length" else f"{dim}/s" for dim in lengths]
        heads = (">rows/s", *(f">{head}" for head in per_second), ">p50", ">p95", ">device")
        return Table.of(
            f"{self.function}: one run after the other on an idle device",
            ("bucket", *heads, ">compile", ">code+temp", ">arguments", ">runs"),
            [
                (
                    each.label if each.ran == each.label else f"{each.label} (ran as {each.ran})",
                    f"{each.rows_per_second:,.0f}",
                    *(f"{each.rows_per_second * each.sizes[dim]:,.0f}" for dim in lengths),
                    *map(seconds_text, (each.p50, each.p95, each.device, each.compile)),
                    *("" if size is None else bytes_text(size) for size in (each.program_bytes, each.argument_bytes)),
                    each.runs,
                )
                for each in self.measured
            ],
        )


def only(model: Model, function: str, sizes: Sizes) -> tuple[Model, list[str]]:
    """The model with this function alone, and its buckets as `--bucket` takes them.

    Dimensions that are not in `sizes` have their largest default.

    Raises:
      UsageError: no such function or dimension, or a dimension has no size.
    """
    if function not in model.functions:
        raise UsageError(f"{model.name} has no function {function!r}", expected=" or ".join(sorted(model.functions)))
    chosen = model.functions[function]
    dims = chosen.signature.dims
    if unknown := [dim for dim in sizes if dim not in dims]:
        raise UsageError(
            f"{function} has no such dimension", seen=", ".join(unknown), expected=", ".join(dims) or "no dimensions"
        )
    whole = {dim: sizes.get(dim) or ([max(chosen.buckets[dim])] if chosen.buckets.get(dim) else []) for dim in dims}
    if missing := [dim for dim, of_dim in whole.items() if not of_dim]:
        raise UsageError(
            f"no size is given of {', '.join(missing)}",
            remedy=" ".join(f"--fix {dim}=SIZE, or --sweep {dim}=SIZE,SIZE" for dim in missing),
        )
    reduced = copy.copy(model)
    reduced.functions = {function: chosen}
    return reduced, [f"{dim}={','.join(map(str, of_dim))}" for dim, of_dim in whole.items()]


def measure(
    servable: LocalServable, function: str, *, seconds: float, gain: float, several: bool, sizes: Sizes
) -> Sweep:
    """Runs every bucket of a function that has these sizes, smallest first.

    Args:
      servable: READY, and with nobody else asking it.
      function: of the servable.
      seconds: that each bucket is run for, after warming up.
      gain: by how much a size has to be better than the one before to be kept.
      several: whether the model has other functions.
      sizes: of the dimensions that are not measured at all of their sizes.

    Raises:
      UsageError: there is no such bucket.
    """
    signature = servable.signatures[function]
    buckets = [
        bucket
        for bucket in servable.grid[function]
        if all(bucket.mapping().get(dim) in of_dim for dim, of_dim in sizes.items())
    ]
    if not buckets:
        raise UsageError(
            f"{function} has no bucket of these sizes",
            seen=", ".join(f"{dim}={','.join(map(str, of_dim))}" for dim, of_dim in sizes.items()),
            expected="; ".join(bucket.label for bucket in servable.grid[function]),
        )
    inputs = {bucket: inputs_of(signature, bucket) for bucket in buckets}
    times: dict[Bucket, list[_Run]] = {bucket: [] for bucket in buckets}
    with step("measure", _ROUNDS * len(buckets)):
        for bucket in buckets:
            _timed(servable, function, inputs[bucket], 0.0)
        for _ in range(_ROUNDS):  # in turns, so that what else the machine does falls on all of them
            for bucket in buckets:
                began = time.perf_counter()
                times[bucket] += _timed(servable, function, inputs[bucket], seconds / _ROUNDS)
                emit(StepAdvanced("measure", bucket.label, time.perf_counter() - began))
    programs = {row.program: row for row in servable.stages}
    measured = [
        _measured(bucket, signature.batch, times[bucket], programs[f"{function}@{bucket.label}"]) for bucket in buckets
    ]
    return Sweep(function, signature.batch, tuple(measured), gain, knee(measured, signature.batch, gain), several)


def inputs_of(signature: Signature, bucket: Bucket) -> dict[str, np.ndarray[Any, Any]]:
    """Drawn inputs of exactly these sizes; integers from 0 to 99."""
    return {name: draw.array() for name, draw in full(signature, bucket, Ranges(), bucket.label).items()}


def knee(measured: Sequence[Measured], batch: str | None, gain: float) -> dict[str, list[int]]:
    """The sizes worth keeping, by dimension, each judged at the largest of the others.

    Of the batch the smallest, and every larger one that computes more rows a second than the last one kept, by `gain`.
    Of another dimension the largest, and every smaller one whose run takes less time than the last one kept, by `gain`.
    """
    kept: dict[str, list[int]] = {}
    for dim in measured[0].sizes:
        others = [other for other in measured[0].sizes if other != dim]
        corner = max(measured, key=lambda each: [each.sizes[other] for other in others])
        line = [each for each in measured if all(each.sizes[other] == corner.sizes[other] for other in others)]
        line.sort(key=lambda each: each.sizes[dim], reverse=dim != batch)
        chosen = line[:1]
        for each in line[1:]:
            if dim == batch:
                better = each.rows_per_second >= chosen[-1].rows_per_second * (1 + gain)
            else:
                better = each.p50 <= chosen[-1].p50 * (1 - gain)
            if better:
                chosen.append(each)
        kept[dim] = sorted(each.sizes[dim] for each in chosen)
    return kept


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: seconds as its caller waited for it, and on the device, and the label of the bucket that ran."""

    wall: float
    device: float
    bucket: str


def _measured(bucket: Bucket, batch: str | None, times: list[_Run], program: StageRow) -> Measured:
    walls = [run.wall for run in times]
    memory = (program.code_bytes, program.temp_bytes)
    return Measured(
        sizes=bucket.mapping(),
        ran=statistics.mode(run.bucket for run in times),
        rows=1 if batch is None else bucket[batch],
        runs=len(times),
        p50=statistics.median(walls),
        p95=float(np.percentile(walls, 95)),
        device=statistics.median(run.device for run in times),
        compile=sum(filter(None, (program.trace, program.lower, program.compile, program.load))),
        program_bytes=None if None in memory else sum(filter(None, memory)),
        argument_bytes=program.argument_bytes,
    )


def _timed(servable: LocalServable, function: str, inputs: Mapping[str, Any], seconds: float) -> list[_Run]:
    """Runs for so long, at least `_FEWEST`."""
    times: list[_Run] = []
    until = time.perf_counter() + seconds
    while len(times) < _FEWEST or time.perf_counter() < until:
        began = time.perf_counter()
        result = servable.infer(InferRequest(function, inputs, owned=True))
        wall = time.perf_counter() - began
        device = sum(result.times[name] for name in ("transfer", "execute", "copy"))
        times.append(_Run(wall, device, result.bucket))
    return times
