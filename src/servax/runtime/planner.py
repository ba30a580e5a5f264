"""Which bucket runs next, from what each costs: arithmetic over rows, free of requests, clocks and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHEAPER = 0.8
"""The share of the smaller bucket's cost below which a larger one is taken in its place."""

MARGIN = 0.02
"""The share of the cost that joining other lengths must save; less is noise."""


class Ladder:
    """The batch sizes of one shape, with their costs, and the least that any number of rows costs in them.

    Five rows may run as 4 + 1 or padded to 8: whichever is less in sum (a dynamic program over the number of rows,
    filled as far as it is asked for).

    Args:
      capacities: rows of each bucket, ascending.
      seconds: of one run of each.
    """

    def __init__(self, capacities: Sequence[int], seconds: Sequence[float]) -> None:
        self.capacities = tuple(capacities)
        self.seconds = tuple(seconds)
        self.largest = self.capacities[-1]
        self._options = tuple(zip(self.capacities, self.seconds, strict=True))
        self.best, self._best_seconds = min(self._options, key=lambda option: (option[1] / option[0], -option[0]))
        """The batch size that costs least a row."""
        self._totals = [0.0]
        self._firsts = [0]

    def total(self, rows: int) -> float:
        """The least seconds that `rows` rows take, in one run or several."""
        if rows <= self.largest:
            self._extend(rows)
            return self._totals[rows]
        full = -(-(rows - self.largest) // self.best)
        return full * self._best_seconds + self.total(rows - full * self.best)

    def first(self, rows: int, least: int = 1) -> int:
        """The batch size to run now for `rows` rows that wait, one of them a request of `least` rows.

        Of the runs of the cheapest plan the largest goes first: it answers most.
        """
        if rows > self.largest:
            chosen = self.best
        else:
            self._extend(rows)
            chosen = self._firsts[rows]
        return chosen if chosen >= least else self.fitting(least)

    def fitting(self, rows: int) -> int:
        """The smallest batch size that holds `rows`, or a larger one that is clearly cheaper.

        There must be one: `rows` are no more than the largest holds.
        """
        chosen = 0
        least = float("inf")
        for capacity, seconds in self._options:
            if capacity >= rows and seconds < CHEAPER * least:
                chosen, least = capacity, seconds
        return chosen

    def _extend(self, rows: int) -> None:
        totals, firsts = self._totals, self._firsts
        for count in range(len(totals), rows + 1):
            least, first = float("inf"), 0
            for capacity, seconds in self._options:
                rest = count - capacity
                whole = seconds + totals[rest] if rest > 0 else seconds
                # Of equal plans the one with the larger run: fewer runs.
                if whole <= least:
                    least, first = whole, max(capacity, firsts[rest] if rest > 0 else 0)
            totals.append(least)
            firsts.append(first)


@dataclass(frozen=True, slots=True)
class Run:
    """What to run next.

    Attributes:
      shape: index of the shape.
      capacity: rows of the bucket, at most.
      members: indices of the shapes whose requests go in, in the order in which they are taken.
    """

    shape: int
    capacity: int
    members: tuple[int, ...]


def plan(
    ladders: Sequence[Ladder], within: Sequence[Sequence[int]], waiting: Mapping[int, int], head: int, least: int
) -> Run:
    """The next run, which holds the request that is at the head.

    The rows of the head's shape run by themselves, unless it costs less in all to run them with those of a larger
    shape, or rows of smaller ones with them. Places that stay free take rows of smaller shapes where that saves a run.

    Args:
      ladders: of each shape.
      within: of each shape the smaller ones whose requests fit into it, the largest first.
      waiting: rows that wait, by shape.
      head: the shape of the request that must go in.
      least: its rows.
    """
    shape, rows, members = head, waiting[head], [head]
    most = 0.0
    for other, count in waiting.items():
        if other != head and head in within[other] and ladders[other].largest >= least:
            gain = _gain(ladders, other, count, head, waiting[head])
            if gain > most:
                shape, rows, members, most = other, waiting[head] + count, [head, other], gain
    ladder = ladders[shape]
    smaller = [other for other in within[shape] if other not in members and waiting.get(other)]
    for other in smaller:
        if _gain(ladders, shape, rows, other, waiting[other]) > 0:
            members.append(other)
            rows += waiting[other]
    capacity = ladder.first(rows, least)
    free = capacity - rows
    for other in smaller:
        if free <= 0:
            break
        if other in members:
            continue
        count, taken = waiting[other], min(free, waiting[other])
        before, after = ladders[other].total(count), ladders[other].total(count - taken)
        if before - after > MARGIN * before:
            members.append(other)
            free -= taken
    return Run(shape, capacity, tuple(members))


def _gain(ladders: Sequence[Ladder], large: int, rows: int, small: int, others: int) -> float:
    """Seconds saved by running rows of a smaller shape in a larger one; 0 where it is too little to tell."""
    apart = ladders[large].total(rows) + ladders[small].total(others)
    gain = apart - ladders[large].total(rows + others)
    return gain if gain > MARGIN * apart else 0.0
