"""How many clients ask at once and how quickly they come back: what a short wait can hope for."""

from __future__ import annotations

_MEMORY = 0.02
"""Seconds over which the number of unanswered requests is averaged."""

_WINDOW = 0.05
"""Seconds of each of the two windows whose most unanswered requests are remembered."""

_GAP = 0.1
"""The weight of the latest arrival in the mean gap between two."""

_LONGEST_GAP = 0.05
"""Seconds; a longer pause is one pause, not a rate."""


class Demand:
    """Requests accepted and not yet answered, over the last tens of milliseconds.

    One client that waits for each answer never has two unanswered requests, so their average says who is alone:
    at most 1, whatever the rate.
    """

    __slots__ = ("_arrival", "_at", "_peak", "_peak_before", "_window", "average", "gap", "unanswered")

    def __init__(self, now: float) -> None:
        self.unanswered = 0
        self.average = 0.0
        """Unanswered requests, averaged over time."""
        self.gap = _LONGEST_GAP
        """Mean seconds between two arrivals while others are unanswered."""
        self._at = self._arrival = self._window = now
        self._peak = self._peak_before = 0

    def arrived(self, now: float) -> None:
        """A request came."""
        unanswered = self.unanswered
        passed = now - self._at
        self._at = now
        self.average += (unanswered - self.average) * passed / (passed + _MEMORY)
        if unanswered:
            self.gap += (min(now - self._arrival, _LONGEST_GAP) - self.gap) * _GAP
        self._arrival = now
        self.unanswered = unanswered = unanswered + 1
        if now - self._window > _WINDOW:
            self._turn(now)
        self._peak = max(self._peak, unanswered)

    def answered(self, now: float, count: int) -> None:
        """Requests got their answers, or were given up."""
        passed = now - self._at
        self._at = now
        self.average += (self.unanswered - self.average) * passed / (passed + _MEMORY)
        self.unanswered -= count

    def expected(self, now: float) -> int:
        """How many requests may wait together if those who asked of late ask again; 1 for one that is alone."""
        if self.average <= 1.0:
            return 1
        if now - self._window > _WINDOW:
            self._turn(now)
        return max(self._peak, self._peak_before)

    def quiet(self, now: float) -> float:
        """Seconds since the last arrival."""
        return now - self._arrival

    def _turn(self, now: float) -> None:
        self._peak_before = self._peak if now - self._window < 2 * _WINDOW else 0
        self._peak, self._window = self.unanswered, now
