"""What the four wrappers have in common: a part written into a bundle, and programs read back from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from servax.core.device import Device
from servax.core.trees import Tree
from servax.model.function import Function
from servax.stages.buckets import Bucket

if TYPE_CHECKING:  # a server needs none of these
    from servax.targets.bundle import Bundle
    from servax.targets.child_protocol import Job, Part
    from servax.targets.manifest import TargetName

FlatArrays = tuple[Any, ...]
"""Device arrays in the order of sorted key paths (parameters) or sorted names (state, inputs, outputs)."""


class Program(Protocol):
    """A compiled program for one bucket on one device.

    Calling it traces and compiles nothing. `state` is donated: the caller drops it and keeps what is returned.
    Parameters and state must be committed to the program's device; inputs too, except that a CPU's program takes NumPy
    arrays of its shapes and dtypes as they are.
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


@dataclass(frozen=True, slots=True)
class Materials:
    """What the part of a wrapper is made of, beside the bundle it goes into.

    Attributes:
      open_device: gives the device that executables are for; a wrapper that needs none does not ask.
      platforms: that exports are for.
      tensorflow: version of TensorFlow that will read the SavedModel; None: the installed one.
      functions: of the model; empty where a part is made without the source.
      params: of the model, on the device; as above.
    """

    open_device: Callable[[], Device]
    platforms: tuple[str, ...]
    tensorflow: str | None = None
    functions: Mapping[str, Function] = field(default_factory=dict[str, Function])
    params: Tree = field(default_factory=dict[str, Any])


class Target(Protocol):
    """One of the four serving wrappers; each is a module, and `table.target` gives it by name.

    Attributes:
      NAME: the wrapper's name.
      FROM_EXPORTS: whether its part is made of the bundle's exports: it can be added later, without the source.
      PORTABLE: whether its part is for every platform of the bundle, or for one machine.
    """

    NAME: TargetName
    FROM_EXPORTS: bool
    PORTABLE: bool

    def check(self, materials: Materials, /) -> None:
        """Refuses at once what `make` would refuse after minutes.

        Raises:
          UsageError: what is asked for cannot be made on this machine.
        """
        ...

    def make(self, bundle: Bundle, materials: Materials, /) -> Bundle:
        """The bundle with this wrapper's part in it; `bundle` may be a draft."""
        ...

    def buckets(self, bundle: Bundle, /, *, full: bool) -> dict[str, tuple[Bucket, ...]]:
        """The buckets, by function, at which parity proves it: all of them when `full`."""
        ...

    def open_part(self, job: Job, /) -> Part:
        """Its part as a child of parity calls it.

        Raises:
          PlatformError: this machine lacks the job's platform.
          BundleError: the bundle is damaged.
        """
        ...

    def obstacles(self, bundle: Bundle, device: Device, /) -> tuple[str, ...]:
        """What keeps a bundle from being served through it on `device`, each with its remedy."""
        ...


def corners(bundle: Bundle, *, full: bool) -> dict[str, tuple[Bucket, ...]]:
    """The corners of every function's buckets, or all of them: for wrappers that compile each one anew."""
    grid = bundle.manifest.grid()
    return {name: tuple(grid[name]) if full else tuple(grid.corners(name)) for name in grid.functions}
