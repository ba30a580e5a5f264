"""The table behind `servable.stages`: what each layer took for each program, and the StableHLO it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from servax.core.table import Table, bytes_text, seconds_text
from servax.runtime.warmup import Key
from servax.targets.target import LoadedProgram, ProgramTable, StableHLOSource

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_COLUMNS = (
    "program",
    "target",
    *(">trace", ">lower", ">compile", ">load", ">run"),
    *(">arguments", ">temp", ">code", ">flops"),
)


@dataclass(frozen=True, slots=True)
class StageRow:
    """One function at one bucket.

    Attributes:
      target: the wrapper it came from: `jit`, `aot`, `export`.
      trace, lower, compile, load: seconds in this process; None where the wrapper does not have the stage.
      run: median seconds of a warm run, with copies to and from the device; None before it is warm.
      argument_bytes, temp_bytes, code_bytes: by XLA's memory analysis; None where it gives none.
      flops: by XLA's cost analysis; None where it gives none.
    """

    function: str
    bucket: str
    target: str
    trace: float | None
    lower: float | None
    compile: float | None
    load: float | None
    run: float | None
    argument_bytes: int | None
    temp_bytes: int | None
    code_bytes: int | None
    flops: float | None
    source: StableHLOSource | None = field(repr=False, compare=False)

    @classmethod
    def of(cls, key: Key, loaded: LoadedProgram, run: float | None) -> StageRow:
        seconds, memory = loaded.seconds, loaded.memory
        return cls(
            function=key[0],
            bucket=key[1].label,
            target=loaded.target,
            trace=seconds.get("trace"),
            lower=seconds.get("lower"),
            compile=seconds.get("compile"),
            load=seconds.get("load"),
            run=run,
            argument_bytes=memory.get("argument"),
            temp_bytes=memory.get("temp"),
            code_bytes=memory.get("code"),
            flops=loaded.cost.get("flops"),
            source=loaded.stablehlo,
        )

    @property
    def stablehlo(self) -> str:
        """The StableHLO module as text; made when asked for. Empty where the wrapper keeps no module."""
        return "" if self.source is None else self.source()

    @property
    def program(self) -> str:
        """`function@bucket`."""
        return f"{self.function}@{self.bucket}"


@dataclass(frozen=True, slots=True, repr=False)
class StagesTable:
    """Rows by program; shows itself in a terminal and in a notebook."""

    name: str
    rows: tuple[StageRow, ...]

    @classmethod
    def of(cls, name: str, table: ProgramTable, costs: Mapping[Key, float]) -> StagesTable:
        return cls(name, tuple(StageRow.of(key, table[key], costs.get(key)) for key in table))

    def __iter__(self) -> Iterator[StageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: int | str) -> StageRow:
        """A row by position, or by program: `stages["predict@batch=1"]`."""
        if isinstance(which, int):
            return self.rows[which]
        for row in self.rows:
            if row.program == which:
                return row
        raise KeyError(f"{which}; there are {', '.join(row.program for row in self.rows)}")

    def table(self) -> Table:
        """The same as text, with units."""
        return Table.of(
            f"Stages of {self.name}",
            _COLUMNS,
            [
                (
                    row.program,
                    row.target,
                    *(seconds_text(value) for value in (row.trace, row.lower, row.compile, row.load, row.run)),
                    *(
                        None if value is None else bytes_text(value)
                        for value in (row.argument_bytes, row.temp_bytes, row.code_bytes)
                    ),
                    None if row.flops is None else f"{row.flops:.3g}",
                )
                for row in self.rows
            ],
        )

    def __rich__(self) -> RichTable:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()  # pyright: ignore[reportPrivateUsage]  # IPython's protocol has this name

    def __repr__(self) -> str:
        return str(self.table())
