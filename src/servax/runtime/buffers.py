"""Host buffers that batches are joined in: kept and used again, each by one batch at a time (contract 7)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from servax.stages.buckets import Bucket
from servax.stages.conversion import Array

KEPT = 2
"""Sets of buffers kept of each bucket: one runs while another is filled."""


class BufferPool:
    """Sets of buffers by function and bucket; what is lent belongs to the batch until it is given back."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, Bucket], list[tuple[Array, ...]]] = {}
        self._lock = threading.Lock()

    def take(self, key: tuple[str, Bucket], make: Callable[[Bucket], tuple[Array, ...]]) -> tuple[Array, ...]:
        """A set of buffers, whatever they hold; a new one of `make` where none is free."""
        with self._lock:
            if free := self._free.get(key):
                return free.pop()
        return make(key[1])

    def give_back(self, key: tuple[str, Bucket], buffers: tuple[Array, ...]) -> None:
        """Ends a loan: nothing reads or writes the buffers any more."""
        with self._lock:
            free = self._free.setdefault(key, [])
            if len(free) < KEPT:
                free.append(buffers)

    def clear(self) -> None:
        """Lets go of what is kept."""
        with self._lock:
            self._free.clear()
