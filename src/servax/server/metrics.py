"""Metrics in Prometheus' text form, read from the data plane when somebody asks: a request pays nothing for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

import servax
from servax.core import monitoring
from servax.core.errors import ServaxError
from servax.protocols.dataplane import DataPlane
from servax.protocols.statistics import BOUNDS, FunctionCounts, Histogram
from servax.runtime.servable import State
from servax.server import generation_metrics, triton_metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_FUNCTION = ("model", "version", "function")
_VERSION = ("model", "version")

_GAUGES = {
    "queued": ("servax_queued_requests", "Requests that wait for the device."),
    "running": ("servax_running_requests", "Requests that are on the device."),
    "parameter_bytes": ("servax_parameter_bytes", "Size of the parameters on the device."),
    "executable_bytes": ("servax_executable_bytes", "Code and scratch space of the programs, by XLA's own analysis."),
}
"""By the property of a servable in this process."""


class Metrics:
    """The metrics of one application, in a registry of their own.

    Args:
      plane: the models.
      triton: whether to show what Triton's dashboards and autoscalers read, too.
      responses: HTTP responses so far, by status.
      grpc_responses: gRPC calls so far, by code.

    Attributes:
      content_type: of what `text` gives.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        plane: DataPlane,
        *,
        triton: bool = False,
        responses: Mapping[int, int] | None = None,
        grpc_responses: Mapping[str, int] | None = None,
    ) -> None:
        self._plane = plane
        self._triton = triton
        self._responses = {} if responses is None else responses
        self._grpc_responses = {} if grpc_responses is None else grpc_responses
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics as they are now."""
        text = generate_latest(self._registry)
        return text + triton_metrics.text(self._plane).encode() if self._triton else text

    def collect(self) -> Iterator[Metric]:
        """Families with their samples, as prometheus-client asks for them."""
        functions = self._plane.statistics.functions()
        yield from _counters(functions)
        yield from _durations(functions)
        yield from self._gauges()
        yield from generation_metrics.families(self._plane)
        responses = CounterMetricFamily("servax_http_responses", "HTTP responses.", labels=("status",))
        for status, count in sorted(self._responses.items()):
            responses.add_metric((str(status),), count)
        yield responses
        calls = CounterMetricFamily("servax_grpc_responses", "gRPC calls that ended.", labels=("code",))
        for code, count in sorted(self._grpc_responses.items()):
            calls.add_metric((code,), count)
        yield calls
        yield from _compiles()

    def _gauges(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("servax_model_ready", "1 where the model answers.", labels=_VERSION)
        families = {each: GaugeMetricFamily(*named, labels=_VERSION) for each, named in _GAUGES.items()}
        for status in self._plane.list():
            labels = (status.name, status.version)
            ready.add_metric(labels, float(status.state is State.READY))
            try:
                servable = self._plane.get(status.name, status.version)
            except ServaxError:
                continue  # known, and not loaded
            for name, family in families.items():
                if (value := getattr(servable, name, None)) is not None:
                    family.add_metric(labels, float(value))
        yield ready
        yield from families.values()
        yield GaugeMetricFamily(
            "servax_ready", "1 when everything is loaded and answers.", value=float(self._plane.ready)
        )
        build = GaugeMetricFamily("servax_build_info", "1; the version is in the label.", labels=("version",))
        build.add_metric((servax.__version__,), 1.0)
        yield build


def _counters(functions: Mapping[tuple[str, str, str], FunctionCounts]) -> Iterator[Metric]:
    requests = CounterMetricFamily("servax_requests", "Requests by what became of them.", labels=(*_FUNCTION, "status"))
    rows = CounterMetricFamily("servax_rows", "Rows of requests computed.", labels=_FUNCTION)
    padded = CounterMetricFamily("servax_padded_rows", "Rows of padding computed beside them.", labels=_FUNCTION)
    positions = CounterMetricFamily(
        "servax_positions", "Positions computed: the product of a bucket's sizes, for each run.", labels=_FUNCTION
    )
    wasted = CounterMetricFamily("servax_padded_positions", "Those that were padding.", labels=_FUNCTION)
    runs = CounterMetricFamily("servax_bucket_runs", "Batches by bucket.", labels=(*_FUNCTION, "bucket"))
    mean = GaugeMetricFamily("servax_mean_batch_rows", "Rows of requests by batches, so far.", labels=_FUNCTION)
    for labels, counts in functions.items():
        for status, count in sorted(counts.statuses.items()):
            requests.add_metric((*labels, status), count)
        buckets = counts.buckets.values()
        if not buckets:
            continue
        computed, used = sum(each.batches * each.positions for each in buckets), sum(each.used for each in buckets)
        total = sum(each.rows for each in buckets)
        rows.add_metric(labels, total)
        padded.add_metric(labels, sum(each.padded_rows for each in buckets))
        positions.add_metric(labels, computed)
        wasted.add_metric(labels, computed - used)
        mean.add_metric(labels, total / sum(each.batches for each in buckets))
        for label, bucket in sorted(counts.buckets.items()):
            runs.add_metric((*labels, label), bucket.batches)
    yield from (requests, rows, padded, positions, wasted, runs, mean)


def _durations(functions: Mapping[tuple[str, str, str], FunctionCounts]) -> Iterator[Metric]:
    request = HistogramMetricFamily(
        "servax_request_seconds", "From accepted to answered, of each request.", labels=_FUNCTION
    )
    queue = HistogramMetricFamily("servax_queue_seconds", "What each request waited for the device.", labels=_FUNCTION)
    step = HistogramMetricFamily(
        "servax_step_seconds", "Each step of a batch: pad, transfer, execute, copy.", labels=(*_FUNCTION, "step")
    )
    for labels, counts in functions.items():
        if not counts.buckets:
            continue
        _add(request, labels, counts.request_seconds)
        _add(queue, labels, counts.queue_seconds)
        for name, histogram in counts.step_seconds.items():
            _add(step, (*labels, name), histogram)
    yield from (request, queue, step)


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    below, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip(BOUNDS, histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == BOUNDS[-1] else str(bound), below))
    family.add_metric(labels, buckets=buckets, sum_value=histogram.seconds)


def _compiles() -> Iterator[Metric]:
    yield CounterMetricFamily(
        "servax_compiles_after_ready",
        "Traces, lowerings and compilations on serving threads; 0 by contract.",
        value=monitoring.counts(monitoring.SERVING).total,
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
