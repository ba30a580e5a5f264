"""Whether the device still works: when several requests in a row have failed, a run of our own tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from servax.core.errors import RecompileError, ServaxError
from servax.runtime.runner import Buffers, Runner, ServedFunction
from servax.runtime.warmup import filled
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import FlatArrays

FAILURES = 3
"""Failed requests, with none answered between them, that cast doubt on the device."""


class Watch:
    """Runs programs for requests, on the device's thread, and tells once when the device no longer runs any.

    Requests alone prove nothing: one bucket may be too large, or one client send what a callback of the model refuses.
    So after `FAILURES` of them the smallest program runs with the inputs of warming, and only its failure counts. A
    call that would have compiled says nothing about the device.

    Args:
      on_broken: called with the reason.
    """

    def __init__(
        self,
        runner: Runner,
        functions: Mapping[str, ServedFunction],
        grid: BucketGrid,
        on_broken: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._functions = functions
        self._grid = grid
        self._on_broken = on_broken
        self._failures = 0
        self._broken = False

    def run(
        self,
        function: str,
        bucket: Bucket,
        buffers: Buffers | FlatArrays,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[tuple[np.ndarray[Any, Any], ...], dict[str, float]]:
        """As `Runner.run`."""
        try:
            answer = self._runner.run(function, bucket, buffers, meanwhile=meanwhile)
        except RecompileError:
            raise
        except Exception:  # of whatever kind: it is counted, and goes on to the request
            self._failures += 1
            if self._failures >= FAILURES and not self._broken:
                self._failures = 0
                self._look()
            raise
        self._failures = 0
        return answer

    def put(self, buffers: Buffers) -> FlatArrays:
        """As `Runner.put`."""
        return self._runner.put(buffers)

    def _look(self) -> None:
        stateless = [key for key in self._grid if not self._functions[key[0]].stateful]
        function, bucket = min(stateless or self._grid, key=lambda key: key[1].volume())
        served = self._functions[function]
        try:
            self._runner.run(function, bucket, filled(served.signature, bucket))
            if served.stateful:
                self._runner.reset_state()  # as the failure before has left it
        except RecompileError:
            return
        except Exception as error:
            self._broken = True
            seen = error.sentence() if isinstance(error, ServaxError) else f"{type(error).__name__}: {error}"
            self._on_broken(
                f"the device runs nothing any more: {FAILURES} requests in a row failed, and so did a run of our own: "
                f"{seen}"
            )
