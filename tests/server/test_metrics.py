"""Values are sums by hand over events that the tests make; the whole chain is in `tests/e2e` and below with a toy."""

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import serving_toys as toys
from servax.core.errors import InvalidInput
from servax.core.events import BatchDone, RequestFailed, emit
from servax.protocols.dataplane import DataPlane
from servax.server.metrics import Metrics

PREDICT = {"model": "toy", "version": "1", "function": "predict"}


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def value(seen, name: str, **labels: str) -> float:
    return seen[name, tuple(sorted(labels.items()))]


def batch(seconds: tuple[float, ...], **changes) -> BatchDone:
    fields = {
        "servable": "toy",
        "version": "1",
        "function": "predict",
        "bucket": "batch=4,length=8",
        "capacity": 4,
        "rows": len(seconds),
        "steps": {"pad": 0.001, "transfer": 0.002, "execute": 0.2, "copy": 0.004},
        "queued": (0.004,) * len(seconds),
        "seconds": seconds,
        "sizes": ({"batch": 1, "length": 6},) * len(seconds),
    }
    return BatchDone(**(fields | changes))


@pytest.fixture(scope="module")
def seen():
    """Two batches of 3 and 1 requests, and two that failed."""
    with toys.toy() as servable:
        metrics = Metrics(DataPlane([servable]), responses={200: 4, 429: 1})
        emit(batch((0.02, 0.03, 0.3)))
        emit(batch((0.4,)))
        emit(RequestFailed("toy", "1", "predict", "Overloaded", 0.1))
        emit(RequestFailed("toy", "1", "predict", "Cancelled", 0.1))
        yield samples(metrics)


def test_requests_by_status(seen):
    assert value(seen, "servax_requests_total", **PREDICT, status="ok") == 4
    assert value(seen, "servax_requests_total", **PREDICT, status="Overloaded") == 1
    assert value(seen, "servax_requests_total", **PREDICT, status="Cancelled") == 1
    assert value(seen, "servax_http_responses_total", status="200") == 4
    assert value(seen, "servax_http_responses_total", status="429") == 1


def test_rows_padding_and_buckets(seen):
    assert value(seen, "servax_rows_total", **PREDICT) == 4
    assert value(seen, "servax_padded_rows_total", **PREDICT) == 1 + 3
    assert value(seen, "servax_positions_total", **PREDICT) == 2 * 4 * 8
    assert value(seen, "servax_padded_positions_total", **PREDICT) == 64 - 4 * 6
    assert value(seen, "servax_bucket_runs_total", **PREDICT, bucket="batch=4,length=8") == 2
    assert value(seen, "servax_mean_batch_rows", **PREDICT) == 2.0


def test_histograms_are_cumulative(seen):
    bounds = {"0.01": 0, "0.025": 1, "0.05": 2, "0.25": 2, "0.5": 4, "+Inf": 4}
    assert {le: value(seen, "servax_request_seconds_bucket", **PREDICT, le=le) for le in bounds} == bounds
    assert value(seen, "servax_request_seconds_count", **PREDICT) == 4
    assert value(seen, "servax_request_seconds_sum", **PREDICT) == pytest.approx(0.75)
    assert value(seen, "servax_queue_seconds_sum", **PREDICT) == pytest.approx(0.016)
    assert value(seen, "servax_step_seconds_count", **PREDICT, step="execute") == 2
    assert value(seen, "servax_step_seconds_sum", **PREDICT, step="execute") == pytest.approx(0.4)


def lines(metrics: Metrics) -> dict[str, str]:
    """Samples as they stand in the text: prometheus-client's parser calls every counter `..._total`."""
    text = metrics.text().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in text if not line.startswith("#"))


def test_triton_s_names():
    with toys.toy() as servable:
        plane = DataPlane([servable])
        emit(batch((0.02, 0.03)))
        emit(batch((0.4,)))
        for status in ("Overloaded", "DeadlineExceeded", "Cancelled", "ExecutionError", "InvalidInput"):
            emit(RequestFailed("toy", "1", "predict", status, 0.1))
        seen = lines(Metrics(plane, triton=True))
        without = lines(Metrics(plane))
    expected = {
        "request_success": "3",
        "count": "3",
        "exec_count": "2",
        "request_duration_us": "450000",
        "queue_duration_us": "12000",
        "compute_input_duration_us": "9000",
        "compute_infer_duration_us": "600000",
        "compute_output_duration_us": "12000",
        "pending_request_count": "0",
    }
    named = {name: seen[f'nv_inference_{name}{{model="toy",version="1"}}'] for name in expected}
    assert named == expected
    reasons = {"REJECTED": "2", "CANCELED": "1", "BACKEND": "1", "OTHER": "1"}
    failed = 'nv_inference_request_failure{{model="toy",version="1",reason="{}"}}'
    assert {each: seen[failed.format(each)] for each in reasons} == reasons
    assert not [name for name in without if name.startswith("nv_")]


def test_labels_are_escaped():
    with toys.toy('a"b\\c') as servable:
        seen = lines(Metrics(DataPlane([servable]), triton=True))
    assert seen['nv_inference_count{model="a\\"b\\\\c",version="1"}'] == "0"


def test_what_a_servable_does_is_counted():
    with toys.toy().warm() as servable:
        metrics = Metrics(DataPlane([servable]))
        servable.predict(x=np.ones((3, 2), np.float32))
        servable.predict(x=np.ones((2, 2), np.float32))
        with pytest.raises(InvalidInput):
            servable.predict(x=1)
        seen = samples(metrics)
    assert value(seen, "servax_requests_total", **PREDICT, status="ok") == 2
    assert value(seen, "servax_requests_total", **PREDICT, status="InvalidInput") == 1
    assert value(seen, "servax_rows_total", **PREDICT) == 5
    assert value(seen, "servax_bucket_runs_total", **PREDICT, bucket="batch=4,length=8") == 2
    assert value(seen, "servax_request_seconds_count", **PREDICT) == 2
    for step in ("pad", "transfer", "execute", "copy"):
        assert value(seen, "servax_step_seconds_count", **PREDICT, step=step) == 2
    labels = {"model": "toy", "version": "1"}
    assert value(seen, "servax_queued_requests", **labels) == 0
    assert value(seen, "servax_running_requests", **labels) == 0
    assert value(seen, "servax_parameter_bytes", **labels) == 2 * 4


def test_compiles_after_ready_are_zero_and_readiness_is_shown():
    with toys.toy(version="4") as servable:
        metrics = Metrics(DataPlane([servable]))
        before = samples(metrics)
        assert before["servax_ready", ()] == 0
        servable.warm()
        servable.predict(x=[[1.0]])
        after = samples(metrics)
        compiles = ("servax_compiles_after_ready_total", ())
        assert after[compiles] == before[compiles]
        assert after["servax_ready", ()] == 1
        assert after["servax_model_ready", (("model", "toy"), ("version", "4"))] == 1
        assert ("servax_compiles_total", (("role", "loading"), ("stage", "compile"))) in after


def test_another_application_s_models_are_not_counted():
    with toys.toy("mine").warm() as mine, toys.toy("theirs").warm() as theirs:
        metrics = Metrics(DataPlane([mine]))
        theirs.predict(x=[[1.0]])
        assert not [name for name, _ in samples(metrics) if name == "servax_requests_total"]
