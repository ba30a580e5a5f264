"""A file of rows in, a file of rows out: many requests in flight, memory bounded, errors by row, and resumable."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core.errors import (
    ExecutionError,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    RequestError,
    UsageError,
)
from servax.core.events import StepAdvanced, StepFinished, StepStarted, emit
from servax.core.tensors import TensorSpec, evaluate_dim
from servax.runtime.local import LocalServable
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import Servable, default_function
from servax.stages.buckets import Bucket
from servax.workflow.journal import Journal
from servax.workflow.offline_plan import OfflineOptions, Plan, plan_of
from servax.workflow.rows import Array, Column, Gathered, RowSource, open_rows

STEP = "predict"
"""The step whose parts are chunks; the details of its events say how many rows are done."""

_REMOTE_ROWS = 32
_PATIENCE = 60.0
_TAIL = 1 << 20


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """What came of it.

    Attributes:
      rows: of the file.
      failed: rows without an answer.
      resumed: rows that an earlier run had computed.
      seconds: of this run.
      first_error: what was wrong with the first row that has no answer.
    """

    rows: int
    failed: int
    resumed: int
    seconds: float
    first_error: str | None = None


def predict_rows(
    servable: Servable,
    source: str,
    output: str,
    *,
    function: str | None = None,
    identity: str = "",
    options: OfflineOptions | None = None,
) -> OfflineReport:
    """Calls a function with every row of a file, and writes the answers in the same order.

    What cannot be computed of a row (an input that does not fit, a failure of the device) is that row's error; the
    others have their answers. A run that was ended goes on where it was.

    Args:
      servable: in this process, or behind a URL.
      source: an `.npz` or `.parquet` file, a column for each input.
      output: the file to write; `.npz` or `.parquet`, whatever `source` is.
      function: `predict`, or the only one, unless named.
      identity: names the servable's weights and programs; partial results of another identity are refused.
      options: sizes and limits.

    Raises:
      UsageError: a file cannot be used, the function has a state, or partial results are of another task.
      ServiceError: the servable is gone, or takes no request for a minute; the next run goes on from here.
    """
    options = options or OfflineOptions()
    name = default_function(function, servable.signatures)
    if name not in servable.signatures:
        raise NotFound(f"{servable.name} has no function {name!r}", expected=" or ".join(sorted(servable.signatures)))
    if isinstance(servable, LocalServable) and name in servable.stateful:
        raise UsageError(f"{name} has a state, so that what a row gives depends on the rows before it", where=name)
    if os.path.splitext(output)[1] not in (".npz", ".parquet"):
        raise UsageError("the kind of the output is told by its ending", seen=output, expected=".npz or .parquet")
    began = time.perf_counter()
    rows = open_rows(source, servable.signatures[name])
    try:
        plan = plan_of(name, servable.signatures[name], servable.texts.get(name, {}), rows, options)
        task = {
            "input": _fingerprint(source),
            "model": [servable.name, servable.version, identity],
            "function": name,
            "outputs": [[each.name, str(each.dtype), list(each.shape)] for each in plan.outputs],
            "rows": plan.rows,
            "rows in a chunk": plan.chunk,
        }
        with Journal(output, task, restart=options.restart) as journal:
            resumed = asyncio.run(_Run(servable, name, rows, plan=plan, journal=journal, options=options).all())
            errors = journal.errors(plan.chunks)
            journal.finish(lambda path: _write(path, plan, journal, errors))
    finally:
        rows.close()
    seconds = time.perf_counter() - began
    emit(StepFinished(STEP, seconds))
    first = f"row {errors[0][0]}: {errors[0][1]}" if errors else None
    return OfflineReport(plan.rows, len(errors), resumed, seconds, first)


class _Run:
    """One run over a file."""

    def __init__(
        self,
        servable: Servable,
        function: str,
        rows: RowSource,
        *,
        plan: Plan,
        journal: Journal,
        options: OfflineOptions,
    ) -> None:
        self._servable = servable
        self._function = function
        self._rows = rows
        self._plan = plan
        self._journal = journal
        self._limit = options.request
        self._in_flight = asyncio.Semaphore(options.in_flight or (64 if plan.alone else 8))
        self._chunks = asyncio.Semaphore(2)  # one is computed while the next is read and the last one stored
        self._done = 0
        self._failed = 0
        self._local = isinstance(servable, LocalServable)
        self._costs: dict[Bucket, float] = {}
        if isinstance(servable, LocalServable):
            costs = servable.costs
            self._costs = {bucket: costs.get((function, bucket), 1.0) for bucket in servable.grid[function]}

    async def all(self) -> int:
        """Computes every chunk that is not done; gives the rows that were."""
        plan, resumed = self._plan, 0
        emit(StepStarted(STEP, plan.chunks))
        chunks = self._rows.chunks(plan.names, plan.chunk)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(plan.chunks):
                    await self._chunks.acquire()
                    columns = await asyncio.to_thread(next, chunks, None)
                    if columns is None:
                        raise UsageError("the file ends before its last row", where=self._rows.path)
                    if self._journal.done(index):
                        resumed += min(plan.chunk, plan.rows - index * plan.chunk)
                        self._tell(columns)
                        self._chunks.release()
                        continue
                    group.create_task(self._chunk(index, columns))
                    del columns
        except BaseExceptionGroup as group:
            raise _first(group) from None
        return resumed

    async def _chunk(self, index: int, columns: dict[str, Column]) -> None:
        count = len(columns[self._plan.names[0]])
        gathered = Gathered(self._plan.outputs, count)
        errors: dict[int, str] = {}
        for name in self._plan.names:
            column = columns[name]
            for row in range(count) if isinstance(column, list) else ():
                if column[row] is None:
                    errors[row] = InvalidInput("a value is missing", where=name, seen="null").sentence()
        usable = [row for row in range(count) if row not in errors]
        lengths = self._lengths(columns, count)
        usable.sort(key=lambda row: lengths[row])
        async with asyncio.TaskGroup() as group:
            for rows in self._groups(usable, lengths):
                group.create_task(self._answer(rows, columns, gathered, errors))
        start = index * self._plan.chunk
        await asyncio.to_thread(
            self._journal.put, index, gathered.arrays(), {start + row: text for row, text in errors.items()}
        )
        self._failed += len(errors)
        self._tell(columns)
        self._chunks.release()

    def _tell(self, columns: Mapping[str, Column]) -> None:
        self._done += len(columns[self._plan.names[0]])
        failed = f", {self._failed} without an answer" if self._failed else ""
        emit(StepAdvanced(STEP, f"{self._done} of {self._plan.rows} rows{failed}"))

    def _lengths(self, columns: Mapping[str, Column], count: int) -> list[tuple[int, ...]]:
        """Of each row, its own size of every dimension in which rows differ; neighbours in order run together."""

        def of(column: Column, row: int) -> int:
            return len(column[row]) if hasattr(column[row], "__len__") else 0

        differing = [name for name in self._plan.names if self._rows.shapes[name] is None]
        return [tuple(of(columns[name], row) for name in differing) for row in range(count)]

    def _groups(self, rows: Sequence[int], lengths: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """Rows in order of length, as many together as a bucket takes; the longest first."""
        groups: list[list[int]] = []
        left = list(rows)
        while left:
            most = 1 if self._plan.alone else self._limit or self._capacity(left[-1], lengths)
            groups.append(left[-most:])
            del left[-most:]
        return groups

    def _capacity(self, row: int, lengths: Sequence[tuple[int, ...]]) -> int:
        """Rows of the bucket that holds such a row and costs least a row; of equal ones the largest."""
        batch = self._plan.signature.batch
        if not self._local or batch is None:
            return _REMOTE_ROWS
        differing = [name for name in self._plan.names if self._rows.shapes[name] is None]
        sizes: dict[str, int] = {}
        for dim, (name, axis) in self._plan.dims.items():
            if axis == 0:
                sizes[dim] = lengths[row][differing.index(name)]
        fitting = [
            (cost / bucket[batch], -bucket[batch])
            for bucket, cost in self._costs.items()
            if all(bucket[dim] >= size for dim, size in sizes.items())
        ]
        return -min(fitting)[1] if fitting else 1

    async def _answer(
        self, rows: list[int], columns: Mapping[str, Column], gathered: Gathered, errors: dict[int, str]
    ) -> None:
        """The answers of rows that are sent together; of rows that cannot be, half of them at a time."""
        try:
            async with self._in_flight:
                result = await self._infer(InferRequest(self._function, self._tensors(rows, columns), owned=True))
            self._put(rows, columns, result, gathered)
        except (RequestError, ExecutionError) as error:
            if isinstance(error, NotFound):
                raise
            if len(rows) == 1:
                errors[rows[0]] = error.sentence()
                return
        else:
            return
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            await self._answer(half, columns, gathered, errors)

    async def _infer(self, request: InferRequest) -> InferResult:
        """Answers, with patience for a server that is busy or restarts."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return await self._servable.infer_async(request)
            except (Overloaded, NotReady) as error:
                if time.monotonic() > until or (self._local and isinstance(error, NotReady)):
                    raise
                await asyncio.sleep(float(getattr(error, "retry_after", None) or 1.0))

    def _tensors(self, rows: Sequence[int], columns: Mapping[str, Column]) -> dict[str, Any]:
        specs = {spec.name: spec for spec in self._plan.signature.inputs}
        tensors: dict[str, Any] = {}
        for name in self._plan.names:
            column = columns[name]
            if self._plan.signature.batch is None:
                tensors[name] = column[rows[0]]
            elif isinstance(column, np.ndarray):
                tensors[name] = _batched(column[rows], specs.get(name), self._plan.signature.batch)
            else:
                tensors[name] = [column[row] for row in rows]
        return tensors

    def _put(self, rows: Sequence[int], columns: Mapping[str, Column], result: InferResult, gathered: Gathered) -> None:
        signature = self._plan.signature
        for layout in self._plan.outputs:
            spec = signature.output(layout.name)
            value = result.tensors[layout.name]
            by_row = (
                value[None] if signature.batch is None else np.moveaxis(value, spec.shape.index(signature.batch), 0)
            )
            if len(by_row) != len(rows):
                raise InvalidInput(
                    "the answer has another number of rows", seen=str(len(by_row)), expected=str(len(rows))
                )
            for index, row in enumerate(rows):
                answer = by_row[index]
                if layout.axis is not None:
                    answer = np.moveaxis(answer, layout.axis, 0)
                    if not self._plan.alone:
                        answer = answer[: self._own_size(spec, layout.axis, columns, row)]
                gathered.put(row, layout.name, answer.astype(layout.dtype, copy=False))

    def _own_size(self, spec: TensorSpec, axis: int, columns: Mapping[str, Column], row: int) -> int:
        sizes: dict[str, int] = {}
        for dim, (name, place) in self._plan.dims.items():
            sizes[dim] = np.shape(columns[name][row])[place]
        dims = [dim for dim in spec.shape if dim != self._plan.signature.batch]
        return evaluate_dim(dims[axis], sizes)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of all that ended a run; the others followed from it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _batched(rows: Array, spec: TensorSpec | None, batch: str) -> Array:
    """Rows as the input has them, whose batch need not be its first axis."""
    axis = 0 if spec is None or batch not in spec.shape else spec.shape.index(batch)
    return np.moveaxis(rows, 0, axis) if axis else rows


def _write(path: str, plan: Plan, journal: Journal, errors: list[tuple[int, str]]) -> None:
    parts = [journal.part(chunk) for chunk in range(plan.chunks)]
    if path.endswith(".parquet"):
        from servax.workflow.parquet import write_parquet

        write_parquet(path, plan.outputs, plan.rows, parts, errors)
    else:
        from servax.workflow.npz import write_npz

        write_npz(path, plan.outputs, plan.rows, parts, errors)


def _fingerprint(path: str) -> str:
    """Tells one input from another without reading all of it: size, time of change, and the end, where a zip archive
    has the checksums of its members and a Parquet file its footer.
    """
    status = os.stat(path)
    with open(path, "rb") as file:
        file.seek(max(0, status.st_size - _TAIL))
        tail = hashlib.sha256(file.read()).hexdigest()
    return json.dumps([status.st_size, status.st_mtime_ns, tail[:16]])
