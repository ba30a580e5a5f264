import numpy as np

from servax.core.buffers import aligned
from servax.runtime.buffers import KEPT, BufferPool
from servax.stages.buckets import Bucket

KEY = ("predict", Bucket.of(batch=2))


def make(bucket: Bucket) -> tuple[np.ndarray, ...]:
    return (aligned((bucket["batch"], 3), np.dtype(np.float32)),)


def test_buffers_are_used_again_and_lent_to_one_at_a_time():
    pool = BufferPool()
    one, two = pool.take(KEY, make), pool.take(KEY, make)
    assert one[0] is not two[0]
    pool.give_back(KEY, one)
    assert pool.take(KEY, make)[0] is one[0]
    assert pool.take(("embed", KEY[1]), make)[0] is not two[0]


def test_no_more_are_kept_than_run_at_once():
    pool = BufferPool()
    lent = [pool.take(KEY, make) for _ in range(KEPT + 3)]
    for each in lent:
        pool.give_back(KEY, each)
    again = [pool.take(KEY, make) for _ in range(KEPT + 3)]
    assert sum(any(each[0] is old[0] for old in lent) for each in again) == KEPT
    pool.clear()
