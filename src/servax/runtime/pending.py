"""An accepted request on its way through queue and device: it gets exactly one answer (contract 8)."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from servax.core.errors import DeadlineExceeded, ServaxError
from servax.runtime.answers import Answer, deliver
from servax.runtime.request import InferRequest
from servax.stages.padding import CheckedTensors

if TYPE_CHECKING:
    from servax.runtime.batcher import Batcher
    from servax.runtime.lane import Lane


class PendingRequest:
    """A checked request, or a part of one, with who waits for its answer.

    Who takes it out of the queue answers it: the device's thread, the deadline, a drain that ran out of time, or nobody
    where its client is gone.

    Attributes:
      group: what it has in common with those it may be joined with.
      level: the part of the queue that it waits in; None: it does not wait, not yet or no more.
    """

    __slots__ = (
        "answer", "batcher", "came", "checked", "deadline", "group", "lane", "level", "nbytes", "priority", "rows",
        "shape",
    )  # fmt: skip

    def __init__(
        self,
        batcher: Batcher,
        lane: Lane,
        request: InferRequest,
        checked: CheckedTensors,
        answer: Answer,
        *,
        came: float,
        nbytes: int,
        rows: int,
        shape: int,
    ) -> None:
        self.batcher = batcher
        self.lane = lane
        self.checked = checked
        self.answer = answer
        self.came = came
        self.nbytes = nbytes
        self.rows = rows
        self.shape = shape
        self.priority = 0 if lane.stateful else request.priority
        self.deadline = request.deadline
        self.group: object = None
        self.level: OrderedDict[PendingRequest, None] | None = None

    def remaining(self) -> float | None:
        """Seconds to the deadline, not below 0; None without one."""
        deadline = self.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def is_before(self, other: PendingRequest, *, oldest: bool) -> bool:
        """Whether it goes before another: by age alone, or by priority and then by age."""
        if not oldest and self.priority != other.priority:
            return self.priority > other.priority
        return self.came < other.came

    def cancel(self) -> None:
        """Takes it out of the queue, unanswered, because nobody waits any more; without effect on one that runs."""
        self.batcher.remove(self)

    def expire(self) -> None:
        """Answers with DeadlineExceeded unless it runs already or has its answer."""
        self.abandon(self.lateness())

    def lateness(self) -> DeadlineExceeded:
        """The error of one whose deadline passed in the queue."""
        return DeadlineExceeded(
            "the deadline passed while the request waited for the device",
            where=f"{self.lane.name}@{self.lane.label(self)}",
            remedy="allow more time, or send fewer requests at once",
        )

    def abandon(self, error: ServaxError) -> None:
        """Answers with `error` unless it runs already or has its answer."""
        if self.batcher.remove(self):
            self.fail(error)

    def fail(self, error: ServaxError) -> None:
        """Answers with an error."""
        deliver(((self.answer, own(error)),))


def own(error: ServaxError) -> ServaxError:
    """The same error, for one request of several: one object raised for all of them would mix their tracebacks."""
    same = copy.copy(error)
    same.__cause__ = error.__cause__
    return same
