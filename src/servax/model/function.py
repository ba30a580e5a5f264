"""A function of a model: pure, over named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import Tree
from servax.model.processors import Processor

Arrays = Mapping[str, Any]
"""Arrays by tensor name: flat, whatever nesting the user's function has."""

Call = Callable[[Tree, Arrays | None, Arrays], tuple[Arrays | None, Arrays]]
"""`f(params, state, inputs) -> (state, outputs)`; traceable by JAX; `state` is None for a stateless function."""


@dataclass(frozen=True, slots=True)
class Function:
    """One entry point of a `Model`.

    Attributes:
      name: its name on the wire; `predict` for the model's own call.
      signature: its tensors. Outputs are filled in by `infer_outputs`.
      call: the pure function.
      state: specs of the state it takes and returns, fixed shapes only; None for a stateless function. Stateful
        functions of one model share one state, and their programs donate it.
      buckets: default sizes by dimension, e.g. `{"batch": (1, 8), "length": (32, 128)}`.
      processors: by name of the program's input that each one produces.
      told: smallest and largest value, in samples for parity, of integer and boolean inputs whose use does not show it.
    """

    name: str
    signature: Signature
    call: Call
    state: tuple[TensorSpec, ...] | None = None
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    processors: Mapping[str, Processor] = field(default_factory=dict[str, Processor])
    told: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def with_signature(self, signature: Signature) -> Function:
        """The same function with another signature."""
        return replace(self, signature=signature)
