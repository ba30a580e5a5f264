"""Where answers go: to an event loop, all of a batch in one call, or to a thread that waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from servax.core.errors import ServaxError
from servax.runtime.request import InferResult

Outcome = InferResult | ServaxError


class Answer(Protocol):
    """What waits for one answer.

    Attributes:
      loop: the event loop on whose thread `give` must be called; None: any thread.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def give(self, outcome: Outcome, /) -> None:
        """Hands the answer over; without effect on who no longer waits."""
        ...


class FutureAnswer:
    """A task that awaits its answer on an event loop."""

    __slots__ = ("future", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[InferResult] = loop.create_future()

    def give(self, outcome: Outcome, /) -> None:
        if self.future.done():
            return
        if isinstance(outcome, ServaxError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class ThreadAnswer:
    """A thread that waits for its answer."""

    __slots__ = ("_gate", "_outcome", "loop")

    def __init__(self) -> None:
        self.loop = None
        self._outcome: Outcome | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def give(self, outcome: Outcome, /) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._gate.release()

    def wait(self, timeout: float | None) -> InferResult | None:
        """The result, or None when `timeout` seconds have passed without one.

        Raises:
          ServaxError: the answer is an error.
        """
        if not self._gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            return None
        self._gate.release()
        outcome = self._outcome
        if isinstance(outcome, ServaxError):
            try:
                raise outcome
            finally:
                del self, outcome  # the error's traceback holds this frame
        return outcome


class CallbackAnswer:
    """A function of ours that takes the answer on whatever thread gives it."""

    __slots__ = ("_take", "loop")

    def __init__(self, take: Callable[[Outcome], None]) -> None:
        self.loop = None
        self._take = take

    def give(self, outcome: Outcome, /) -> None:
        self._take(outcome)


def deliver(outcomes: Iterable[tuple[Answer, Outcome]]) -> None:
    """Hands answers over: those for one event loop in one call on its thread, however many there are."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Answer, Outcome]]] = {}
    for each in outcomes:
        loop = each[0].loop
        if loop is None:
            each[0].give(each[1])
        elif (waiting := by_loop.get(loop)) is None:
            by_loop[loop] = [each]
        else:
            waiting.append(each)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody left who waits
            loop.call_soon_threadsafe(_give, waiting)


def _give(outcomes: list[tuple[Answer, Outcome]]) -> None:
    for answer, outcome in outcomes:
        answer.give(outcome)
