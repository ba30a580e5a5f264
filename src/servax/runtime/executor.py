"""One thread for each device: whatever touches the device after loading does so here, under guard (contract 1)."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from servax.core.device import Device
from servax.core.errors import ExecutionError, NotReady, ServaxError
from servax.runtime.guard import guarded
from servax.runtime.queue import FairQueue, Work

_log = logging.getLogger("servax")
_lock = threading.Lock()
_executors: dict[Device, tuple[Executor, int]] = {}
"""The executors of this process with the number of their holders: one a device, whoever asks."""

_forks = 0
"""Forks between this process and the one that imported this module."""


def _on_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_on_fork)


class Executor:
    """A thread that takes work from a queue and runs it, one item at a time.

    An `Exception` of one item is that item's answer. Anything worse ends the thread: all that waits is answered
    at once with ExecutionError, and those who asked by `on_death` are told first.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue = FairQueue()
        """Where the thread takes its work from; servables join it."""
        self._listeners: tuple[Callable[[str], None], ...] = ()
        self._death: str | None = None
        # A CPU runs programs on the cores that would join the next batch, and mostly on this very thread.
        self._overlaps = device.platform != "cpu"
        self._following: Work | None = None
        self._process, self._forks = os.getpid(), _forks
        self._thread = threading.Thread(target=self._main, name=f"servax-{device.platform}-{device.id}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still takes work."""
        return self._thread.is_alive() and self._death is None

    @property
    def waiting(self) -> int:
        """How much work waits."""
        return len(self.queue)

    def put(self, work: Work) -> None:
        """Queues work; NotReady once the thread has ended, and in a process that was forked off this one's."""
        self.require_here()
        self.queue.put(work)

    def require_here(self) -> None:
        """Raises NotReady in a process that was forked off the one where the thread runs."""
        if self._forks != _forks:
            raise NotReady(
                "this process was forked from the one that loaded the model, and threads do not come along",
                seen=f"process {os.getpid()}",
                expected=f"process {self._process}",
                remedy="load after the fork (gunicorn: without --preload), or start workers by spawn; JAX does not "
                "survive a fork either",
            )

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the device's thread and gives what it returns or raises; blocks."""
        work = _Call(function)
        self.put(work)
        return work.future.result()

    def on_death(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Has `listener` called with the reason if the thread dies; calling what is returned takes it back."""
        with _lock:
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            with _lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return remove

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread after the work that runs; what waits is answered with NotReady."""
        for work in self.queue.close():
            work.fail(NotReady("the servable was closed while the request waited"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _main(self) -> None:
        current: Work | None = None
        try:
            with guarded():
                while (current := self.queue.take()) is not None:
                    if current.begin():
                        current.run(self._look_ahead if self._overlaps else None)
                    current = None  # nothing of a finished request stays alive while the thread waits
                    while (current := self._following) is not None:
                        self._following = None
                        self.queue.go_on()
                        current.run(self._look_ahead)
                        current = None
        except BaseException as error:  # the thread's last words: everyone who waits must hear them
            self._die(error, current)

    def _look_ahead(self) -> None:
        """Claims and prepares the next batch while one runs, if it is as good as it will get."""
        following = self.queue.ahead()
        if following is not None and following.begin():
            self._following = following
            following.prepare()

    def _die(self, error: BaseException, current: Work | None) -> None:
        self._death = f"{type(error).__name__}: {error}"
        for listener in self._listeners:
            try:
                listener(self._death)
            except Exception:  # the other listeners, and all who wait, must still hear of it
                _log.exception("a listener failed while %s died", self._thread.name)
        waiting = self.queue.close()
        for work in (*(each for each in (current, self._following) if each is not None), *waiting):
            work.fail(
                ExecutionError(
                    "the thread that runs the device has died",
                    where=str(self.device),
                    seen=self._death,
                    remedy="load the servable again, or restart the server",
                )
            )


class _Call:
    """A function of ours to be run on the device's thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._function = function

    def begin(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def prepare(self) -> None:
        """Nothing can be done ahead."""

    def run(self, meanwhile: Callable[[], None] | None) -> None:
        try:
            value = self._function()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)

    def fail(self, error: ServaxError) -> None:
        self.future.set_exception(error)


def acquire(device: Device) -> Executor:
    """The executor of `device`, started when nobody holds it; `release` it after use."""
    with _lock:
        executor, holders = _executors.get(device, (None, 0))
        if executor is None or not executor.alive:
            executor, holders = Executor(device), 0
        _executors[device] = (executor, holders + 1)
        return executor


def release(executor: Executor) -> None:
    """Gives an executor back; it ends with its last holder."""
    with _lock:
        held, holders = _executors.get(executor.device, (None, 0))
        if held is executor and holders > 1:
            _executors[executor.device] = (executor, holders - 1)
            return
        if held is executor:
            del _executors[executor.device]
    executor.close()


@atexit.register
def _close_all() -> None:
    """Ends the threads before the interpreter takes JAX apart under them."""
    with _lock:
        executors = [executor for executor, _ in _executors.values()]
        _executors.clear()
    for executor in executors:
        executor.close(timeout=5.0)
