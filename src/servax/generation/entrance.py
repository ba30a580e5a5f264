"""Where sequences come in, from any thread, and where they wait for a slot."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from servax.core.errors import Overloaded, ServaxError
from servax.generation.sequence import Finish, Sequence


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What may wait.

    Attributes:
      requests: sequences that wait for a slot.
      tokens: of their prompts, in all; a single prompt may be longer.
    """

    requests: int = 256
    tokens: int = 1 << 20


class Entrance:
    """Sequences without a slot: those of higher priority first, then those that came first.

    `add`, `withdraw`, `give_up` and `close` are for any thread, the rest for the engine's.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._arrived: deque[Sequence] = deque()
        self._given_up: deque[Sequence] = deque()
        self._closed: ServaxError | None = None
        self._count = 0
        self._tokens = 0
        self._waiting: list[Sequence] = []
        self._left = 0.0
        self._interval = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether somebody came, waits, or was given up."""
        return bool(self._count or self._given_up)

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence in.

        Raises:
          Overloaded: too much waits; says when another try is worth it.
          ServaxError: what `close` was called with.
        """
        size = len(sequence.prompt)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if self._count >= self._limits.requests or (self._count and self._tokens + size > self._limits.tokens):
                error = Overloaded(
                    "too many prompts wait for a slot",
                    seen=f"{self._count} requests of {self._tokens} tokens",
                    expected=f"at most {self._limits.requests} requests and {self._limits.tokens} tokens",
                    remedy="send it again later, or raise the limits",
                )
                error.retry_after = max(1.0, self._count * self._interval)
                raise error
            self._count += 1
            self._tokens += size
            self._arrived.append(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes back what `add` has just let in."""
        with self._lock:
            if sequence in self._arrived:
                self._arrived.remove(sequence)
                self._forget(sequence)

    def give_up(self, sequence: Sequence, why: Finish | ServaxError) -> bool:
        """Has the next step end a sequence, wherever it is; False if it is over, or was given up before."""
        with self._lock:
            if sequence.over or sequence.given_up is not None:
                return False
            sequence.given_up = why
            self._given_up.append(sequence)
            return True

    def close(self, error: ServaxError) -> list[Sequence]:
        """Lets nobody in any more, and gives those that wait."""
        with self._lock:
            self._closed = error
            left = [*self._arrived, *self._waiting]
            self._arrived.clear()
            self._given_up.clear()
            self._waiting.clear()
            self._count = self._tokens = 0
        return left

    def turn(self) -> list[Sequence]:
        """Puts those that came in line, and gives those that were given up."""
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            given_up, self._given_up = self._given_up, deque()
        if arrived:
            self._waiting.extend(arrived)
            self._waiting.sort(key=_turn)
        return list(given_up)

    def first(self) -> Sequence | None:
        """Whose turn it is."""
        return self._waiting[0] if self._waiting else None

    def remove(self, sequence: Sequence, *, admitted: bool = False) -> None:
        """Notes that a sequence waits no more, if it did; `admitted`: since it got a slot."""
        if sequence not in self._waiting:
            return
        self._waiting.remove(sequence)
        now = time.perf_counter()
        with self._lock:
            if admitted:
                taken = now - max(self._left, sequence.came)
                self._interval = 0.8 * self._interval + 0.2 * taken if self._interval else taken
                self._left = now
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._count -= 1
        self._tokens -= len(sequence.prompt)


def _turn(sequence: Sequence) -> tuple[int, float]:
    return -sequence.priority, sequence.came
