"""No compilation after ready: the guard of the serving threads, and the name of the cause when it stops a call."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core import monitoring
from servax.core.errors import ExecutionError, RecompileError

_SIGNS = ("no_tracing", "Disallowed host-to-device transfer", "Disallowed device-to-device transfer",
          "for which this computation was compiled", "input sharding", "compiled with input pytree")  # fmt: skip
"""Words in JAX's errors when a call would trace, compile or move data: jax 0.10.2 and 0.12.0."""

ON_HOST = "on the host"
"""The placement of NumPy arrays."""


@contextlib.contextmanager
def guarded() -> Generator[None]:
    """Forbids this thread to trace, compile or move data implicitly, and counts its compilations as serving.

    Thread-local on purpose: `jax.config.update` would stop a loader on another thread as well.
    """
    import jax

    with monitoring.thread_role(monitoring.SERVING), jax.no_tracing(True), jax.transfer_guard("disallow"):
        yield


@dataclass(frozen=True, slots=True)
class Aval:
    """What JAX keys a compiled program on, for one argument.

    Attributes:
      name: `parameter 'dense/kernel'`, `input 'tokens'`, `state 'cache'`.
      placement: `committed to cpu:0`, `uncommitted`, `on the host`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    weak_type: bool
    placement: str

    @classmethod
    def of(cls, name: str, array: Any) -> Aval:
        """What `array` is, be it JAX's, NumPy's or a Python scalar."""
        if not hasattr(array, "dtype"):
            return cls(name, type(array).__name__, (), True, "a Python value")
        if not hasattr(array, "sharding"):
            return cls(name, str(np.dtype(array.dtype)), tuple(array.shape), False, ON_HOST)
        devices = ", ".join(sorted(f"{device.platform}:{device.id}" for device in array.sharding.device_set))
        committed = getattr(array, "committed", True)
        placement = f"committed to {devices}" if committed else "uncommitted"
        weak = bool(getattr(array.aval, "weak_type", False))
        return cls(name, str(np.dtype(array.dtype)), tuple(array.shape), weak, placement)

    def text(self) -> str:
        """All of it on one line."""
        weak = ", weak type" if self.weak_type else ""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{weak}, {self.placement}"


def placement_of(device: Any) -> str:
    """The placement of arrays committed to `device`."""
    return f"committed to {device.platform}:{device.id}"


def differences(expected: Sequence[Aval], seen: Sequence[Aval]) -> tuple[str, ...]:
    """Every way in which a call's arguments differ from those a program was made for, each naming the argument."""
    found: list[str] = []
    if len(expected) != len(seen):
        found.append(f"structure: {len(seen)} arguments, made for {len(expected)}")
    for want, got in zip(expected, seen, strict=False):
        for field in ("shape", "dtype", "weak_type", "placement"):
            a, b = getattr(want, field), getattr(got, field)
            if a != b:
                found.append(f"{got.name}: {field.replace('_', ' ')} {b}, made for {a}")
    return tuple(found)


def explain(error: Exception, program: str, expected: Sequence[Aval], seen: Sequence[Aval]) -> ExecutionError:
    """The error for a program that raised: RecompileError with its cause when the guard stopped it.

    Args:
      error: what the program raised.
      program: `function@bucket`.
      expected: the arguments it was made for, by the table of programs.
      seen: those it was called with.
    """
    causes = differences(expected, seen)
    text = str(error).strip()
    if causes or any(sign in text for sign in _SIGNS):
        return RecompileError(
            "a call after ready would have compiled or moved data, and was stopped",
            where=program,
            seen="; ".join(causes) or text,
            expected="a call that the compiled program takes as it is",
            remedy="load parameters of the dtypes, shapes and device that the program was compiled for"
            if causes
            else "the program is at fault, not the request: build the bundle again and run `servax verify` on it",
        )
    shortage = "RESOURCE_EXHAUSTED" in text
    return ExecutionError(
        "the program failed on the device",
        where=program,
        seen=f"{type(error).__name__}: {text}",
        remedy="the device is out of memory: use smaller buckets or a larger device" if shortage else None,
    )
