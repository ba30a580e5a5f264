"""How long bursts take, and so how many steps one may have."""

from __future__ import annotations

BURST_SECONDS = 0.06
"""How long a burst may take: it bounds the gap between what a stream is sent."""


class Pace:
    """Seconds of a step of `decode` by batch size, as measured.

    Args:
      most: steps that a burst may have at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}

    def expect(self, batch: int, seconds: float) -> None:
        """Takes over what warming has measured, unless something better is known."""
        self._seconds.setdefault(batch, seconds)

    def note(self, batch: int, steps: int, seconds: float) -> None:
        """Notes that a burst of so many steps took so long with nothing else on the device."""
        taken = seconds / steps
        self._seconds[batch] = 0.8 * self._seconds.get(batch, taken) + 0.2 * taken

    def steps(self, batch: int) -> int:
        """Steps of the next burst; of a size that was never measured, one."""
        seconds = self._seconds.get(batch)
        if seconds is None:
            return 1
        return max(1, min(self._most, int(BURST_SECONDS / max(seconds, 1e-9))))
