"""Function x bucket -> Traced, Lowered, Compiled: buckets, padding, the three stages, and what is inside a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.stages.buckets import Bucket, BucketGrid, choose, make_grid
    from servax.stages.constants import check_constants, check_exportable
    from servax.stages.fingerprint import Fingerprint
    from servax.stages.padding import CheckedTensors, check, cut, pad
    from servax.stages.pipeline import StageReport, Stages, compile, lower, run_parallel, trace, trace_function

__all__ = [
    "Bucket",
    "BucketGrid",
    "CheckedTensors",
    "Fingerprint",
    "StageReport",
    "Stages",
    "check",
    "check_constants",
    "check_exportable",
    "choose",
    "compile",
    "cut",
    "lower",
    "make_grid",
    "pad",
    "run_parallel",
    "trace",
    "trace_function",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Bucket": "buckets",
        "BucketGrid": "buckets",
        "CheckedTensors": "padding",
        "Fingerprint": "fingerprint",
        "StageReport": "pipeline",
        "Stages": "pipeline",
        "check": "padding",
        "check_constants": "constants",
        "check_exportable": "constants",
        "choose": "buckets",
        "compile": "pipeline",
        "cut": "padding",
        "lower": "pipeline",
        "make_grid": "buckets",
        "pad": "padding",
        "run_parallel": "pipeline",
        "trace": "pipeline",
        "trace_function": "pipeline",
    },
)
