"""Expected values are sums over events written by hand; the meaning of each is the statistics extension's."""

import gc
import weakref

import pytest

from servax.core import events
from servax.core.events import BatchDone, RequestFailed, StateChanged
from servax.protocols import statistics as module
from servax.protocols.statistics import Duration, ModelStatistics, Statistics


def batch(**changes) -> BatchDone:
    """Two requests, of 1 row and 2 rows, lengths 8 and 3, in a bucket of 4 rows by 8."""
    fields = {
        "servable": "net",
        "version": "1",
        "function": "predict",
        "bucket": "batch=4,length=8",
        "capacity": 4,
        "rows": 3,
        "steps": {"pad": 0.001, "transfer": 0.002, "execute": 0.02, "copy": 0.004},
        "queued": (0.01, 0.0),
        "seconds": (0.04, 0.03),
        "sizes": ({"batch": 1, "length": 8}, {"batch": 2, "length": 3}),
    }
    return BatchDone(**(fields | changes))


@pytest.fixture
def statistics() -> Statistics:
    return Statistics({"net", "other"}.__contains__)


def test_a_version_that_has_done_nothing_has_zeros(statistics):
    assert statistics.of("net", "1") == ModelStatistics("net", "1")


def test_the_statistics_extension_s_numbers(statistics):
    statistics(batch())
    statistics(batch(rows=1, capacity=1, bucket="batch=1,length=8", queued=(0.5,), seconds=(0.6,), sizes=({},)))
    statistics(RequestFailed("net", "1", "predict", "Overloaded", 0.25))
    seen = statistics.of("net", "1")
    assert (seen.inference_count, seen.execution_count) == (4, 2)
    assert seen.success == Duration(3, 670_000_000)
    assert seen.fail == Duration(1, 250_000_000)
    assert seen.queue == Duration(3, 510_000_000)
    # Each request counts the whole of its batch: two in the first, one in the second.
    assert seen.compute_input == Duration(3, 9_000_000)
    assert seen.compute_infer == Duration(3, 60_000_000)
    assert seen.compute_output == Duration(3, 12_000_000)
    single, triple = seen.batch_stats
    assert (single.batch_size, single.compute_infer) == (1, Duration(1, 20_000_000))
    assert (triple.batch_size, triple.compute_input) == (3, Duration(1, 3_000_000))


def test_the_last_inference_is_in_milliseconds_since_the_epoch(statistics, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 1_700_000_000.25)
    statistics(batch())
    assert statistics.of("net", "1").last_inference == 1_700_000_000_250


def test_buckets_tell_rows_padding_and_positions(statistics):
    statistics(batch())
    statistics(batch())
    bucket = statistics.functions()["net", "1", "predict"].buckets["batch=4,length=8"]
    assert (bucket.batches, bucket.rows, bucket.padded_rows) == (2, 6, 2)
    assert (bucket.positions, bucket.used) == (32, 2 * (8 + 6))


def test_a_bucket_without_dimensions_has_one_position(statistics):
    statistics(batch(bucket="", capacity=1, rows=1, sizes=({},), queued=(0.0,), seconds=(0.1,)))
    bucket = statistics.functions()["net", "1", "predict"].buckets[""]
    assert (bucket.positions, bucket.used, bucket.padded_rows) == (1, 1, 0)


def test_histograms_take_a_bound_as_their_own(statistics):
    statistics(batch(seconds=(0.0005, 0.00051), queued=(0.0, 31.0)))
    counts = statistics.functions()["net", "1", "predict"]
    assert counts.request_seconds.counts[:3] == [1, 1, 0]
    assert (counts.queue_seconds.counts[0], counts.queue_seconds.counts[-1]) == (1, 1)
    assert counts.queue_seconds.seconds == 31.0
    assert {step: each.count for step, each in counts.step_seconds.items()} == dict.fromkeys(module.STEPS, 1)


def test_versions_and_functions_are_counted_apart(statistics):
    statistics(batch())
    statistics(batch(version="2", function="embed"))
    statistics(RequestFailed("other", "1", "predict", "Cancelled"))
    seen = statistics.functions()
    assert list(seen) == [("net", "1", "predict"), ("net", "2", "embed"), ("other", "1", "predict")]
    assert seen["other", "1", "predict"].statuses == {"Cancelled": 1}
    assert statistics.of("net", "2").execution_count == 1


def test_what_is_read_does_not_change_any_more(statistics):
    statistics(batch())
    before = statistics.functions()
    statistics(batch())
    assert before["net", "1", "predict"].statuses == {"ok": 2}
    assert before["net", "1", "predict"].request_seconds.count == 2


def test_models_of_another_application_are_not_counted(statistics):
    statistics(batch(servable="theirs"))
    statistics(RequestFailed("theirs", "1", "predict", "Overloaded"))
    statistics(StateChanged("net", "READY"))
    assert statistics.functions() == {}


def test_names_that_clients_make_up_are_bounded(statistics):
    for number in range(1000):
        statistics(RequestFailed("net", "1", f"f{number}", "NotFound"))
    seen = statistics.functions()
    assert len(seen) <= 65
    assert statistics.of("net", "1").fail.count == 1000


def test_versions_that_answered_longest_ago_are_forgotten(statistics, monkeypatch):
    clock = iter(range(1, 1000))
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    for number in range(100):
        statistics(batch(version=str(number)))
        statistics(batch(version="0"))
    versions = {version for _, version, _ in statistics.functions()}
    assert versions == {"0", *map(str, range(69, 100))}


def test_it_hears_events_as_long_as_it_lives(monkeypatch):
    left = []

    def subscribe(listener):
        leave = events.subscribe(listener)
        return lambda: (leave(), left.append(listener))

    monkeypatch.setattr(module, "subscribe", subscribe)
    statistics = Statistics({"net"}.__contains__)
    events.emit(batch())
    assert statistics.of("net", "1").success.count == 2
    gone = weakref.ref(statistics)
    del statistics
    gc.collect()
    assert gone() is None
    assert not left, "not by the collector, which may run where the listeners' lock is held"
    events.emit(batch())
    assert len(left) == 1
