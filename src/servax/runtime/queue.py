"""Work on its way to a device: the queue between those who ask and the one thread that runs.

The executor knows only `WorkQueue` and `Work`, so that joining requests into batches is another queue, not another
executor.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from servax.core.errors import NotReady, ServaxError


class Work(Protocol):
    """One run on the device, for one or several requests."""

    def begin(self) -> bool:
        """Claims it for the device; False when it was cancelled or has expired, and then it has its answer."""
        ...

    def run(self) -> None:
        """Runs and answers, on the device's thread. What it raises that is no `Exception` ends the thread."""
        ...

    def fail(self, error: ServaxError) -> None:
        """Answers with an error, once `begin` has returned True or in place of it."""
        ...


class WorkQueue(Protocol):
    """Where an executor takes its work from."""

    def put(self, work: Work) -> None:
        """Adds work; NotReady after `close`."""
        ...

    def take(self) -> Work | None:
        """The next work; waits for it. None once closed."""
        ...

    def close(self) -> tuple[Work, ...]:
        """Refuses further work and wakes the taker; returns what was still waiting."""
        ...

    def __len__(self) -> int: ...


class InOrder:
    """The queue that hands out one work item at a time, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, work: Work) -> None:
        with self._changed:
            if self._closed:
                raise NotReady("the device's thread has ended", remedy="load the servable again")
            self._waiting.append(work)
            self._changed.notify()

    def take(self) -> Work | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            return None if self._closed else self._waiting.popleft()

    def close(self) -> tuple[Work, ...]:
        with self._changed:
            self._closed = True
            left = tuple(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return left

    def __len__(self) -> int:
        return len(self._waiting)
