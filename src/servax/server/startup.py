"""What is left of a start-up, step by step, for whoever asks whether the server is ready."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from servax.core.events import Event, StepAdvanced, StepFinished, StepStarted, subscribe
from servax.protocols.dataplane import LoadingStep


class Startup:
    """Listens to the events of loading, from `with` until its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[str, LoadingStep] = {}

    def steps(self) -> tuple[LoadingStep, ...]:
        """The steps begun so far, in order."""
        with self._lock:
            return tuple(self._steps.values())

    def __enter__(self) -> Self:
        self._unsubscribe = subscribe(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()

    def _on_event(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, StepStarted):
                self._steps[event.step] = LoadingStep(event.step, 0, event.total, None)
            elif isinstance(event, StepAdvanced) and (step := self._steps.get(event.step)):
                self._steps[event.step] = LoadingStep(step.step, step.done + 1, step.total, None)
            elif isinstance(event, StepFinished) and (step := self._steps.get(event.step)):
                self._steps[event.step] = LoadingStep(step.step, step.total or step.done, step.total, event.seconds)
