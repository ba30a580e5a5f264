"""The state of a servable, and the requests it has accepted: who is let in, and who is still to be answered."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import Protocol

from servax.core.errors import NotReady, ServaxError, StartupError
from servax.core.events import StateChanged, emit
from servax.runtime.servable import State

_NEXT = {
    State.LOADING: {State.WARMING, State.FAILED, State.UNLOADED},
    State.WARMING: {State.READY, State.FAILED, State.DRAINING, State.UNLOADED},
    State.READY: {State.DRAINING, State.FAILED},
    State.DRAINING: {State.UNLOADED, State.FAILED},
    State.FAILED: {State.UNLOADED},
    State.UNLOADED: set[State](),
}


class Accepted(Protocol):
    """A request that was let in and gets exactly one answer (contract 8)."""

    def abandon(self, error: ServaxError) -> None:
        """Answers with `error` unless it runs already or has its answer."""
        ...


class Lifecycle:
    """State and accepted requests under one lock, so that nobody is let in after draining began."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = State.LOADING
        self._reason: str | None = None
        self._accepted: set[Accepted] = set()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def reason(self) -> str | None:
        """Why it failed; None otherwise."""
        return self._reason

    @property
    def in_flight(self) -> int:
        """How many requests are accepted and not yet answered."""
        return len(self._accepted)

    def move(self, state: State, reason: str | None = None) -> None:
        """Goes to `state`.

        Raises:
          StartupError: the present state does not lead there.
        """
        with self._changed:
            if state is self._state:
                return
            if state not in _NEXT[self._state]:
                raise StartupError(
                    f"{self._name} cannot go to {state}",
                    seen=self._state,
                    expected=" or ".join(sorted(each for each, to in _NEXT.items() if state in to)),
                )
            self._go(state, reason)
        emit(StateChanged(self._name, state, reason))

    def fail(self, reason: str) -> None:
        """Goes to FAILED from any state but UNLOADED."""
        self._move_from({*State} - {State.FAILED, State.UNLOADED}, State.FAILED, reason)

    def require(self, state: State) -> None:
        """Raises NotReady unless in `state`."""
        if self._state is not state:
            raise self.refusal()

    def refusal(self) -> NotReady:
        """The error for whoever asks too early or too late."""
        remedy = {
            State.LOADING: "wait until it is ready (GET /v2/health/ready)",
            State.WARMING: "wait until it is ready (GET /v2/health/ready)",
            State.DRAINING: "send the request to another server",
            State.UNLOADED: "load it again",
            State.FAILED: "load it again; the reason stands above",
        }.get(self._state)
        seen = self._state if self._reason is None else f"{self._state}: {self._reason}"
        return NotReady(f"{self._name} is not ready", seen=seen, expected=State.READY, remedy=remedy)

    def admit(self, request: Accepted) -> None:
        """Lets a request in.

        Raises:
          NotReady: the state is not READY.
        """
        with self._lock:  # the lock itself: two of a condition's method calls a request are one too many
            if self._state is not State.READY:
                raise self.refusal()
            self._accepted.add(request)

    def release(self, request: Accepted) -> None:
        """Says that a request has its answer."""
        with self._lock:
            self._accepted.discard(request)
            if not self._accepted and self._state is not State.READY:
                self._changed.notify_all()

    def drain(self, timeout: float | None) -> int:
        """Refuses new requests and waits for the accepted ones, at most `timeout` seconds.

        Requests that still wait at the end are answered with NotReady; the number of those left, those that run
        included, is returned.
        """
        self._move_from({State.READY, State.WARMING}, State.DRAINING)
        with self._changed:
            self._changed.wait_for(lambda: not self._accepted, timeout)
            left = tuple(self._accepted)
        for request in left:
            request.abandon(self.refusal())
        return len(left)

    def _move_from(self, states: Set[State], state: State, reason: str | None = None) -> None:
        """Goes to `state` if in one of `states`: looked at and left under one lock, whoever else moves meanwhile."""
        with self._changed:
            if self._state not in states:
                return
            self._go(state, reason)
        emit(StateChanged(self._name, state, reason))

    def _go(self, state: State, reason: str | None) -> None:
        self._state = state
        self._reason = reason
        self._changed.notify_all()
