"""What a verb says: progress on standard error, its result on standard output, errors with an exit code."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from servax.core.errors import ServaxError
from servax.core.events import Event, Notice, StepAdvanced, StepFinished, StepStarted, listening


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; one that was closed is None."""
    return stream is not None and stream.isatty()


_FILE_WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""

err = Console(stderr=True, highlight=False, width=None if _is_terminal(sys.stderr) else _FILE_WIDTH)
out = Console(highlight=False, width=None if _is_terminal(sys.stdout) else _FILE_WIDTH)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def fail(error: ServaxError, *, as_json: bool) -> int:
    """Shows an error, each of its parts on a line of its own or as JSON, and gives its exit code."""
    if as_json:
        fields = ("what", "where", "seen", "expected", "remedy")
        print_json({"error": {"kind": type(error).__name__, **{field: getattr(error, field) for field in fields}}})
    else:
        print(f"servax: {error}", file=sys.stderr)
    return error.exit_code


@contextlib.contextmanager
def progress() -> Generator[None]:
    """Shows the steps of the block: bars on a terminal, a plain line a step elsewhere."""
    if err.is_terminal:
        with _Bars() as listener, listening(listener):
            yield
    else:
        with listening(_print_line):
            yield


def _print_line(event: Event) -> None:
    match event:
        case StepFinished(step, seconds):
            print(f"{step}: {seconds:.2f} s", file=sys.stderr)
        case Notice(message, level):
            print(f"{level}: {message}", file=sys.stderr)
        case _:
            pass


class _Bars:
    """Progress bars fed by events, one a step."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=err,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted(step, total):
                self._tasks[step] = self._progress.add_task(step, total=total or None, detail="")
            case StepAdvanced(step, detail, _) if step in self._tasks:
                self._progress.update(self._tasks[step], advance=1, detail=detail)
            case StepFinished(step, _) if step in self._tasks:
                task = next(task for task in self._progress.tasks if task.id == self._tasks[step])
                total = task.total or max(1, int(task.completed))
                self._progress.update(task.id, completed=total, total=total, detail="")
            case Notice(message, _):
                self._progress.console.print(message, markup=False)
            case _:
                pass
