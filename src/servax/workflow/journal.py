"""What is done of a long prediction, kept beside its output, so that a run that was ended goes on where it was.

`OUT.partial/` holds `journal.json`, which says what is computed from what, and a file for each finished chunk.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from servax.core.errors import UsageError
from servax.workflow.rows import Array

_JOURNAL = "journal.json"


class Journal:
    """The partial results of one output; entered, it is this process's alone.

    Args:
      output: path of the output.
      task: what is computed from what; a journal of another task is refused.
      restart: throw away what another task left.
    """

    def __init__(self, output: str, task: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = Path(f"{output}.partial")
        self._output = Path(output)
        self._task = dict(task)
        self._restart = restart
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Takes the folder.

        Raises:
          UsageError: another process has it, or it is another task's.
        """
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                "the output cannot be written", where=str(self._output), seen=error.strerror or str(error)
            ) from error
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise UsageError("another process writes this output", where=str(self.folder)) from None
        try:
            self._take()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def done(self, chunk: int) -> bool:
        """Whether a chunk is finished."""
        return zipfile.is_zipfile(self._file(chunk))

    def put(self, chunk: int, arrays: Mapping[str, Array], errors: Mapping[int, str]) -> None:
        """Keeps a finished chunk; errors are by row of the whole."""
        beside = self.folder / f"writing-{chunk}"
        self._errors(chunk).write_text("".join(json.dumps([row, text]) + "\n" for row, text in sorted(errors.items())))
        with beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        beside.replace(self._file(chunk))

    def part(self, chunk: int) -> Callable[[], Mapping[str, Array]]:
        """Gives the arrays of a finished chunk; each is read when it is asked for."""
        return lambda: np.load(self._file(chunk), allow_pickle=False)

    def errors(self, chunks: int) -> list[tuple[int, str]]:
        """Rows without an answer, in order, with their messages."""
        found: list[tuple[int, str]] = []
        for chunk in range(chunks):
            found += [(row, text) for row, text in map(json.loads, self._errors(chunk).read_text().splitlines())]
        return found

    def finish(self, write: Callable[[str], None]) -> None:
        """Puts the output in its place once `write` has written it, and removes the partial results."""
        whole = self.folder / f"whole{self._output.suffix}"
        write(str(whole))
        whole.replace(self._output)
        shutil.rmtree(self.folder)

    def _take(self) -> None:
        path = self.folder / _JOURNAL
        if path.exists() and not self._restart:
            kept = json.loads(path.read_text())
            if differing := sorted(key for key in {*kept, *self._task} if kept.get(key) != self._task.get(key)):
                raise UsageError(
                    "the partial results were begun with another " + ", ".join(differing),
                    where=str(self.folder),
                    seen="; ".join(f"{key}: {kept.get(key)}" for key in differing),
                    expected="; ".join(f"{key}: {self._task.get(key)}" for key in differing),
                    remedy="pass --restart to begin anew, or another output",
                )
            return
        for entry in self.folder.iterdir():
            entry.unlink()
        beside = self.folder / "writing"
        beside.write_text(json.dumps(self._task, indent=1))
        beside.replace(path)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _file(self, chunk: int) -> Path:
        return self.folder / f"chunk-{chunk:06}.npz"

    def _errors(self, chunk: int) -> Path:
        return self.folder / f"chunk-{chunk:06}.errors"
