"""What one run of each program costs: measured while warming, corrected by what real runs take."""

from __future__ import annotations

from collections.abc import Mapping

from servax.stages.buckets import Bucket

Key = tuple[str, Bucket]

MOVED = 0.2
"""The share by which a cost must move before plans made with it are made anew."""

_FALL = 0.2
_RISE = 0.02
"""Weights of a run that was faster, or slower, than known. Whatever else the machine does makes a run slower, never
faster, so what is known falls quickly and rises slowly."""

_MOST = 4
"""A run counts as at most so many times what is known: one that stood still says nothing of the next."""

OVERHEAD = 5e-5
"""Seconds that a batch costs beside its program: planning, joining, cutting, waking who waits. Measured with one row of
a small model on one core, see `docs/guide/batching.md`."""

UNKNOWN = 1e-3
"""Seconds of a program that was not measured."""


class Costs:
    """Seconds by function and bucket. Read from any thread, written by the device's thread and while warming."""

    def __init__(self) -> None:
        self._seconds: dict[Key, float] = {}
        self._planned: dict[Key, float] = {}
        self.revision = 0
        """Goes up when plans are to be made anew."""

    def measured(self) -> Mapping[Key, float]:
        """What is known of each program, without the overhead."""
        return dict(self._seconds)

    def set(self, costs: Mapping[Key, float]) -> None:
        """Takes what warming measured."""
        self._seconds.update(costs)
        self._plan()

    def of(self, function: str, bucket: Bucket) -> float:
        """Seconds of one batch of this bucket, overhead included."""
        seconds = self._seconds.get((function, bucket))
        return OVERHEAD + (UNKNOWN if seconds is None else seconds)

    def observe(self, key: Key, seconds: float) -> None:
        """Takes what a real run took, from its inputs on the host to its outputs there."""
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = seconds
            self._plan()
            return
        known += (seconds - known) * _FALL if seconds < known else (min(seconds, _MOST * known) - known) * _RISE
        self._seconds[key] = known
        if abs(known - self._planned[key]) > MOVED * self._planned[key]:
            self._plan()

    def _plan(self) -> None:
        self._planned = dict(self._seconds)
        self.revision += 1
