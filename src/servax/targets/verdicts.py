"""What parity found, as a report: proved or unproven per target and platform, with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

from servax.core.table import Table
from servax.targets.manifest import VerdictRecord


@dataclass(frozen=True, slots=True, repr=False)
class ParityReport:
    """The verdicts of a bundle. Prints as a table, in a notebook too."""

    verdicts: tuple[VerdictRecord, ...]

    @property
    def failed(self) -> tuple[VerdictRecord, ...]:
        """Verdicts that are failures."""
        return tuple(verdict for verdict in self.verdicts if verdict.verdict == "failed")

    @property
    def proved(self) -> bool:
        """Whether there are verdicts and each is `proved`."""
        return bool(self.verdicts) and all(verdict.verdict == "proved" for verdict in self.verdicts)

    def worst(self, target: str) -> float | None:
        """The largest error measured for a target; None where nothing was measured."""
        errors = [v.error for v in self.verdicts if v.target == target and v.error is not None]
        return max(errors, default=None)

    def table(self) -> Table:
        """One row per target, platform and function: how many buckets, the verdict, the largest error."""
        groups: dict[tuple[str, str, str], list[VerdictRecord]] = {}
        for verdict in self.verdicts:
            groups.setdefault((verdict.target, verdict.platform, verdict.function), []).append(verdict)
        rows = [
            (target, platform, function, str(len(group)), *_summary(group))
            for (target, platform, function), group in groups.items()
        ]
        columns = ("target", "platform", "function", ">buckets", "verdict", ">error", ">tolerance", ">precision", "why")
        return Table.of("parity with the source, run op by op", columns, rows)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"proved": self.proved, "verdicts": [verdict.model_dump() for verdict in self.verdicts]}

    def __rich__(self) -> RichTable:
        return self.table().__rich__()

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()  # pyright: ignore[reportPrivateUsage] # IPython's protocol


def _summary(group: Sequence[VerdictRecord]) -> tuple[str, str, str, str, str]:
    order = ("failed", "unproven", "proved")
    worst = min(group, key=lambda verdict: order.index(verdict.verdict))
    return (
        worst.verdict,
        _largest([verdict.error for verdict in group]),
        _largest([verdict.tolerance for verdict in group]),
        _largest([verdict.precision for verdict in group]),
        worst.reason or "",
    )


def _largest(numbers: Sequence[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    return f"{max(known):.1e}" if known else ""
