"""What happens inside, told to whoever listens: progress bars, logs, metrics and pages.

A lower room emits, a higher one subscribes; no room learns who listens, and nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

Listener = Callable[["Event"], None]

_log = logging.getLogger("servax")
_lock = threading.Lock()


class _Subscription:
    """A listener with an identity of its own, so that one may be subscribed twice."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._failed = False

    def tell(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # who emits must not suffer from who listens
            if not self._failed:
                self._failed = True
                _log.exception("a listener failed at %s; it is told on, and its failures no more", event)


_subscribed: tuple[_Subscription, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; subclasses say what."""


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """A named step of a verb began; `total` is the number of parts it will report, 0 if unknown."""

    step: str
    total: int = 0


@dataclass(frozen=True, slots=True)
class StepAdvanced(Event):
    """One part of a step is done: `detail` names it (`predict@batch=8,length=32`), `seconds` is its duration."""

    step: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """A step is done."""

    step: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """A servable went from one state to another (`WARMING` -> `READY`)."""

    servable: str
    state: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A message for people, said once: a fallback, a dropped part, an assumption made for the user."""

    message: str
    level: str = "info"
    fields: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class CompileEvent(Event):
    """JAX traced, lowered or compiled, by `jax.monitoring`, on a thread whose role is `role`.

    `stage` is `trace`, `lower`, `compile` or `cache_hit`; `role` is `serving`, `loading` or `other`.
    """

    stage: str
    function: str
    seconds: float
    role: str


@dataclass(frozen=True, slots=True)
class BatchDone(Event):
    """A batch ran and its requests have their answers; emitted once a batch, on the device's thread.

    Listeners hear it before those who wait do: whoever reads a counter after an answer finds it counted. Of a request
    that runs in parts each part is told of as a request.

    Attributes:
      servable: name of the model.
      version: its version.
      function: that ran.
      bucket: label of the bucket.
      capacity: rows of the bucket; 1 where the function has no batch dimension.
      rows: rows of requests in it; the rest is padding.
      steps: seconds of the whole batch by step: `pad`, `transfer`, `execute`, `copy`.
      queued: seconds each request waited, in order.
      seconds: from accepted to answered, of each request, in the same order.
      sizes: each request's own size by dimension, in the same order.
    """

    servable: str
    version: str
    function: str
    bucket: str
    capacity: int
    rows: int
    steps: Mapping[str, float]
    queued: tuple[float, ...]
    seconds: tuple[float, ...]
    sizes: tuple[Mapping[str, int], ...]


@dataclass(frozen=True, slots=True)
class RequestFailed(Event):
    """A request got an error, was refused, or was given up by its client.

    Attributes:
      status: the error's class (`InvalidInput`, `Overloaded`, `DeadlineExceeded`), or `Cancelled`.
      seconds: since it came.
    """

    servable: str
    version: str
    function: str
    status: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptDone(Event):
    """A prompt is in the cache, and its answer begins.

    Attributes:
      servable: name of the model.
      version: its version.
      tokens: of the prompt.
      reused: of these, how many were in the cache already.
      queued: seconds that it waited for a slot.
      seconds: from there until it was in the cache.
    """

    servable: str
    version: str
    tokens: int
    reused: int
    queued: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BurstDone(Event):
    """Some steps of generation ran; emitted once a burst, on the device's thread.

    Attributes:
      servable: name of the model.
      version: its version.
      batch: rows of the bucket.
      rows: sequences in it.
      steps: how many ran.
      tokens: that sequences got.
      seconds: from the call until the tokens were on the host.
      firsts: seconds from a sequence's arrival to its first token, of those that got it now.
      gaps: of the others, seconds a token since the tokens before, and how many tokens.
    """

    servable: str
    version: str
    batch: int
    rows: int
    steps: int
    tokens: int
    seconds: float
    firsts: tuple[float, ...]
    gaps: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class SequenceDone(Event):
    """A sequence ended. Times are on `time.perf_counter`'s clock; None for what it did not come to.

    Attributes:
      servable: name of the model.
      version: its version.
      status: `stop`, `length`, `abort`, or the error's class.
      prompt: tokens of the prompt.
      reused: of these, how many were in the cache already.
      tokens: of the answer.
      came, admitted, prefilled, first, last, over: when it came, got a slot, had its prompt in it, was given its first
        and its last token, and ended.
    """

    servable: str
    version: str
    status: str
    prompt: int
    reused: int
    tokens: int
    came: float
    admitted: float | None
    prefilled: float | None
    first: float | None
    last: float | None
    over: float


def emit(event: Event) -> None:
    """Calls every listener with `event`, on this thread, in the order of subscription.

    What a listener raises stays its own: it is logged once, with its traceback, and the others hear the event.
    """
    for subscription in _subscribed:
        subscription.tell(event)


def subscribe(listener: Listener) -> Callable[[], None]:
    """Adds a listener; calling what is returned removes it."""
    global _subscribed
    subscribed = _Subscription(listener)
    with _lock:
        _subscribed = (*_subscribed, subscribed)

    def unsubscribe() -> None:
        global _subscribed
        with _lock:
            _subscribed = tuple(each for each in _subscribed if each is not subscribed)

    return unsubscribe


@contextlib.contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Subscribes `listener` for the duration of the block."""
    unsubscribe = subscribe(listener)
    try:
        yield
    finally:
        unsubscribe()


@contextlib.contextmanager
def step(name: str, total: int = 0) -> Generator[None]:
    """Emits `StepStarted` before the block and `StepFinished` after it, unless it raises."""
    start = time.perf_counter()
    emit(StepStarted(name, total))
    yield
    emit(StepFinished(name, time.perf_counter() - start))
