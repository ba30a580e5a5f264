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

PROVEN = 8
"""Real runs after which what is known of a program is believed, however odd it is beside its neighbours."""

DOUBTED = 1.5
"""A program is taken to cost what others show only where it was measured at so many times that: less may be true."""

UNKNOWN = 1e-3
"""Seconds of a program that was not measured."""


class Costs:
    """Seconds by function and bucket. Read from any thread, written by the device's thread and while warming."""

    def __init__(self) -> None:
        self._seconds: dict[Key, float] = {}
        self._planned: dict[Key, float] = {}
        self._runs: dict[Key, int] = {}
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

    def ladder(self, function: str, buckets: Mapping[int, Bucket]) -> list[float]:
        """Seconds of one batch of each bucket, by rows, as plans are made with them.

        A start on a busy machine measures nonsense, and a bucket that seems dear would never run again. So until it
        has run `PROVEN` times for real, none costs `DOUBTED` times as much as a larger one, or as the smaller ones it
        could run as: then it is taken to cost the same.
        """
        seconds = [self.of(function, bucket) for bucket in buckets.values()]
        rows = list(buckets)
        unproven = [self._runs.get((function, bucket), 0) < PROVEN for bucket in buckets.values()]
        for at in reversed(range(len(rows) - 1)):
            if unproven[at] and seconds[at] > DOUBTED * seconds[at + 1]:
                seconds[at] = seconds[at + 1]
        for at in range(1, len(rows)):
            apart = min(-(-rows[at] // rows[less]) * seconds[less] for less in range(at))
            if unproven[at] and seconds[at] > DOUBTED * apart:
                seconds[at] = apart
        return seconds

    def observe(self, key: Key, seconds: float) -> None:
        """Takes what a real run took, from its inputs on the host to its outputs there.

        One that took less than half of what is known shows that this was wrong.
        """
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = seconds
            self._plan()
            return
        if seconds < known / 2:
            known = seconds
        else:
            known += (seconds - known) * _FALL if seconds < known else (min(seconds, _MOST * known) - known) * _RISE
        self._seconds[key] = known
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if runs == PROVEN or abs(known - self._planned[key]) > MOVED * self._planned[key]:
            self._plan()

    def _plan(self) -> None:
        self._planned = dict(self._seconds)
        self.revision += 1
