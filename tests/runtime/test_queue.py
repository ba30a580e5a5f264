import threading

import pytest

from servax.core.errors import NotReady
from servax.runtime.queue import FairQueue


class Item:
    def begin(self) -> bool:
        return True

    def prepare(self) -> None:
        pass

    def run(self, meanwhile) -> None:
        pass

    def fail(self, error) -> None:
        pass


def test_work_comes_out_in_order_of_arrival():
    queue, items = FairQueue(), [Item() for _ in range(3)]
    for item in items:
        queue.put(item)
    assert len(queue) == 3
    assert [queue.take() for _ in items] == items


def test_closing_wakes_the_taker_and_gives_back_what_waited():
    queue, taken = FairQueue(), []
    taker = threading.Thread(target=lambda: taken.append(queue.take()))
    taker.start()
    assert queue.close() == ()
    taker.join()
    assert taken == [None]
    with pytest.raises(NotReady):
        queue.put(Item())


def test_what_waits_is_not_taken_after_closing():
    queue, item = FairQueue(), Item()
    queue.put(item)
    assert queue.close() == (item,)
    assert queue.take() is None


class Busy:
    """A source that always has work, of a fixed duration on the queue's clock."""

    def __init__(self) -> None:
        self.used = 0.0
        self.work = Item()

    def next(self, now: float) -> Item:
        return self.work

    def ahead(self, now: float) -> Item:
        return self.work

    def close(self):
        return ()

    def __len__(self) -> int:
        return 1


def served(monkeypatch, queue: FairQueue, seconds: dict[object, float], runs: int, start: float = 0.0) -> list[object]:
    """What is taken, when each piece of work takes so many seconds."""
    now, taken = [start], []
    monkeypatch.setattr("servax.runtime.queue.time.perf_counter", lambda: now[0])
    for _ in range(runs):
        taken.append(queue.take())
        now[0] += seconds[taken[-1]]
    return taken


def test_the_device_is_shared_by_the_time_it_is_used_and_not_by_turns(monkeypatch):
    queue, fast, slow = FairQueue(), Busy(), Busy()
    for source in (fast, slow):
        queue.join(source)
        with queue.lock:
            queue.wake(source)
    taken = served(monkeypatch, queue, {fast.work: 1.0, slow.work: 9.0}, 100)
    assert taken.count(slow.work) == 10
    assert taken.count(fast.work) == 90


def test_who_had_nothing_to_do_gains_nothing_by_it(monkeypatch):
    queue, steady, late = FairQueue(), Busy(), Busy()
    queue.join(steady)
    with queue.lock:
        queue.wake(steady)
    served(monkeypatch, queue, {steady.work: 1.0}, 1000)
    queue.join(late)
    with queue.lock:
        queue.wake(late)
    taken = served(monkeypatch, queue, {steady.work: 1.0, late.work: 1.0}, 20, start=1000.0)
    assert 9 <= taken.count(late.work) <= 11


def runs_ahead(queue: FairQueue, now: list[float], seconds: float, most: int) -> int:
    """How often in a row what runs is followed by work that was prepared meanwhile."""
    count = 0
    while count < most and queue.ahead() is not None:
        now[0] += seconds
        queue.go_on()
        count += 1
    return count


def test_work_that_can_be_prepared_does_not_keep_the_device_from_work_that_cannot(monkeypatch):
    now, queue, always, call = [0.0], FairQueue(), Busy(), Item()
    monkeypatch.setattr("servax.runtime.queue.time.perf_counter", lambda: now[0])
    queue.join(always)
    with queue.lock:
        queue.wake(always)
    assert queue.take() is always.work
    queue.put(call)
    assert runs_ahead(queue, now, 1.0, 100) <= 2
    now[0] += 1.0
    assert queue.take() is call


def test_time_used_by_prepared_work_is_no_credit_for_who_comes_later(monkeypatch):
    now, queue, steady, late = [0.0], FairQueue(), Busy(), Busy()
    monkeypatch.setattr("servax.runtime.queue.time.perf_counter", lambda: now[0])
    queue.join(steady)
    with queue.lock:
        queue.wake(steady)
    assert queue.take() is steady.work
    assert runs_ahead(queue, now, 1.0, 1000) == 1000
    queue.join(late)
    with queue.lock:
        queue.wake(late)
    taken = served(monkeypatch, queue, {steady.work: 1.0, late.work: 1.0}, 20, start=1000.0)
    assert 9 <= taken.count(late.work) <= 11


def test_a_source_that_wants_to_wait_is_asked_again_while_others_go_on():
    class Holding(Busy):
        asked = 0

        def next(self, now: float):
            self.asked += 1
            return 0.001 if self.asked < 3 else self.work

    queue, holding = FairQueue(), Holding()
    queue.join(holding)
    item = Item()
    queue.put(item)
    assert queue.take() is item
    assert queue.take() is holding.work
    assert holding.asked >= 3
    queue.leave(holding)
    assert len(queue) == 0
