"""An accepted request on its way through queue and device: it gets exactly one answer (contract 8)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Self

from servax.core.errors import DeadlineExceeded, ExecutionError, ServaxError
from servax.core.events import BatchDone, RequestFailed, emit
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

    def __init__(  # noqa: PLR0917
        self,
        owner: tuple[str, str],
        request: InferRequest,
        signature: Signature,
        checked: CheckedTensors,
        bucket: Bucket,
        watch: Watch,
    ) -> None:
        self._owner = owner
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
            self._tell(began, times)
            self.future.set_result(InferResult(tensors, self.bucket.label, times, self._owner[1]))

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

    def _tell(self, began: float, times: dict[str, float]) -> None:
        batch = self._signature.batch
        capacity = 1 if batch is None else self.bucket[batch]
        steps = {step: seconds for step, seconds in times.items() if step != "queue"}
        waited, lasted = (began - self._queued,), (time.perf_counter() - self._queued,)
        emit(
            BatchDone(
                *self._owner,
                self.request.function,
                self.bucket.label,
                capacity,
                self.rows,
                steps,
                waited,
                lasted,
                (self._checked.sizes,),
            )
        )

    def _claimed(self) -> bool:
        return self._claim.acquire(blocking=False) and self.future.set_running_or_notify_cancel()


class Told:
    """Emits RequestFailed when the block around a request ends without an answer."""

    def __init__(self, owner: tuple[str, str], function: str) -> None:
        self.pending: PendingRequest | None = None
        self._owner = owner
        self._function = function
        self._came = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            status = type(error).__name__ if isinstance(error, ServaxError) else "Cancelled"
            emit(RequestFailed(*self._owner, self._function, status, time.perf_counter() - self._came))
