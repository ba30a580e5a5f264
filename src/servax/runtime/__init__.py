"""A servable and requests -> results, with no compilation after ready.

`LocalServable` is built from a table of compiled programs; one `Executor` thread for each device runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.runtime.batching import Batching
    from servax.runtime.local import LocalServable
    from servax.runtime.request import InferRequest, InferResult
    from servax.runtime.runner import ServedFunction
    from servax.runtime.servable import Progress, Servable, State
    from servax.runtime.stages_table import StageRow, StagesTable
    from servax.runtime.swap import SwapReport

__all__ = [
    "Batching",
    "InferRequest",
    "InferResult",
    "LocalServable",
    "Progress",
    "Servable",
    "ServedFunction",
    "StageRow",
    "StagesTable",
    "State",
    "SwapReport",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Batching": "batching",
        "InferRequest": "request",
        "InferResult": "request",
        "LocalServable": "local",
        "Progress": "servable",
        "Servable": "servable",
        "ServedFunction": "runner",
        "StageRow": "stages_table",
        "StagesTable": "stages_table",
        "State": "servable",
        "SwapReport": "swap",
    },
)
