"""Flax Linen modules as functions of canonical parameters.

The parameters are the variables of every collection. Where a module has `params` alone they are its content, so that a
checkpoint of `variables["params"]`, of the whole of `variables`, and of a `TrainState` all hold the same subtree;
otherwise the collections are the first keys: `params/...`, `batch_stats/...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from servax.core.errors import ModelError
from servax.core.trees import KeyPath, Tree, flatten, path_text, unflatten
from servax.model.adapter import Example, Examples, NetFunction, call_signature, net_call
from servax.model.explain import explained
from servax.model.layout import Layout, abstract_leaf

PARAMS = "params"
_TRAINED = (PARAMS, "batch_stats")
"""Collections that only a checkpoint can give; others (constants, caches) start as the definition has them."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """What initialisation would make, without having made it.

    Attributes:
      layout: of the variables, or of `params` alone where there is no other collection.
      shapes: of the parameters, in the layout's order.
      bare: whether `params` is the only collection.
      functions: how many functions were asked for their variables.
    """

    layout: Layout
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    bare: bool
    functions: int


class LinenAdapter:
    """A Flax Linen module. Functions get it bound to its variables."""

    kind = "linen"

    def __init__(self, module: linen.Module, examples: Examples) -> None:
        self.name = type(module).__name__
        self.signature = call_signature(module)
        self.predict: NetFunction = net_call
        self._module = module
        self._examples = examples
        self._definition: _Definition | None = None

    def abstract(self) -> Tree:
        definition = self._define()
        return definition.layout.nested(definition.shapes)

    def defaults(self) -> dict[KeyPath, np.ndarray]:
        definition = self._define()
        wanted = [path for path in definition.layout.parameters if path[0] not in _TRAINED]
        if definition.bare or not wanted:
            return {}

        examples = self._examples()

        def compute() -> dict[KeyPath, Any]:
            # Only these are returned, so the initialisation of parameters is dead code, which JAX drops.
            zeros = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), each.arrays) for each in examples]
            variables = flatten(self._initialise(examples, zeros))
            return {path: variables[path] for path in wanted}

        return {path: np.array(value) for path, value in jax.jit(compute)().items()}

    def random(self) -> tuple[KeyPath, ...]:
        return self._define().layout.random

    def run(self, params: Tree, function: NetFunction, arguments: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        definition = self._define()
        variables = definition.layout.restore(params)
        if definition.bare:
            variables = {PARAMS: variables}
        return linen.apply(lambda net: function(net, *arguments, **inputs), self._module)(variables)

    def canonical(self, live: Any) -> dict[str, Any]:
        variables = linen.meta.unbox(live.variables if isinstance(live, linen.Module) else live)
        if self._define().bare and set(variables) == {PARAMS}:
            variables = variables[PARAMS]
        layout = Layout.of(variables)
        return layout.nested(layout.take(variables))

    def _define(self) -> _Definition:
        examples = self._examples()
        if self._definition is None or self._definition.functions != len(examples):
            self._definition = self._abstract(examples)
        return self._definition

    def _abstract(self, examples: Sequence[Example]) -> _Definition:
        if not examples:
            raise ModelError(
                "a Linen module has no parameters until a function calls it",
                where=self.name,
                remedy="Give the model inputs=, or declare a function with @model.function.",
            )
        made: list[Any] = []

        def build(arrays: Sequence[Any]) -> list[Any]:
            variables = self._initialise(examples, arrays)
            bare = set(variables) <= {PARAMS}
            own = variables.get(PARAMS, {}) if bare else variables
            layout = Layout.of(own)
            made.extend([layout, bare])
            return layout.take(own)

        shapes = jax.eval_shape(build, [each.arrays for each in examples])
        return _Definition(made[0], tuple(map(abstract_leaf, shapes)), made[1], len(examples))

    def _initialise(self, examples: Sequence[Example], arrays: Sequence[Any]) -> dict[str, Any]:
        """Variables that any of the functions needs.

        Raises:
          ModelError: two functions need a variable in different shapes; every such variable is named.
        """
        variables: dict[KeyPath, Any] = {}
        faults: list[str] = []
        for example, given in zip(examples, arrays, strict=True):
            with explained(example.name, example.sizes):
                made = linen.meta.unbox(linen.init(example.call, self._module)(jax.random.key(0), given))
            for path, leaf in flatten(made).items():
                if path in variables and variables[path].shape != leaf.shape:
                    faults.append(f"{path_text(path)}: {variables[path].shape} and, in {example.name}, {leaf.shape}")
                variables.setdefault(path, leaf)
        if faults:
            raise ModelError(
                "functions of the model need variables in different shapes",
                seen="; ".join(faults),
                remedy="Fix the dimensions that the module's parameters depend on.",
            )
        return unflatten(variables)
