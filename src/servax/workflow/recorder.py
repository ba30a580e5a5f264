"""Records the shapes of a server's traffic into a file that `servax tune` reads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from servax.core.errors import UsageError
from servax.core.events import BatchDone, Event, Notice, emit, subscribe
from servax.workflow import traffic

_WAITING = 1 << 16
"""Runs that may wait to be counted; of more the oldest are lost, and counted as lost."""

_COUNTED_EVERY = 1.0


class ShapeRecorder:
    """A listener that counts the shapes of requests and of runs, and keeps a file of them up to date.

    On the device's thread it does no more than append; a thread of its own counts and writes. The file is replaced as
    a whole, so that a reader never sees half of it, and goes on counting where one is there already.

    Args:
      path: of the file.
      limit: distinct shapes that are kept apart; the file has no more lines than that and its header.
      every: seconds between two writes.
    """

    def __init__(self, path: str | os.PathLike[str], *, limit: int = 4096, every: float = 10.0) -> None:
        self._path = Path(path)
        self._limit = limit
        self._every = every
        self._waiting: deque[BatchDone] = deque(maxlen=_WAITING)
        self._counts = traffic.ShapeCounts(limit)
        self._lost = 0
        self._started = _now()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._failed = False

    def start(self) -> Self:
        """Begins to record; does nothing when it does so already.

        Raises:
          UsageError: the file is something else, or cannot be written.
        """
        if self._thread is not None:
            return self
        if self._path.exists():
            for shape, count in traffic.read(self._path):
                self._counts.add(shape, count)
        try:
            self._write()
        except OSError as error:
            raise UsageError(
                "the recorded shapes cannot be written",
                where=str(self._path),
                seen=f"{type(error).__name__}: {error}",
                remedy="name a file in a folder that is there and may be written to",
            ) from error
        self._unsubscribe = subscribe(self._hear)
        self._thread = threading.Thread(target=self._run, name="servax-shapes", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops listening and writes the file once more."""
        if self._thread is None or self._unsubscribe is None:
            return
        self._unsubscribe()
        self._ending.set()
        self._thread.join()
        self._thread = None
        self._ending.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, event: Event) -> None:
        if isinstance(event, BatchDone):
            if len(self._waiting) == _WAITING:
                self._lost += 1
            self._waiting.append(event)

    def _run(self) -> None:
        unwritten = 0.0
        changed = False
        ending = False
        while not ending:
            ending = self._ending.wait(min(_COUNTED_EVERY, self._every))
            unwritten += min(_COUNTED_EVERY, self._every)
            changed = self._count() or changed
            if changed and (ending or unwritten >= self._every):
                self._try_to_write()
                unwritten, changed = 0.0, False

    def _count(self) -> bool:
        counted = False
        while self._waiting:
            self._counts.add_batch(self._waiting.popleft())
            counted = True
        return counted

    def _try_to_write(self) -> None:
        try:
            self._write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                emit(Notice(f"the shapes of traffic cannot be written to {self._path}: {error}", "warning"))

    def _write(self) -> None:
        header = {
            "started": self._started,
            "written": _now(),
            "rounded": self._counts.step,
            "lost": self._lost,
        }
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                file.writelines(traffic.lines(self._counts, header))
            beside.replace(self._path)
        finally:
            beside.unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
