"""A table that shows itself: rich in a terminal, HTML in a notebook, plain text elsewhere."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """Rows of text under column heads.

    Attributes:
      title: what the table shows.
      columns: the heads; one that starts with ">" is aligned to the right.
      rows: cells as text, in the order of the columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
        """A table of anything that has a text; None becomes an empty cell."""
        return cls(title, tuple(columns), tuple(tuple("" if c is None else str(c) for c in row) for row in rows))

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in self.columns:
            table.add_column(
                escape(column.lstrip(">")), justify="right" if column.startswith(">") else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def __repr__(self) -> str:
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=160, no_color=True).print(self)
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        def align(column: str) -> str:
            return ' style="text-align:right"' if column.startswith(">") else ' style="text-align:left"'

        head = "".join(f"<th{align(c)}>{html.escape(c.lstrip('>'))}</th>" for c in self.columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td{align(c)}>{html.escape(cell)}</td>" for c, cell in zip(self.columns, row, strict=True))
            + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


def bytes_text(size: float) -> str:
    """A size in bytes as people read it: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: GiB ends the loop")


def seconds_text(seconds: float | None) -> str:
    """A duration in seconds as people read it: `0.8 ms`, `1.24 s`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
