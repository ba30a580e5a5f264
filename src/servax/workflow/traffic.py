"""Recorded shapes of traffic: sizes of requests and of what ran on the device, counted; never a value.

The file is JSON, one object a line, as `docs/guide/buckets.md` describes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from servax.core.errors import UsageError
from servax.core.events import BatchDone

FORMAT = 1

Kind = Literal["request", "run"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a request, or of a run on the device.

    Attributes:
      kind: `request`: as one client sent it; `run`: requests joined.
      model: name of the model; empty where the file does not say.
      function: that was called.
      sizes: by dimension, in order of name; of a run the largest of its requests.
      rows: of a run: rows of all its requests together; 0 for a request.
    """

    kind: Kind
    model: str
    function: str
    sizes: tuple[tuple[str, int], ...]
    rows: int = 0


class Line(msgspec.Struct, omit_defaults=True):
    """A line of the file. A line with `function` and `sizes` alone is one request."""

    kind: Literal["header", "request", "run"] = "request"
    format: int | None = None
    started: str | None = None
    written: str | None = None
    rounded: int | None = None
    lost: int | None = None
    model: str = ""
    function: str = "predict"
    sizes: dict[str, int] = {}
    rows: int = 0
    count: int = 1


class ShapeCounts:
    """How often each shape was seen, at most `limit` distinct ones.

    Beyond the limit sizes are rounded up to multiples of 2, then of 4, and so on, but not beyond the largest seen: a
    grid that serves what is recorded serves what came.

    Attributes:
      step: the multiple that sizes are rounded up to; 1: they are exact.
    """

    def __init__(self, limit: int) -> None:
        self.step = 1
        self._limit = limit
        self._counts: dict[Shape, int] = {}
        self._largest: dict[tuple[str, str, str], int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[tuple[Shape, int]]:
        """Each shape and its count; sizes that were rounded beyond the largest seen are that."""
        cut: dict[Shape, int] = {}
        for shape, count in self._counts.items():
            sizes = tuple((dim, min(size, self._most(shape, dim))) for dim, size in shape.sizes)
            whole = Shape(shape.kind, shape.model, shape.function, sizes, min(shape.rows, self._most(shape, "")))
            cut[whole] = cut.get(whole, 0) + count
        return iter(cut.items())

    def add(self, shape: Shape, count: int = 1) -> None:
        """Counts a shape."""
        for dim, size in (*shape.sizes, ("", shape.rows)):
            key = (shape.model, shape.function, dim)
            self._largest[key] = max(size, self._largest.get(key, 0))
        shape = self._rounded(shape)
        self._counts[shape] = self._counts.get(shape, 0) + count
        while len(self._counts) > self._limit and self.step < max(self._largest.values()):
            self._coarsen()

    def add_batch(self, event: BatchDone) -> None:
        """Counts a run and each of its requests."""
        if not event.sizes:
            return
        for sizes in event.sizes:
            self.add(Shape("request", event.servable, event.function, tuple(sorted(sizes.items()))))
        largest = {dim: max(sizes.get(dim, 0) for sizes in event.sizes) for dim in sorted(event.sizes[0])}
        self.add(Shape("run", event.servable, event.function, tuple(largest.items()), event.rows))

    def _most(self, shape: Shape, dim: str) -> int:
        return self._largest[shape.model, shape.function, dim]

    def _rounded(self, shape: Shape) -> Shape:
        if self.step == 1:
            return shape
        sizes = tuple((dim, self._up(size)) for dim, size in shape.sizes)
        return Shape(shape.kind, shape.model, shape.function, sizes, self._up(shape.rows))

    def _up(self, size: int) -> int:
        return -(-size // self.step) * self.step

    def _coarsen(self) -> None:
        self.step *= 2
        counts, self._counts = self._counts, {}
        for shape, count in counts.items():
            rounded = self._rounded(shape)
            self._counts[rounded] = self._counts.get(rounded, 0) + count


def lines(counts: Iterable[tuple[Shape, int]], header: Mapping[str, object]) -> Iterator[bytes]:
    """The lines of a file, each with its newline; the most frequent shapes first."""
    encode = msgspec.json.Encoder().encode
    yield encode({"kind": "header", "format": FORMAT, **header}) + b"\n"
    for shape, count in sorted(counts, key=lambda each: (each[0].kind, -each[1], each[0].model, each[0].sizes)):
        line: dict[str, object] = {"kind": shape.kind, "model": shape.model, "function": shape.function}
        if shape.kind == "run":
            line["rows"] = shape.rows
        yield encode({**line, "sizes": dict(shape.sizes), "count": count}) + b"\n"


def read(path: str | os.PathLike[str]) -> list[tuple[Shape, int]]:
    """The shapes of a file with how often each was seen.

    Raises:
      UsageError: it cannot be read; names the line.
    """
    from etils import epath

    name = os.fspath(path)
    try:
        content = epath.Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            "the recorded shapes cannot be read", where=name, seen=f"{type(error).__name__}: {error}"
        ) from error
    decoder = msgspec.json.Decoder(Line)
    shapes: list[tuple[Shape, int]] = []
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _unreadable(name, number, str(error)) from error
        if line.kind == "header":
            if line.format != FORMAT:
                raise _unreadable(name, number, f"format {line.format}")
            continue
        if line.count < 1 or line.rows < 0 or not all(1 <= size < 2**31 for size in line.sizes.values()):
            raise _unreadable(name, number, text[:200].decode(errors="replace"))
        sizes = tuple(sorted(line.sizes.items()))
        shapes.append((Shape(line.kind, line.model, line.function, sizes, line.rows), line.count))
    return shapes


def _unreadable(name: str, number: int, seen: str) -> UsageError:
    return UsageError(
        "a line of the recorded shapes cannot be read",
        where=f"{name}:{number}",
        seen=seen,
        expected='{"function": "predict", "sizes": {"batch": 1, "length": 17}, "count": 1}, counts and sizes from 1, '
        f"of format {FORMAT}",
        remedy="record anew: servax serve BUNDLE --record-shapes FILE",
    )
