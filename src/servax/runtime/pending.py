"""An accepted request on its way through queue and device: it gets exactly one answer (contract 8)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Self

from servax.core.errors import DeadlineExceeded, ExecutionError, ServaxError
from servax.core.events import RequestDone, emit
from servax.core.tensors import Signature
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.watch import Watch
from servax.stages.buckets import Bucket
from servax.stages.padding import CheckedTensors, cut, pad


class PendingRequest:
    """A checked request with the future of its answer.

    Whoever claims it first answers it: the device's thread, the deadline, or a drain that ran out of time. Cancelling
    the future before that takes it out.
    """

    def __init__(
        self, request: InferRequest, signature: Signature, checked: CheckedTensors, bucket: Bucket, watch: Watch
    ) -> None:
        self.request = request
        self.bucket = bucket
        self.future: Future[InferResult] = Future()
        self._signature = signature
        self._checked = checked
        self._watch = watch
        self._queued = time.perf_counter()
        self._claim = threading.Lock()

    @property
    def rows(self) -> int:
        """How many rows it has; 1 where there is no batch dimension."""
        batch = self._signature.batch
        return 1 if batch is None else self._checked.sizes.get(batch, 1)

    def remaining(self) -> float | None:
        """Seconds to the deadline, not below 0; None without one."""
        deadline = self.request.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def begin(self) -> bool:
        if self.remaining() == 0.0:
            self.expire()
        return self._claimed()

    def run(self) -> None:
        began = time.perf_counter()
        try:
            buffers = pad(self._signature, self.bucket, self._checked)
            padded = time.perf_counter()
            outputs, times = self._watch.run(self.request.function, self.bucket, buffers)
            ran = time.perf_counter()
            tensors = cut(self._signature, self._checked.sizes, outputs)
            times = {"queue": began - self._queued, "pad": padded - began, **times}
            times["copy"] += time.perf_counter() - ran
        except ServaxError as error:
            self.fail(error)
        except Exception as error:
            failure = ExecutionError(
                "the request failed on the way to the device", seen=f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self.fail(failure)
        else:
            self.future.set_result(InferResult(tensors, self.bucket.label, times))

    def expire(self) -> None:
        """Answers with DeadlineExceeded unless it runs already or has its answer."""
        self.abandon(
            DeadlineExceeded(
                "the deadline passed while the request waited for the device",
                where=f"{self.request.function}@{self.bucket.label}",
                remedy="allow more time, or send fewer requests at once",
            )
        )

    def abandon(self, error: ServaxError) -> None:
        """Answers with `error` unless it runs already or has its answer."""
        if self._claimed():
            self.future.set_exception(error)

    def fail(self, error: ServaxError) -> None:
        """Answers with `error`, also while it runs."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return  # cancelled or answered: exactly one answer, and this one came second

    def _claimed(self) -> bool:
        return self._claim.acquire(blocking=False) and self.future.set_running_or_notify_cancel()


class Told:
    """Emits RequestDone when the block around a request ends, with what became of it."""

    def __init__(self, servable: str, request: InferRequest) -> None:
        self.pending: PendingRequest | None = None
        self._servable = servable
        self._request = request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        pending = self.pending
        answered = kind is None and pending is not None
        emit(
            RequestDone(
                self._servable,
                self._request.function,
                "" if pending is None else pending.bucket.label,
                0 if pending is None else pending.rows,
                "ok" if kind is None else kind.__name__,
                dict(pending.future.result().times) if answered and pending is not None else {},
            )
        )
