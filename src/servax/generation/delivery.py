"""What a step gave goes to those who wait for it: once for each event loop, whatever happened there."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

from servax.generation.sequence import Delta, Sequence

_log = logging.getLogger("servax")


class Deliveries:
    """Deltas of one step, handed over by `send`; none of it can raise."""

    def __init__(self) -> None:
        self._items: list[tuple[Sequence, Delta]] = []

    def add(self, sequence: Sequence, delta: Delta) -> None:
        self._items.append((sequence, delta))

    def send(self) -> list[Sequence]:
        """Hands everything over; gives the sequences that nobody can be told of, since their loop is closed."""
        if not self._items:
            return []
        items, self._items = self._items, []
        lost: list[Sequence] = []
        by_loop: dict[object, list[tuple[Sequence, Delta]]] = {}
        for item in items:
            by_loop.setdefault(item[0].loop, []).append(item)
        for group in by_loop.values():
            loop = group[0][0].loop
            if loop is None:
                _receive(group)
                continue
            try:
                loop.call_soon_threadsafe(_receive, group)
            except RuntimeError:  # it is closed
                lost.extend(sequence for sequence, _ in group)
        return lost


def _receive(items: Items[tuple[Sequence, Delta]]) -> None:
    for sequence, delta in items:
        try:
            sequence.receive(delta)
        except Exception:  # a fault of one reader: the others, and the engine, go on
            _log.exception("what an engine gave was not taken")
