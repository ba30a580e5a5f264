"""Flax NNX modules as functions of canonical parameters.

Flax keeps plain array attributes (a causal mask, a position table) in a module's state beside its Variables, but takes
them for static ones while it is traced: `flax.nnx.is_data` tests `isinstance(x, typing.Union[...])`, which a tracer
does not pass before Python 3.14 (flax 0.12.8 and 0.12.12). They are therefore wrapped into Variables of a private type
for as long as a module is taken apart, and unwrapped when it is put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from servax.core.trees import KeyPath, Tree, unflatten
from servax.model.adapter import NetFunction, call_signature, net_call, unsharded
from servax.model.layout import (
    Constant,
    Layout,
    RandomCount,
    abstract_leaf,
    constant_of,
    is_array,
    key_path,
)


class _Plain(nnx.Variable[Any]):
    """A plain array attribute while its module is taken apart."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """A module in evaluation mode, taken apart.

    Attributes:
      graph: all of it but its state.
      layout: of the state; RNG state is constant in it.
      shapes: of the parameters, in the layout's order.
      plain: paths of plain array attributes, with their values where the definition has them at hand.
    """

    graph: Any
    layout: Layout
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    plain: Mapping[KeyPath, np.ndarray | None]


class NnxAdapter:
    """A Flax NNX module. Its RNG state is no parameter: it is made anew, from seed 0, with each module."""

    kind = "nnx"

    def __init__(self, made: nnx.Module, factory: Callable[[], nnx.Module] | None) -> None:
        def make() -> nnx.Module:
            # A live module stays as its owner left it: other Variables over the same arrays are changed instead.
            with unsharded():
                return nnx.merge(*nnx.split(made)) if factory is None else factory()

        self.name = type(made).__name__
        self.signature = call_signature(made)
        self.predict: NetFunction = net_call
        self._factory = make
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
            module = self._factory()
            _wrap(module)
            state = nnx.state(module)
            leaves = zip(_paths(state), jax.tree.leaves(state), strict=True)
            return {path: leaf for path, leaf in leaves if path in plain and path not in known}

        return known | {path: np.array(value) for path, value in jax.jit(compute)().items()}

    def random(self) -> tuple[KeyPath, ...]:
        return self._define().layout.random

    def run(self, params: Tree, function: NetFunction, arguments: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        definition = self._define()

        def answer(leaves: Tree) -> Any:
            module = nnx.merge(definition.graph, definition.layout.restore(leaves))
            _unwrap(module)
            return function(module, *arguments, **inputs)

        if function not in self._checked:
            definition.layout.check_draws(params, answer)
            self._checked.add(function)
        return answer(params)

    def canonical(self, live: Any) -> dict[str, Any]:
        state = nnx.state(live) if isinstance(live, nnx.Module) else live
        random = self.random()
        layout = Layout.at(_paths(state), None, _constants(state))
        leaves = zip(layout.parameters, layout.take(state), strict=True)
        return unflatten({path: leaf for path, leaf in leaves if path not in random})

    def _define(self) -> _Definition:
        if self._definition is None:
            self._definition = _define(self._factory)
        return self._definition


def _define(factory: Callable[[], nnx.Module]) -> _Definition:
    made: list[Any] = []

    def build() -> list[Any]:
        module = factory()
        module.eval()
        _wrap(module)
        graph, state = nnx.split(module)
        layout = Layout.at(_paths(state), jax.tree.structure(state), _constants(state))
        made.extend([graph, layout, _plain_values(state)])
        return layout.take(state)

    shapes = tuple(map(abstract_leaf, jax.eval_shape(build)))
    graph, layout, plain = made
    return _Definition(graph, layout, shapes, plain)


def _variables(state: Any) -> list[tuple[Any, Any]]:
    """Key paths and Variables of a state, or arrays where it is a pure dictionary."""
    return jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda each: isinstance(each, nnx.Variable))


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _paths(state: Any) -> list[KeyPath]:
    """Canonical paths of the leaves of a state, without the `value` by which JAX enters a Variable."""
    return [
        key_path((*path, *inner))
        for path, variable in _variables(state)
        for inner, _ in jax.tree_util.tree_leaves_with_path(_value(variable))
    ]


def _constants(state: Any) -> dict[int, Constant]:
    """RNG state, and what is no array, by index of the leaf."""
    constants: dict[int, Constant] = {}
    index = 0
    for _, variable in _variables(state):
        for leaf in jax.tree.leaves(_value(variable)):
            constant = constant_of(leaf)
            if constant is None and isinstance(variable, nnx.RngState):
                constant = RandomCount(tuple(leaf.shape), leaf.dtype)
            if constant is not None:
                constants[index] = constant
            index += 1
    return constants


def _plain_values(state: Any) -> dict[KeyPath, np.ndarray | None]:
    values = {key_path(path): _value(variable) for path, variable in _variables(state) if isinstance(variable, _Plain)}
    return {
        path: None if isinstance(value, Tracer | jax.ShapeDtypeStruct) else np.asarray(value)
        for path, value in values.items()
        if constant_of(value) is None
    }


def _wrap(module: nnx.Module) -> None:
    _replace(module, is_array, _Plain, set[int]())


def _unwrap(module: nnx.Module) -> None:
    _replace(module, lambda value: isinstance(value, _Plain), _value, set[int]())


def _replace(
    node: nnx.Pytree, matches: Callable[[Any], bool], replacement: Callable[[Any], Any], seen: set[int]
) -> None:
    """Replaces matching attributes of a module and of those inside it, also within lists and dictionaries."""
    if id(node) in seen:
        return
    seen.add(id(node))
    for name, value in list(vars(node).items()):
        if name.startswith("_pytree__"):  # Flax's own bookkeeping
            continue
        leaves, treedef = jax.tree.flatten(value, is_leaf=lambda each: isinstance(each, nnx.Variable | nnx.Pytree))
        for leaf in leaves:
            if isinstance(leaf, nnx.Pytree):
                _replace(leaf, matches, replacement, seen)
        if any(map(matches, leaves)):
            new = [replacement(leaf) if matches(leaf) else leaf for leaf in leaves]
            setattr(node, name, nnx.data(jax.tree.unflatten(treedef, new)))
