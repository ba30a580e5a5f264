"""Requests that run together: joined in a bucket's buffers, run once, cut apart, answered all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from servax.core.errors import ExecutionError, RecompileError, ServaxError
from servax.core.events import BatchDone, emit
from servax.runtime.answers import Answer, Outcome, deliver
from servax.runtime.buffers import BufferPool
from servax.runtime.costs import Costs
from servax.runtime.pending import PendingRequest, own
from servax.runtime.request import InferResult
from servax.runtime.watch import Watch
from servax.stages.buckets import Bucket

if TYPE_CHECKING:
    from servax.runtime.batcher import Batcher
    from servax.runtime.lane import Lane


@dataclass(frozen=True, slots=True)
class Equipment:
    """What the batches of one servable run with.

    Attributes:
      servable: its name.
      version: its version.
    """

    servable: str
    version: str
    watch: Watch
    costs: Costs
    buffers: BufferPool


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Requests joined in buffers.

    Attributes:
      buffers: lent by the pool, to be given back.
      inputs: what the program takes: the buffers, arrays of a request in their place, or what became of both on the
        device.
      began: when joining began; what came before is the queue's.
      seconds: that joining took.
    """

    buffers: tuple[np.ndarray[Any, Any], ...]
    inputs: tuple[Any, ...]
    began: float
    seconds: float


class Batch:
    """One run on the device, as the executor takes it.

    Args:
      equipment: of the servable.
      batcher: that it came from, which is told when it is done.
      lane: of its function.
      bucket: that runs.
      requests: that fit into it together; each leaves with its answer.
      late: requests whose deadline passed in the queue, which are answered first and do not run.
    """

    def __init__(  # noqa: PLR0917
        self,
        equipment: Equipment,
        batcher: Batcher,
        lane: Lane,
        bucket: Bucket,
        requests: Sequence[PendingRequest],
        late: Sequence[PendingRequest] = (),
    ) -> None:
        self._equipment = equipment
        self._batcher = batcher
        self._lane = lane
        self._bucket = bucket
        self._requests = requests
        self._late = late
        self._prepared: _Prepared | None = None

    def begin(self) -> bool:
        for request in self._late:
            request.fail(request.lateness())
        self._late = ()
        return bool(self._requests)

    def prepare(self) -> None:
        try:
            self._prepared = self._prepare(self._bucket, self._requests, ahead=True)
        except ServaxError:
            self._prepared = None  # said when it is its turn

    def run(self, meanwhile: Callable[[], None] | None) -> None:
        try:
            outcomes = self._run(self._bucket, self._requests, meanwhile)
        except ServaxError as error:
            outcomes = self._apart(error)
        self._batcher.done(len(self._requests))
        deliver(outcomes)

    def fail(self, error: ServaxError) -> None:
        self._batcher.done(len(self._requests))
        for request in (*self._requests, *self._late):
            request.fail(error)

    def _apart(self, error: ServaxError) -> list[tuple[Answer, Outcome]]:
        """The answers after the whole batch failed: one request may be what the program refuses, so each runs alone."""
        if len(self._requests) == 1 or isinstance(error, RecompileError):
            return [(request.answer, own(error)) for request in self._requests]
        outcomes: list[tuple[Answer, Outcome]] = []
        for request in self._requests:
            try:
                outcomes += self._run(self._lane.bucket(request.shape, request.rows), [request])
            except ServaxError as alone:
                outcomes.append((request.answer, alone))
        return outcomes

    def _prepare(self, bucket: Bucket, requests: Sequence[PendingRequest], *, ahead: bool) -> _Prepared:
        """The requests joined in buffers, and with `ahead` on their way to the device."""
        pool, joiner, key = self._equipment.buffers, self._lane.joiner, (self._lane.name, bucket)
        began = time.perf_counter()
        buffers = pool.take(key, joiner.buffers)
        try:
            inputs = joiner.fill(buffers, [request.checked for request in requests])
            padded = time.perf_counter()
            return _Prepared(buffers, self._equipment.watch.put(inputs) if ahead else inputs, began, padded - began)
        except Exception as error:
            pool.give_back(key, buffers)
            raise _failed(error) from error

    def _run(
        self, bucket: Bucket, requests: Sequence[PendingRequest], meanwhile: Callable[[], None] | None = None
    ) -> list[tuple[Answer, Outcome]]:
        equipment, lane = self._equipment, self._lane
        key = (lane.name, bucket)
        prepared, self._prepared = self._prepared or self._prepare(bucket, requests, ahead=False), None
        try:
            outputs, steps = equipment.watch.run(lane.name, bucket, prepared.inputs, meanwhile)
            ran = time.perf_counter()
            tensors = lane.joiner.cut([request.checked for request in requests], outputs)
            del outputs
        except ServaxError:
            raise
        except Exception as error:
            raise _failed(error) from error
        finally:
            equipment.buffers.give_back(key, prepared.buffers)
        done = time.perf_counter()
        equipment.costs.observe(key, sum(steps.values()))
        steps = {"pad": prepared.seconds, **steps}
        steps["copy"] += done - ran
        self._tell(bucket, requests, steps, prepared.began, done)
        label, version = bucket.label, equipment.version
        return [
            (request.answer, InferResult(each, label, {"queue": prepared.began - request.came, **steps}, version))
            for request, each in zip(requests, tensors, strict=True)
        ]

    def _tell(
        self, bucket: Bucket, requests: Sequence[PendingRequest], steps: Mapping[str, float], began: float, done: float
    ) -> None:
        batch = self._lane.signature.batch
        emit(
            BatchDone(
                servable=self._equipment.servable,
                version=self._equipment.version,
                function=self._lane.name,
                bucket=bucket.label,
                capacity=dict(bucket.sizes).get(batch or "", 1),
                rows=sum([request.rows for request in requests]),
                steps=steps,
                queued=tuple([began - request.came for request in requests]),
                seconds=tuple([done - request.came for request in requests]),
                sizes=tuple([request.checked.sizes for request in requests]),
            )
        )


def _failed(error: Exception) -> ExecutionError:
    return ExecutionError("the batch failed on the way to the device", seen=f"{type(error).__name__}: {error}")
