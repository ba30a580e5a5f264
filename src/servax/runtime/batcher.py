"""The requests of one servable that wait, and the choice of the batch that runs next and of when it does."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from servax.core.errors import NotReady, Overloaded
from servax.runtime.batch import Batch, Equipment
from servax.runtime.batching import Batching
from servax.runtime.demand import Demand
from servax.runtime.lane import Lane
from servax.runtime.pending import PendingRequest
from servax.runtime.queue import FairQueue

ADAPTIVE = 2e-3
"""The longest, in seconds, that a batch is held back where `max_delay` says nothing."""

FLOWING = 1e-2
"""The same where programs run on the one core that also brings the requests in: no time of the device is lost while
they keep coming."""

_AGE = 8
"""Runs of its own bucket after which a request goes before those of higher priority."""

_TURNS = 4
"""One batch of so many may be headed by age: when everything is late, priorities still mean something."""

_WORTH = 0.1
"""The share of a row's cost that one more row in the batch must save for waiting to be worth it."""

_GAPS = 4
"""Mean gaps between arrivals after which nobody seems to come any more."""


class Batcher:
    """One servable's share of a device.

    A free device takes what waits. It holds back, for a moment, only while others are known to be in flight, more rows
    cost less by the row, and those others are about to come; see `docs/adr/0009`.

    Attributes:
      used: seconds of the device that count for it.
      running: requests on the device.
    """

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        equipment: Equipment,
        batching: Batching,
        queue: FairQueue,
        *,
        shares_core: bool,
    ) -> None:
        self.used = 0.0
        self.running = 0
        self._lanes = tuple(lanes.values())
        self._equipment = equipment
        self._batching = batching
        self._queue = queue
        self._shares_core = shares_core
        adaptive = FLOWING if shares_core else ADAPTIVE
        self._longest = adaptive if batching.max_delay is None else batching.max_delay
        self._waiting = 0
        self._nbytes = 0
        self._demand = Demand(time.perf_counter())
        self._held_since: float | None = None
        self._target = 0
        self._by_age = 0
        self._left = False

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._waiting

    def refuse_if_full(self) -> None:
        """Raises Overloaded where there is no room for another request: before anything is spent on it."""
        if self._waiting >= self._batching.max_queue or self._nbytes >= self._batching.max_queue_bytes:
            with self._queue.lock:  # the error tells of what waits
                error = self._overloaded()
            raise error

    def put(self, requests: Sequence[PendingRequest]) -> None:
        """Queues a request, or the parts of one.

        Raises:
          Overloaded: there is no room. A request larger than all the room there is may wait alone.
          NotReady: the device's thread has ended.
        """
        queue = self._queue
        with queue.lock:
            queue.require_open()
            if self._left:
                raise _gone(self._equipment.servable)
            batching = self._batching
            nbytes = requests[0].nbytes if len(requests) == 1 else sum([request.nbytes for request in requests])
            if self._waiting and (
                self._waiting + len(requests) > batching.max_queue or self._nbytes + nbytes > batching.max_queue_bytes
            ):
                raise self._overloaded()
            now = time.perf_counter()
            for request in requests:
                request.lane.add(request)
                self._demand.arrived(now)
            self._waiting += len(requests)
            self._nbytes += nbytes
            if self._held_since is None or self._waiting >= self._target:
                queue.wake(self)

    def remove(self, request: PendingRequest) -> bool:
        """Takes a waiting request out, in constant time; False where it waits no more."""
        with self._queue.lock:
            if request.level is None:
                return False
            request.lane.remove(request)
            self._forget(request)
            self._demand.answered(time.perf_counter(), 1)
            return True

    def done(self, count: int) -> None:
        """Told by a batch when its requests are about to have their answers."""
        with self._queue.lock:
            self.running -= count
            self._demand.answered(time.perf_counter(), count)

    def next(self, now: float) -> Batch | float | None:
        if self._waiting:
            lane, head = self._head(now)
            pause = self._pause(lane, head, now)
            if pause > 0:
                return pause
            return self._batch(lane, head, now)
        self._held_since = None
        return None

    def ahead(self, now: float) -> Batch | None:
        if self._waiting:
            lane, head = self._head(now)
            if lane.is_full(head):
                return self._batch(lane, head, now)
        return None

    def leave(self) -> None:
        """Gives the device up for good; whoever still waits is answered with NotReady."""
        with self._queue.lock:
            self._left = True
            left = self.close()
        self._queue.leave(self)
        self._equipment.buffers.clear()
        for request in left:
            request.fail(_gone(self._equipment.servable))

    def close(self) -> Sequence[PendingRequest]:
        left = [request for lane in self._lanes for request in lane.drain()]
        self._waiting = self._nbytes = 0
        self._demand.answered(time.perf_counter(), len(left))
        return left

    def __len__(self) -> int:
        return self._waiting

    def _batch(self, lane: Lane, head: PendingRequest, now: float) -> Batch:
        self._held_since = None
        bucket, taken = lane.take(head)
        late = [request for request in taken if request.deadline is not None and request.remaining() == 0.0]
        for request in taken:
            self._forget(request)
        if late:
            self._demand.answered(now, len(late))
            taken = [request for request in taken if request not in late]
            bucket = lane.bucket_of(bucket, taken) if taken else bucket
        self.running += len(taken)
        return Batch(self._equipment, self, lane, bucket, taken, late)

    def _forget(self, request: PendingRequest) -> None:
        self._waiting -= 1
        self._nbytes -= request.nbytes

    def _head(self, now: float) -> tuple[Lane, PendingRequest]:
        """The request that the next batch is made around: of the highest priority, or one that has waited too long."""
        first = self._among(oldest=False)
        if self._by_age > 0:
            self._by_age -= 1
            return first
        lane, oldest = self._among(oldest=True)
        if oldest is first[1] or now - oldest.came < _AGE * lane.seconds(oldest):
            return first
        self._by_age = _TURNS - 1
        return lane, oldest

    def _among(self, *, oldest: bool) -> tuple[Lane, PendingRequest]:
        best: tuple[Lane, PendingRequest] | None = None
        for lane in self._lanes:
            head = lane.head(oldest=oldest) if lane.rows else None
            if head is not None and (best is None or head.is_before(best[1], oldest=oldest)):
                best = lane, head
        assert best is not None
        return best

    def _pause(self, lane: Lane, head: PendingRequest, now: float) -> float:
        """Seconds to hold the next batch back; 0: none."""
        longest, demand = self._longest, self._demand
        if longest == 0.0 or (expected := demand.expected(now)) <= self._waiting or lane.is_full(head):
            return 0.0
        gap = demand.gap
        if gap * 2 > min(longest, ADAPTIVE) or lane.saved_by_joining(head) < _WORTH:
            return 0.0
        if not self._shares_core and gap < lane.seconds(head):
            return 0.0  # they gather while it runs, and the device is busy meanwhile
        if self._held_since is None:
            self._held_since = now
        self._target = min(expected, self._waiting + lane.room(head))
        left = min(self._held_since + longest - now, _GAPS * gap - demand.quiet(now))
        return max(left, 0.0)

    def _overloaded(self) -> Overloaded:
        batching = self._batching
        error = Overloaded(
            "the queue is full",
            where=self._equipment.servable,
            seen=f"{self._waiting} requests and {self._nbytes} bytes that wait",
            expected=f"at most {batching.max_queue} requests and {batching.max_queue_bytes} bytes",
            remedy="try again after the time given, or send less at once",
        )
        error.retry_after = max(0.05, sum(lane.backlog() for lane in self._lanes))
        return error


def _gone(servable: str) -> NotReady:
    return NotReady(f"{servable} was closed while the request came", remedy="load it again")


def shares_core(platform: str) -> bool:
    """Whether programs run on the one core that this process has, so that a device's run takes Python's time."""
    if platform != "cpu":
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores == 1
