import pytest

from servax.runtime.costs import MOVED, OVERHEAD, PROVEN, Costs
from servax.stages.buckets import Bucket

KEY = ("predict", Bucket.of(batch=4))


def known(seconds: float) -> Costs:
    costs = Costs()
    costs.set({KEY: seconds})
    return costs


def test_what_was_measured_is_known_and_a_batch_costs_its_overhead_too():
    costs = known(2.0)
    assert costs.measured() == {KEY: 2.0}
    assert costs.of(*KEY) == 2.0 + OVERHEAD


def test_a_faster_run_counts_for_more_than_a_slower_one():
    fast, slow = known(1.0), known(1.0)
    fast.observe(KEY, 0.5)  # half of it is not less than half
    slow.observe(KEY, 1.5)
    assert 1.0 - fast.measured()[KEY] == pytest.approx(0.1)
    assert slow.measured()[KEY] - 1.0 == pytest.approx(0.01)


def test_a_run_that_stood_still_says_little_of_the_next():
    costs = known(1.0)
    costs.observe(KEY, 3600.0)
    assert costs.measured()[KEY] < 1.1


def test_plans_are_made_anew_when_a_cost_has_moved_by_a_fifth():
    costs = known(1.0)
    before = costs.revision
    costs.observe(KEY, 0.5)  # 0.9
    assert costs.revision == before
    while costs.measured()[KEY] >= 1.0 - MOVED:
        assert costs.revision == before
        costs.observe(KEY, 0.5)
    assert costs.revision == before + 1


def test_what_was_never_measured_is_known_from_its_first_run():
    costs = Costs()
    costs.observe(KEY, 3.0)
    assert costs.measured() == {KEY: 3.0}


def test_a_run_of_less_than_half_shows_that_what_was_known_is_wrong():
    costs = known(1.0)
    costs.observe(KEY, 0.01)
    assert costs.measured() == {KEY: 0.01}


BUCKETS = {rows: Bucket.of(batch=rows) for rows in (1, 4, 8)}


def ladder(costs: Costs) -> list[float]:
    return [seconds - OVERHEAD for seconds in costs.ladder("predict", BUCKETS)]


def test_a_start_that_measured_nonsense_keeps_no_bucket_from_being_tried():
    """A small bucket costs at most what a larger one does; a large one what the smaller ones in its place would."""
    costs = Costs()
    costs.set({("predict", BUCKETS[1]): 90.0, ("predict", BUCKETS[4]): 1.0, ("predict", BUCKETS[8]): 50.0})
    assert ladder(costs) == pytest.approx([1.0, 1.0, 2.0 + OVERHEAD])


def test_what_has_run_for_real_is_believed():
    costs = Costs()
    costs.set({("predict", BUCKETS[1]): 1.5, ("predict", BUCKETS[4]): 1.0, ("predict", BUCKETS[8]): 3.0})
    for _ in range(PROVEN):
        for rows, seconds in ((1, 1.5), (8, 3.0)):
            costs.observe(("predict", BUCKETS[rows]), seconds)
    assert ladder(costs) == pytest.approx([1.5, 1.0, 3.0])
