"""What XLA says of a compiled program: cost analysis and memory analysis, in a few stable words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

_COSTS = ("flops", "transcendentals", "bytes accessed")
_MEMORY = {
    "argument": "argument_size_in_bytes",
    "output": "output_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "alias": "alias_size_in_bytes",
}


class Analyzed(Protocol):
    """The part of `jax.stages.Compiled` that is read here."""

    def cost_analysis(self) -> Any: ...
    def memory_analysis(self) -> Any: ...


def cost(compiled: Analyzed) -> dict[str, float]:
    """`flops`, `transcendentals` (exponentials, tangents: counted apart) and `bytes accessed` of one run.

    Estimates by XLA from the shapes; what XLA does not count is absent, and all of it where the device has no analysis.
    """
    found = _ask(compiled.cost_analysis)
    if not isinstance(found, Mapping):
        return {}
    return {name: float(found[name]) for name in _COSTS if name in found}


def memory(compiled: Analyzed) -> dict[str, int]:
    """Bytes on the device: `argument`, `output`, `temp` (while it runs), `code`, and `alias`.

    `alias` are bytes of outputs that take the place of donated arguments: the proof that donation is in effect. The
    peak of a run is argument + output + temp - alias. Empty where the device has no analysis.
    """
    found = _ask(compiled.memory_analysis)
    return {name: int(getattr(found, field)) for name, field in _MEMORY.items() if hasattr(found, field)}


def _ask(analysis: Any) -> Any:
    """What the analysis gives; None where the device's plugin has none."""
    try:
        return analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
