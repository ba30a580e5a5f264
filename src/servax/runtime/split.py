"""A request of more rows than the largest bucket: it runs in parts, and its outputs are joined again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from servax.core.errors import ExecutionError, ServaxError, TooLarge
from servax.runtime.answers import Answer, CallbackAnswer, Outcome, deliver
from servax.runtime.pending import PendingRequest
from servax.runtime.request import InferRequest, InferResult
from servax.stages.joining import Joiner, nbytes
from servax.stages.padding import CheckedTensors

if TYPE_CHECKING:
    from servax.runtime.batcher import Batcher
    from servax.runtime.lane import Lane

MOST_PARTS = 1 << 14
"""Parts that a request may run in: to make one takes tens of microseconds of the thread that takes all requests."""

_NOBODY = CallbackAnswer(lambda outcome: None)


class SplitRequest:
    """The parts of one request, with who waits for the whole.

    Attributes:
      parts: in order of rows; filled in by whoever splits, each with an answer of `part`.
    """

    def __init__(self, joiner: Joiner, answer: Answer) -> None:
        self.parts: Sequence[PendingRequest] = ()
        self._joiner = joiner
        self._answer = answer
        self._results: dict[int, InferResult] = {}
        self._lock = threading.Lock()
        self._answered = False

    def part(self, index: int, outcome: Outcome) -> None:
        """Takes the answer of a part; the last one, or the first error, answers the whole."""
        with self._lock:
            if self._answered:
                return
            if not isinstance(outcome, ServaxError):
                self._results[index] = outcome
                if len(self._results) < len(self.parts):
                    return
            self._answered = True
        for each in self.parts:
            each.answer = _NOBODY  # parts and whole would hold one another, and their tensors, until a collection
        if isinstance(outcome, ServaxError):
            self.cancel()
        else:
            try:
                outcome = self._whole()
            except Exception as error:  # for want of memory; on the device's thread, which must go on
                outcome = ExecutionError(
                    "the parts of the answer cannot be joined",
                    seen=f"{type(error).__name__}: {error}",
                    remedy="send fewer rows at once",
                )
        deliver(((self._answer, outcome),))

    def remaining(self) -> float | None:
        """Seconds to the deadline, not below 0; None without one."""
        return self.parts[0].remaining()

    def cancel(self) -> None:
        """Takes the parts that wait out of the queue."""
        for part in self.parts:
            part.cancel()

    def expire(self) -> None:
        """Answers with DeadlineExceeded if a part of it still waits."""
        self.abandon(self.parts[0].lateness())

    def abandon(self, error: ServaxError) -> None:
        """Answers with `error` if a part of it still waits."""
        waiting = [part for part in self.parts if part.batcher.remove(part)]
        if waiting:
            waiting[0].fail(error)

    def _whole(self) -> InferResult:
        results = [self._results[index] for index in range(len(self.parts))]
        times: dict[str, float] = {}
        for result in results:
            for step, seconds in result.times.items():
                times[step] = times.get(step, 0.0) + seconds
        times["queue"] = results[0].times["queue"]
        labels = dict.fromkeys(result.bucket for result in results)
        tensors = self._joiner.rejoin([result.tensors for result in results])
        return InferResult(tensors, " + ".join(labels), times, results[0].version)


def split(
    batcher: Batcher,
    lane: Lane,
    request: InferRequest,
    checked: CheckedTensors,
    answer: Answer,
    *,
    came: float,
    shape: int,
    most: int,
) -> SplitRequest:
    """A request in parts of at most `most` rows, not queued yet.

    Raises:
      TooLarge: it has rows for more than `MOST_PARTS`.
    """
    if (rows := lane.joiner.rows(checked)) > most * MOST_PARTS:
        batch = lane.signature.batch
        raise TooLarge(
            "the request has too many rows to run in parts",
            where=batch,
            seen=f"{batch}={rows}",
            expected=f"{batch} at most {most * MOST_PARTS}, {MOST_PARTS} runs of the largest bucket",
            remedy="send fewer rows at once, or build with a larger bucket",
        )
    whole = SplitRequest(lane.joiner, answer)
    whole.parts = tuple(
        PendingRequest(
            batcher,
            lane,
            request,
            part,
            CallbackAnswer(partial(whole.part, index)),
            came=came,
            nbytes=nbytes(part),
            rows=lane.joiner.rows(part),
            shape=shape,
        )
        for index, part in enumerate(lane.joiner.split(checked, most))
    )
    return whole
