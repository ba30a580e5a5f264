"""The statistics extension's message: what each version of a model has done so far."""

from __future__ import annotations

from typing import Any

from servax.protocols.dataplane import DataPlane
from servax.protocols.statistics import Duration, ModelStatistics

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_STEPS = ("compute_input", "compute_infer", "compute_output")


def model_statistics(plane: DataPlane, name: str | None, version: str | None) -> dict[str, Any]:
    """`GET /v2/models/{m}/versions/{v}/stats`; of all versions or all models where none is named.

    Raises:
      NotFound: no such model or version.
    """
    statuses = plane.list() if name is None else plane.versions(name)
    if name is not None and version is not None:
        plane.get(name, version)
        statuses = [status for status in statuses if status.version == version]
    return {"model_stats": [_message(plane.statistics.of(status.name, status.version)) for status in statuses]}


def _message(statistics: ModelStatistics) -> dict[str, Any]:
    never = {"count": 0, "ns": 0}  # servax caches no answers; clients of Triton's read the keys
    return {
        "name": statistics.name,
        "version": statistics.version,
        "last_inference": statistics.last_inference,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            **{name: _duration(getattr(statistics, name)) for name in _DURATIONS},
            "cache_hit": never,
            "cache_miss": never,
        },
        "batch_stats": [
            {"batch_size": batch.batch_size, **{name: _duration(getattr(batch, name)) for name in _STEPS}}
            for batch in statistics.batch_stats
        ],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
