import gc
import weakref

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import serving_toys as toys
from servax.core import events
from servax.core.errors import InvalidInput
from servax.protocols.dataplane import DataPlane
from servax.server import metrics as metrics_module
from servax.server.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_requests_rows_steps_and_runs_are_counted():
    with toys.toy().warm() as servable:
        metrics = Metrics(DataPlane([servable]))
        servable.predict(x=np.ones((3, 2), np.float32))
        servable.predict(x=np.ones((2, 2), np.float32))
        with pytest.raises(InvalidInput):
            servable.predict(x=1)
        seen = samples(metrics)
    model = (("function", "predict"), ("model", "toy"))
    assert seen["servax_requests_total", (*model, ("status", "ok"))] == 2
    assert seen["servax_requests_total", (*model, ("status", "InvalidInput"))] == 1
    assert seen["servax_rows_total", model] == 5
    assert seen["servax_bucket_runs_total", (("bucket", "batch=4,length=8"), *model)] == 2
    assert seen["servax_request_seconds_count", model] == 2
    for step in ("queue", "pad", "transfer", "execute", "copy"):
        assert seen["servax_step_seconds_count", (*model, ("step", step))] == 2


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


def test_an_application_that_is_gone_stops_listening(monkeypatch):
    left = []

    def subscribe(listener):
        leave = events.subscribe(listener)
        return lambda: (leave(), left.append(listener))

    monkeypatch.setattr(metrics_module, "subscribe", subscribe)
    metrics = Metrics(DataPlane())
    gone = weakref.ref(metrics)
    del metrics
    gc.collect()
    assert gone() is None
    assert len(left) == 1
