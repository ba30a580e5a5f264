"""What the models of a data plane have done so far, counted from events and read by metrics and by the protocols.

A batch is told once, on the device's thread, so telling it is a few additions a request and nothing else.
"""

from __future__ import annotations

import math
import re
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from servax.core.events import BatchDone, Event, RequestFailed, subscribe

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, math.inf)
"""Upper bounds of a histogram's classes, in seconds."""

STEPS = ("pad", "transfer", "execute", "copy")
"""The steps of a batch."""

_VERSIONS = 32
"""Versions of one model that are remembered; of more, those that answered longest ago are forgotten."""

_FUNCTIONS = 64
"""Functions of one version that failures are counted for apart: their names come from clients."""


class Histogram:
    """Durations by class, `BOUNDS` being the upper bounds.

    Attributes:
      counts: how many fell into each class.
      seconds: their sum.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * len(BOUNDS)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def add_all(self, durations: tuple[float, ...]) -> None:
        counts = self.counts
        for seconds in durations:
            counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += sum(durations)

    def copy(self) -> Histogram:
        same = Histogram()
        same.counts, same.seconds = list(self.counts), self.seconds
        return same

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self.counts)


class BucketCounts:
    """What one bucket did.

    Attributes:
      positions: the product of the bucket's sizes, e.g. rows by tokens.
      batches: that ran in it.
      rows: of requests.
      padded_rows: beside those.
      used: positions that requests filled; the rest of `batches * positions` was padding.
    """

    __slots__ = ("batches", "padded_rows", "positions", "rows", "used")

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.batches = self.rows = self.padded_rows = self.used = 0

    def copy(self) -> BucketCounts:
        same = BucketCounts(self.positions)
        same.batches, same.rows, same.padded_rows, same.used = self.batches, self.rows, self.padded_rows, self.used
        return same


class FunctionCounts:
    """What one function of one version did.

    Attributes:
      statuses: requests by what became of them: `ok`, or the error's class.
      failed_seconds: time in all that requests took which were not answered.
      buckets: by label.
      request_seconds: of each answered request, from accepted to answered.
      queue_seconds: what each of them waited.
      step_seconds: of each batch, by step.
    """

    __slots__ = ("buckets", "failed_seconds", "queue_seconds", "request_seconds", "statuses", "step_seconds")

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.failed_seconds = 0.0
        self.buckets: dict[str, BucketCounts] = {}
        self.request_seconds = Histogram()
        self.queue_seconds = Histogram()
        self.step_seconds = {step: Histogram() for step in STEPS}

    def copy(self) -> FunctionCounts:
        same = FunctionCounts()
        same.statuses = dict(self.statuses)
        same.failed_seconds = self.failed_seconds
        same.buckets = {label: each.copy() for label, each in self.buckets.items()}
        same.request_seconds = self.request_seconds.copy()
        same.queue_seconds = self.queue_seconds.copy()
        same.step_seconds = {step: each.copy() for step, each in self.step_seconds.items()}
        return same


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something happened, and its nanoseconds in all."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The batches of one size, in rows: each step's count is how many batches there were."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """One version's statistics as the statistics extension has them.

    Attributes:
      last_inference: milliseconds since the epoch; 0 before the first.
      inference_count: rows that were computed.
      execution_count: batches that ran; rows by batches are the mean batch.
      success: requests that were answered, from accepted to answered.
      fail: requests that were not.
      queue: what the answered ones waited.
      compute_input: what they spent being padded and put on the device; each request counts its whole batch's time.
      compute_infer: what they spent running.
      compute_output: what they spent being copied back.
      batch_stats: by batch size, ascending.
    """

    name: str
    version: str
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    batch_stats: tuple[BatchStatistics, ...] = ()


class _Version:
    """The counts of one version, in seconds."""

    __slots__ = ("batches", "functions", "last", "requests")

    def __init__(self) -> None:
        self.functions: dict[str, FunctionCounts] = {}
        self.last = 0.0
        self.requests = [0.0, 0.0, 0.0]
        """Steps by requests: each request counts its batch's compute input, infer and output."""
        self.batches: dict[int, list[float]] = {}
        """By batch size: batches, then their compute input, infer and output."""


class Statistics:
    """A listener to `BatchDone` and `RequestFailed`, as long as it lives.

    Args:
      serves: whether a model of this name is counted here; a process may have several applications.
    """

    def __init__(self, serves: Callable[[str], bool]) -> None:
        self._serves = serves
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, str], _Version] = {}
        weak = weakref.ref(self)  # the listeners of a process outlive a data plane that nobody holds any more

        def listener(event: Event) -> None:
            if (statistics := weak()) is not None:
                statistics(event)
            else:  # not in a finalizer: the collector may run where this thread holds the lock of the listeners
                unsubscribe()

        unsubscribe = subscribe(listener)

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchDone):
            self._on_batch(event)
        elif isinstance(event, RequestFailed):
            self._on_failure(event)

    def functions(self) -> Mapping[tuple[str, str, str], FunctionCounts]:
        """What is counted so far, by model, version and function; a copy."""
        with self._lock:
            return {
                (model, version, function): counts.copy()
                for (model, version), whole in sorted(self._versions.items())
                for function, counts in sorted(whole.functions.items())
            }

    def of(self, name: str, version: str) -> ModelStatistics:
        """The statistics of one version; zeros for one that has done nothing yet."""
        with self._lock:
            whole = self._versions.get((name, version))
            if whole is None:
                return ModelStatistics(name, version)
            counts = whole.functions.values()
            buckets = [bucket for each in counts for bucket in each.buckets.values()]
            answered = sum(each.statuses.get("ok", 0) for each in counts)
            failed = sum(sum(each.statuses.values()) for each in counts) - answered
            compute = [_duration(answered, seconds) for seconds in whole.requests]
            return ModelStatistics(
                name,
                version,
                last_inference=int(whole.last * 1e3),
                inference_count=sum(bucket.rows for bucket in buckets),
                execution_count=sum(bucket.batches for bucket in buckets),
                success=_duration(answered, sum(each.request_seconds.seconds for each in counts)),
                fail=_duration(failed, sum(each.failed_seconds for each in counts)),
                queue=_duration(answered, sum(each.queue_seconds.seconds for each in counts)),
                compute_input=compute[0],
                compute_infer=compute[1],
                compute_output=compute[2],
                batch_stats=tuple(
                    BatchStatistics(size, *(_duration(int(steps[0]), seconds) for seconds in steps[1:]))
                    for size, steps in sorted(whole.batches.items())
                ),
            )

    def _on_batch(self, batch: BatchDone) -> None:
        steps, answered, rows = batch.steps, len(batch.seconds), batch.rows
        computed = (
            steps.get("pad", 0.0) + steps.get("transfer", 0.0),
            steps.get("execute", 0.0),
            steps.get("copy", 0.0),
        )
        with self._lock:
            whole = self._version(batch.servable, batch.version)
            if whole is None:
                return
            whole.last = time.time()
            sized = whole.batches.get(rows)
            if sized is None:
                sized = whole.batches[rows] = [0, 0.0, 0.0, 0.0]
            sized[0] += 1
            for at, seconds in enumerate(computed):
                sized[at + 1] += seconds
                whole.requests[at] += seconds * answered
            counts = whole.functions.get(batch.function)
            if counts is None:
                counts = whole.functions[batch.function] = FunctionCounts()
            counts.statuses["ok"] = counts.statuses.get("ok", 0) + answered
            bucket = counts.buckets.get(batch.bucket)
            if bucket is None:
                bucket = counts.buckets[batch.bucket] = BucketCounts(_positions(batch))
            bucket.batches += 1
            bucket.rows += rows
            bucket.padded_rows += batch.capacity - rows
            bucket.used += (
                rows if bucket.positions == batch.capacity else sum(prod(each.values()) for each in batch.sizes)
            )
            counts.request_seconds.add_all(batch.seconds)
            counts.queue_seconds.add_all(batch.queued)
            for step, histogram in counts.step_seconds.items():
                histogram.add(steps.get(step, 0.0))

    def _on_failure(self, failure: RequestFailed) -> None:
        with self._lock:
            whole = self._version(failure.servable, failure.version)
            if whole is None:
                return
            function = failure.function
            if function not in whole.functions and len(whole.functions) >= _FUNCTIONS:
                function = ""
            counts = whole.functions.setdefault(function, FunctionCounts())
            counts.statuses[failure.status] = counts.statuses.get(failure.status, 0) + 1
            counts.failed_seconds += failure.seconds

    def _version(self, name: str, version: str) -> _Version | None:
        """The counts of a version, made when it is first heard of; None where another application has the model."""
        whole = self._versions.get((name, version))
        if whole is None and self._serves(name):
            whole = self._versions[name, version] = _Version()
            same = [key for key in self._versions if key[0] == name]
            if len(same) > _VERSIONS:
                del self._versions[min(same[:-1], key=lambda key: self._versions[key].last)]
        return whole


def _positions(batch: BatchDone) -> int:
    """The product of a bucket's sizes, read from its label (`batch=4,length=32`)."""
    return prod(int(size) for size in re.findall(r"=(\d+)", batch.bucket))


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, round(seconds * 1e9))
