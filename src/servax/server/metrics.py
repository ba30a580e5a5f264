"""Metrics in Prometheus' text form, fed by events and read from the data plane when asked; seconds throughout."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from servax.core import monitoring
from servax.core.events import BatchDone, Event, RequestFailed, subscribe
from servax.protocols.dataplane import DataPlane
from servax.runtime.servable import State

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one application, in a registry of their own.

    Attributes:
      content_type: of what `text` gives.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, plane: DataPlane) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "servax_requests", "Requests answered.", ("model", "function", "status"), registry=self._registry
        )
        self._rows = Counter("servax_rows", "Rows computed.", ("model", "function"), registry=self._registry)
        self._runs = Counter(
            "servax_bucket_runs", "Runs on the device.", ("model", "function", "bucket"), registry=self._registry
        )
        self._seconds = Histogram(
            "servax_request_seconds",
            "Time from the queue to the answer.",
            ("model", "function"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._steps = Histogram(
            "servax_step_seconds",
            "Time in each step of a request: queue, pad, transfer, execute, copy.",
            ("model", "function", "step"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Observed(plane))
        self._models = plane
        weak = weakref.WeakMethod(self._on_event)  # an application that nobody holds any more stops listening

        def listener(event: Event) -> None:
            if (method := weak()) is not None:
                method(event)

        weakref.finalize(self, subscribe(listener))

    def text(self) -> bytes:
        """All metrics as they are now."""
        return generate_latest(self._registry)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, (BatchDone, RequestFailed)) or event.servable not in self._models:
            return
        if isinstance(event, RequestFailed):
            self._requests.labels(event.servable, event.function, event.status).inc()
            return
        self._requests.labels(event.servable, event.function, "ok").inc(len(event.seconds))
        self._rows.labels(event.servable, event.function).inc(event.rows)
        self._runs.labels(event.servable, event.function, event.bucket).inc()
        for seconds in event.seconds:
            self._seconds.labels(event.servable, event.function).observe(seconds)
        for seconds in event.queued:
            self._steps.labels(event.servable, event.function, "queue").observe(seconds)
        for step, seconds in event.steps.items():
            self._steps.labels(event.servable, event.function, step).observe(seconds)


class _Observed:
    """Metrics that are read rather than counted here: compilations by thread, and the state of the models."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        serving = monitoring.counts(monitoring.SERVING)
        yield CounterMetricFamily(
            "servax_compiles_after_ready",
            "Traces, lowerings and compilations on serving threads; 0 by contract.",
            value=serving.total,
        )
        stages = CounterMetricFamily(
            "servax_compiles",
            "Traces, lowerings, compilations and hits of the persistent cache, by role of the thread.",
            labels=("role", "stage"),
        )
        for role in (monitoring.SERVING, monitoring.LOADING, monitoring.OTHER):
            counts = monitoring.counts(role)
            for stage, value in (
                ("trace", counts.traced),
                ("lower", counts.lowered),
                ("compile", counts.compiled),
                ("cache_hit", counts.cache_hits),
            ):
                stages.add_metric((role, stage), value)
        yield stages
        ready = GaugeMetricFamily("servax_model_ready", "1 where the model answers.", labels=("model", "version"))
        for status in self._plane.list():
            ready.add_metric((status.name, status.version), float(status.state is State.READY))
        yield ready
        yield GaugeMetricFamily(
            "servax_ready", "1 when everything is loaded and answers.", value=float(self._plane.ready)
        )
