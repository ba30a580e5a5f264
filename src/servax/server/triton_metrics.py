"""The `nv_inference_*` names, for dashboards and autoscalers that were made for Triton; opt-in.

Written by hand: prometheus-client puts `_total` behind a counter's name, and these have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from servax.core.errors import ServaxError
from servax.protocols.dataplane import DataPlane
from servax.protocols.statistics import ModelStatistics

_COUNTERS: dict[str, tuple[str, Callable[[ModelStatistics], int]]] = {
    "nv_inference_request_success": ("Requests that were answered.", lambda each: each.success.count),
    "nv_inference_count": ("Rows that were computed.", lambda each: each.inference_count),
    "nv_inference_exec_count": ("Batches that ran.", lambda each: each.execution_count),
    "nv_inference_request_duration_us": (
        "Microseconds from accepted to answered, of all answered requests.",
        lambda each: each.success.ns // 1000,
    ),
    "nv_inference_queue_duration_us": ("Microseconds that they waited.", lambda each: each.queue.ns // 1000),
    "nv_inference_compute_input_duration_us": (
        "Microseconds of padding and the copy to the device.",
        lambda each: each.compute_input.ns // 1000,
    ),
    "nv_inference_compute_infer_duration_us": ("Microseconds of running.", lambda each: each.compute_infer.ns // 1000),
    "nv_inference_compute_output_duration_us": (
        "Microseconds of the copy back.",
        lambda each: each.compute_output.ns // 1000,
    ),
}

_REASONS = {"Overloaded": "REJECTED", "DeadlineExceeded": "REJECTED", "Cancelled": "CANCELED"} | dict.fromkeys(
    ("ExecutionError", "RecompileError"), "BACKEND"
)
"""Why a request failed, in Triton's words; everything else is `OTHER`."""


def text(plane: DataPlane) -> str:
    """All of them in Prometheus' text form."""
    return "".join(f"{line}\n" for line in _lines(plane))


def _lines(plane: DataPlane) -> Iterator[str]:
    functions = plane.statistics.functions()
    loaded = {(status.name, status.version) for status in plane.list()}
    versions = sorted(loaded | {(model, version) for model, version, _ in functions})
    statistics = [plane.statistics.of(*version) for version in versions]
    for name, (meaning, value) in _COUNTERS.items():
        yield from _family(name, meaning, "counter")
        yield from (f"{name}{_labels(each.name, each.version)} {value(each)}" for each in statistics)
    yield from _family("nv_inference_request_failure", "Requests that were not answered, by reason.", "counter")
    for model, version in versions:
        failed: dict[str, int] = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
        for (of, at, _), counts in functions.items():
            if (of, at) == (model, version):
                for status, count in counts.statuses.items():
                    if status != "ok":
                        failed[_REASONS.get(status, "OTHER")] += count
        for reason, count in failed.items():
            yield f"nv_inference_request_failure{_labels(model, version, reason)} {count}"
    yield from _family("nv_inference_pending_request_count", "Requests that wait for the device.", "gauge")
    for model, version in sorted(loaded):
        try:
            servable = plane.get(model, version)
        except ServaxError:
            continue  # known, and not loaded
        if (queued := getattr(servable, "queued", None)) is not None:
            yield f"nv_inference_pending_request_count{_labels(model, version)} {queued}"


def _family(name: str, meaning: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _labels(model: str, version: str, reason: str | None = None) -> str:
    labels = {"model": model, "version": version} | ({} if reason is None else {"reason": reason})
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
