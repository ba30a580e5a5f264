"""The work of one device: calls of ours and the requests of its servables, which share it by the time they use."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from servax.core.errors import NotReady, ServaxError


class Waiter(Protocol):
    """Whoever waits for the device."""

    def fail(self, error: ServaxError) -> None:
        """Answers with an error, once `begin` has returned True or in place of it."""
        ...


class Work(Waiter, Protocol):
    """One run on the device, for one or several requests."""

    def begin(self) -> bool:
        """Claims it for the device; False when it was cancelled, and then it has its answer."""
        ...

    def prepare(self) -> None:
        """Does what can be done ahead, while other work runs; it has been claimed."""
        ...

    def run(self, meanwhile: Callable[[], None] | None) -> None:
        """Runs and answers, on the device's thread. What it raises that is no `Exception` ends the thread.

        `meanwhile`, where there is one, is called once while the device runs.
        """
        ...


class Source(Protocol):
    """One of those that share a device; every method is called with the queue's lock held.

    Attributes:
      used: seconds of the device that count for it.
    """

    used: float

    def next(self, now: float) -> Work | float | None:
        """The next work; or the seconds after which to ask again, since more is about to come; or None."""
        ...

    def ahead(self, now: float) -> Work | None:
        """The next work if nothing that arrives later could make it better."""
        ...

    def close(self) -> Sequence[Waiter]:
        """Gives up all that waits, and returns it."""
        ...

    def __len__(self) -> int: ...


class FairQueue:
    """Where an executor takes its work from.

    Of the sources with work the one goes first that has used the device least. One that had nothing to do gains
    nothing by it: it starts where the one stands that ran last (start-time fair queueing, Goyal, Vin and Cheng 1996).
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held around all that touches what waits, here and in the sources."""
        self.closed = False
        self._calls = _Calls()
        self._sources: list[Source] = [self._calls]
        self._idle: set[Source] = {self._calls}
        self._running: Source | None = None
        self._following: Source | None = None
        self._since = self._clock = 0.0
        self._gate = threading.Lock()
        self._gate.acquire()
        self._sleeping = False

    def join(self, source: Source) -> None:
        """Lets a source share the device."""
        with self.lock:
            self._sources.append(source)
            self._idle.add(source)

    def leave(self, source: Source) -> None:
        """Ends what `join` began; what waits must have been given up before."""
        with self.lock:
            if source in self._sources:
                self._sources.remove(source)
                self._idle.discard(source)

    def put(self, work: Work) -> None:
        """Adds a call; NotReady after `close`."""
        with self.lock:
            self.require_open()
            self._calls.add(work)
            self.wake(self._calls)

    def require_open(self) -> None:
        """Raises NotReady once the device's thread has ended."""
        if self.closed:
            raise NotReady("the device's thread has ended", remedy="load the servable again")

    def wake(self, source: Source) -> None:
        """Tells that a source has work; its lock is held."""
        if source in self._idle:
            self._idle.discard(source)
            source.used = max(source.used, self._clock)
        if self._sleeping:
            self._sleeping = False
            self._gate.release()

    def take(self) -> Work | None:
        """The next work; waits for it. None once closed."""
        while True:
            with self.lock:
                now = time.perf_counter()
                self._charge(now)
                if self.closed:
                    return None
                work, pause = self._next(now)
                if work is not None:
                    return work
                self._sleeping = True
            if not self._gate.acquire(timeout=pause):
                with self.lock:
                    if self._sleeping:
                        self._sleeping = False
                    else:
                        self._gate.acquire()  # opened between the end of the pause and here

    def ahead(self) -> Work | None:
        """Work to prepare while other work runs, and to run after it; None where waiting for more is better.

        Also None where a source has the next turn whose work cannot be prepared: nobody overtakes it.
        """
        with self.lock:
            if self.closed:
                return None
            now = time.perf_counter()
            for source in sorted(self._sources, key=_used):
                if (work := source.ahead(now)) is not None:
                    self._following = source
                    return work
                if source not in self._idle:
                    return None
        return None

    def go_on(self) -> None:
        """Tells that the work of `ahead` runs now."""
        with self.lock:
            now = time.perf_counter()
            self._charge(now)
            source, self._following = self._following, None
            if source is not None:
                self._running, self._since, self._clock = source, now, source.used

    def close(self) -> tuple[Waiter, ...]:
        """Refuses further work and wakes the taker; returns what was still waiting."""
        with self.lock:
            self.closed = True
            left = tuple(waiter for source in self._sources for waiter in source.close())
            if self._sleeping:
                self._sleeping = False
                self._gate.release()
        return left

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def _next(self, now: float) -> tuple[Work | None, float]:
        """Work, or how long to sleep; -1 without end."""
        pause = -1.0
        sources = self._sources if len(self._sources) == 1 else sorted(self._sources, key=_used)
        for source in sources:
            found = source.next(now)
            if found is None:
                self._idle.add(source)
            elif isinstance(found, float | int):
                pause = found if pause < 0 else min(pause, found)
            else:
                self._running, self._since, self._clock = source, now, source.used
                return found, 0.0
        return None, pause

    def _charge(self, now: float) -> None:
        if self._running is not None:
            self._running.used += now - self._since
            self._running = None


class _Calls:
    """Calls of ours, in order of arrival: runs for warming, for a swap's report."""

    def __init__(self) -> None:
        self.used = 0.0
        self._waiting: deque[Work] = deque()

    def add(self, work: Work) -> None:
        self._waiting.append(work)

    def next(self, now: float) -> Work | None:
        return self._waiting.popleft() if self._waiting else None

    def ahead(self, now: float) -> Work | None:
        return None

    def close(self) -> Sequence[Waiter]:
        left = tuple(self._waiting)
        self._waiting.clear()
        return left

    def __len__(self) -> int:
        return len(self._waiting)


def _used(source: Source) -> float:
    return source.used
