"""What the four wrappers have in common: a part written into a bundle, and programs read back from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from servax.stages.buckets import Bucket

FlatArrays = tuple[Any, ...]
"""Device arrays in the order of sorted key paths (parameters) or sorted names (state, inputs, outputs)."""


class Program(Protocol):
    """A compiled program for one bucket on one device.

    Calling it traces and compiles nothing. `state` is donated: the caller drops it and keeps what is returned.
    Parameters, state and inputs must be committed to the program's device.
    """

    def __call__(self, params: FlatArrays, state: FlatArrays, inputs: FlatArrays) -> tuple[FlatArrays, FlatArrays]: ...


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A program with what is known of it.

    Attributes:
      program: what to call.
      target: the wrapper it came from: `jit`, `aot` or `export`.
      seconds: how long each stage of its loading took: `trace`, `lower`, `compile`, `load`.
      cost: `flops` and `bytes accessed` by XLA's cost analysis, where it has one.
      memory: `argument`, `output`, `temp` and `code` bytes by XLA's memory analysis.
      stablehlo: gives the StableHLO text; None where there is no module to show.
    """

    program: Program
    target: str
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    cost: Mapping[str, float] = field(default_factory=dict[str, float])
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    stablehlo: StableHLOSource | None = None


class StableHLOSource(Protocol):
    """Gives the text of a StableHLO module when asked."""

    def __call__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ProgramTable:
    """Every program of a servable, by function and bucket. The hot path reads nothing else."""

    programs: Mapping[tuple[str, Bucket], LoadedProgram]

    def __getitem__(self, key: tuple[str, Bucket]) -> LoadedProgram:
        return self.programs[key]

    def __iter__(self) -> Iterator[tuple[str, Bucket]]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)
