"""Equinox modules, with or without a `State`, as functions of canonical parameters.

Equinox is no dependency of servax: this module is imported when a user's own code has imported it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox
import jax
import numpy as np
from jax.core import Tracer

from servax.core.trees import KeyPath, Tree
from servax.model.adapter import Net, NetFunction, call_signature, net_call
from servax.model.layout import Layout, abstract_leaf

STATE = "state"
"""The argument by which Equinox's modules take their `State`."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """A module, or a (module, `State`) pair, in inference mode and taken apart.

    Attributes:
      layout: of the pytree; what is no array is constant in it.
      shapes: of the parameters, in the layout's order.
      plain: paths of NumPy arrays, with their values, and of arrays that no gradient would change: integers, flags.
    """

    layout: Layout
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    plain: Mapping[KeyPath, np.ndarray | None]


class EquinoxAdapter:
    """An Equinox module, or a (module, `State`) pair; functions get what the factory returns, in inference mode."""

    kind = "equinox"

    def __init__(self, made: Any, factory: Callable[[], Any] | None) -> None:
        module = made[0] if isinstance(made, tuple) else made
        self.name = type(module).__name__
        self.predict: NetFunction = _call_with_state if isinstance(made, tuple) else net_call
        signature = call_signature(module)
        if signature is not None and isinstance(made, tuple):
            kept = [each for name, each in signature.parameters.items() if name != STATE]
            signature = signature.replace(parameters=kept)
        self.signature = signature
        self._factory = factory or (lambda: made)
        self._definition: _Definition | None = None
        self._checked: set[NetFunction] = set()

    def abstract(self) -> Tree:
        definition = self._define()
        return definition.layout.nested(definition.shapes)

    def defaults(self) -> dict[KeyPath, np.ndarray]:
        plain = self._define().plain
        known = {path: value for path, value in plain.items() if value is not None}
        if len(known) == len(plain):
            return known

        def compute() -> dict[KeyPath, Any]:
            # Only these are returned, so the initialisation of parameters is dead code, which JAX drops.
            tree = self._factory()
            layout = Layout.of(tree, numbers=False)
            leaves = zip(layout.parameters, layout.take(tree), strict=True)
            return {path: leaf for path, leaf in leaves if path in plain and path not in known}

        return known | {path: np.array(value) for path, value in jax.jit(compute)().items()}

    def random(self) -> tuple[KeyPath, ...]:
        return self._define().layout.random

    def run(self, params: Tree, function: NetFunction, arguments: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        layout = self._define().layout

        def answer(leaves: Tree) -> Any:
            return function(layout.restore(leaves), *arguments, **inputs)

        if function not in self._checked:
            layout.check_draws(params, answer)
            self._checked.add(function)
        return answer(params)

    def canonical(self, live: Any) -> dict[str, Any]:
        layout = Layout.of(live, numbers=False)
        return layout.nested(layout.take(live))

    def _define(self) -> _Definition:
        if self._definition is None:
            self._definition = _define(self._factory)
        return self._definition


def _define(factory: Callable[[], Any]) -> _Definition:
    made: list[Any] = []

    def build() -> list[Any]:
        tree = equinox.nn.inference_mode(factory())
        layout = Layout.of(tree, numbers=False)
        leaves = dict(zip(layout.parameters, layout.take(tree), strict=True))
        plain = {
            path: _known(leaf)
            for path, leaf in leaves.items()
            if isinstance(leaf, np.ndarray) or not equinox.is_inexact_array(leaf)
        }
        made.extend([layout, plain])
        return list(leaves.values())

    shapes = tuple(map(abstract_leaf, jax.eval_shape(build)))
    return _Definition(made[0], shapes, made[1])


def _known(leaf: Any) -> np.ndarray | None:
    return None if isinstance(leaf, Tracer | jax.ShapeDtypeStruct) else np.asarray(leaf)


def _call_with_state(net: Net, /, **inputs: Any) -> Any:
    """The call of a module that takes its `State` and gives it back; in inference mode it comes back as it was."""
    module, state = net
    result = module(**inputs, state=state)
    if not isinstance(result, tuple):
        return result
    outputs = tuple(each for each in result if not isinstance(each, equinox.nn.State))
    return outputs[0] if len(outputs) == 1 else outputs
