"""Plain functions of parameters: `f(params, **inputs)`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from servax.core.errors import ModelError
from servax.core.trees import KeyPath, Tree
from servax.model.adapter import NetFunction, call_signature
from servax.model.layout import Layout, abstract_leaf


def _odd_container(node: Any, path: str) -> str | None:
    """The path of the first container that is no dictionary with text keys; None where there is none."""
    if isinstance(node, Mapping):
        items: Mapping[Any, Any] = node
        if any(not isinstance(key, str) for key in items):
            return path
        found = (_odd_container(value, f"{path}[{key!r}]") for key, value in items.items())
        return next((each for each in found if each is not None), None)
    is_leaf = hasattr(node, "dtype") or isinstance(node, (bool, int, float, complex))
    return None if is_leaf and path != "params" else path


class PlainAdapter:
    """A function whose parameters are any pytree: an example of it, a factory, or what a checkpoint holds."""

    kind = "plain"

    def __init__(self, source: Callable[..., Any], params: Any) -> None:
        self.name = getattr(source, "__name__", type(source).__name__)
        self.signature = call_signature(source, skip=1)
        self.predict: NetFunction = source
        self._layout: Layout | None = None
        self._abstract: dict[str, Any] | None = None
        if params is not None:
            self._adopt(jax.eval_shape(params) if callable(params) else params)

    def abstract(self) -> Tree | None:
        return self._abstract

    def defaults(self) -> dict[KeyPath, np.ndarray]:
        return {}

    def random(self) -> tuple[KeyPath, ...]:
        return ()

    def run(self, params: Tree, function: NetFunction, arguments: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        net = params if self._layout is None else self._layout.restore(params)
        return function(net, *arguments, **inputs)

    def canonical(self, live: Any) -> dict[str, Any]:
        if self._layout is None and (odd := _odd_container(live, "params")) is not None:
            raise ModelError(
                f"{self.name} would get its parameters as nested dictionaries, which these are not",
                where=odd,
                seen=type(live).__name__ if odd == "params" else "another container there",
                expected="nested dictionaries with text as keys",
                remedy="show their structure: Model(..., params=PARAMS), an example, its shapes, or a factory",
            )
        layout = Layout.of(live)
        return layout.nested(layout.take(live))

    def bind(self, structure: Tree) -> PlainAdapter:
        """The same function over parameters of this structure."""
        bound = copy.copy(self)
        bound._abstract = dict(structure)
        return bound

    def _adopt(self, params: Any) -> None:
        self._layout = Layout.of(params)
        self._abstract = self._layout.nested([abstract_leaf(leaf) for leaf in self._layout.take(params)])
