import threading

import pytest

from servax.core.errors import NotReady
from servax.runtime.queue import FairQueue


class Item:
    def begin(self) -> bool:
        return True

    def run(self) -> None:
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
