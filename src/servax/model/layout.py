"""The way between a user's pytree and canonical parameters: nested dictionaries with string keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from servax.core.errors import ModelError
from servax.core.trees import KeyPath, Tree, flatten, path_text, unflatten

_STREAM = ("key", "count")
"""Leaves of one RNG stream of Flax NNX."""


class Constant(Protocol):
    """A leaf that is no parameter: made anew whenever the pytree is."""

    def make(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is no array: an activation function, a flag, a name."""

    value: Any

    def make(self) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class RandomKey:
    """A typed PRNG key, made anew from seed 0."""

    shape: tuple[int, ...]
    words: int
    implementation: str

    @classmethod
    def of(cls, key: Any) -> RandomKey:
        """The spec of a key, concrete, traced or abstract."""
        names: list[str] = []

        def look(traced: Any) -> Any:
            names.append(str(jax.random.key_impl(traced)))  # which takes no abstract key
            return jax.random.key_data(traced)

        return cls(tuple(key.shape), jax.eval_shape(look, key).shape[-1], names[0])

    def make(self) -> Any:
        """The key, a small constant. All its words are zero, as in `jax.random.key(0)`."""
        data = np.zeros((*self.shape, self.words), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(data), impl=self.implementation)


@dataclass(frozen=True, slots=True)
class RandomCount:
    """How often a PRNG key was used: zero."""

    shape: tuple[int, ...]
    dtype: Any

    def make(self) -> Any:
        return jnp.zeros(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each leaf of a pytree sits in its canonical form.

    Attributes:
      paths: one canonical key path a leaf, in the order in which JAX flattens the pytree.
      treedef: the pytree's own structure.
      constants: by index of the leaf, those that are no parameters.
    """

    paths: tuple[KeyPath, ...]
    treedef: Any
    constants: Mapping[int, Constant]

    @classmethod
    def of(cls, tree: Any, *, numbers: bool = True) -> Layout:
        """The layout of a pytree: its typed keys, and what is no array, are constants; so are its Python and NumPy
        scalars unless `numbers`.

        Raises:
          ModelError: two leaves would get the same canonical path.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        constants = {
            index: constant
            for index, (_, leaf) in enumerate(leaves)
            if (constant := constant_of(leaf, numbers=numbers)) is not None
        }
        return cls.at([key_path(path) for path, _ in leaves], treedef, constants)

    @classmethod
    def at(cls, paths: Sequence[KeyPath], treedef: Any, constants: Mapping[int, Constant]) -> Layout:
        """The layout of a pytree whose leaves have these canonical paths.

        Raises:
          ModelError: two parameters have the same path, or one sits where another has a subtree.
        """
        own = [path or ("value",) for index, path in enumerate(paths) if index not in constants]
        inner = {path[:end] for path in own for end in range(len(path))}
        if clashes := [path for path, count in Counter(own).items() if count > 1 or path in inner]:
            raise ModelError(
                f"{len(clashes)} parameter paths stand for more than one thing",
                where=", ".join(map(path_text, clashes)),
                expected='keys that stay apart when written as text and split at "/"',
                remedy="Rename the keys of the parameters.",
            )
        return cls(tuple(path or ("value",) for path in paths), treedef, constants)

    @property
    def parameters(self) -> tuple[KeyPath, ...]:
        """Paths of the parameters, in the pytree's order."""
        return tuple(path for index, path in enumerate(self.paths) if index not in self.constants)

    @property
    def random(self) -> tuple[KeyPath, ...]:
        """Paths of RNG state."""
        random = (index for index, constant in self.constants.items() if isinstance(constant, RandomKey | RandomCount))
        return tuple(self.paths[index] for index in random)

    def take(self, tree: Any) -> list[Any]:
        """The parameters of a pytree of this layout, in its order."""
        return [leaf for index, leaf in enumerate(jax.tree.leaves(tree)) if index not in self.constants]

    def nested(self, parameters: Sequence[Any]) -> dict[str, Any]:
        """The canonical form of parameters that come in the pytree's order."""
        return unflatten(dict(zip(self.parameters, parameters, strict=True)))

    def restore(self, tree: Tree) -> Any:
        """The user's pytree with the parameters of a canonical tree. RNG state is made anew where the tree has none.

        Raises:
          ModelError: parameters are missing from `tree`; all of them are named.
        """
        flat = flatten(tree)
        if missing := [path for path in self.parameters if path not in flat]:
            raise ModelError(
                f"{len(missing)} of {len(self.parameters)} parameters are missing",
                where=", ".join(map(path_text, missing)),
                seen=", ".join(map(path_text, flat)) or "no parameters",
                remedy="Pass parameters with the structure of Model.abstract_params().",
            )
        kept = set(self.parameters) | set(self.random)
        leaves = [
            flat[path] if path in kept and path in flat else self.constants[index].make()
            for index, path in enumerate(self.paths)
        ]
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def check_draws(self, params: Tree, run: Callable[[Tree], Any]) -> None:
        """Traces `run(params)` with the RNG state as arguments.

        Raises:
          ModelError: what it returns depends on RNG state, which starts anew with every call.
        """
        start = {
            self.paths[index]: constant.make()
            for index, constant in self.constants.items()
            if isinstance(constant, RandomKey | RandomCount)
        }
        if not start:
            return

        def answer(state: Sequence[Any]) -> list[Any]:
            result = run(unflatten({**flatten(params), **dict(zip(start, state, strict=True))}))
            return [leaf for leaf in jax.tree.leaves(result) if is_array(leaf)]

        jaxpr: Any = jax.make_jaxpr(answer)(list(start.values())).jaxpr
        _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        drawn = [path for path, is_used in zip(start, used, strict=True) if is_used]
        if drawn:
            streams = dict.fromkeys(path[:-1] if path[-1] in _STREAM and path[1:] else path for path in drawn)
            raise ModelError(
                "the model draws random numbers, which would be the same for every request",
                where="RNG stream " + ", ".join(map(path_text, streams)),
                seen=f"outputs depend on {', '.join(map(path_text, drawn))}, made anew from seed 0 with each call",
                expected="outputs that depend on inputs and parameters",
                remedy="Take an input seed: uint32[batch] and make the keys from it, jax.vmap(jax.random.key)(seed); "
                "for dropout, put the module into evaluation mode. If the numbers are to be the same each time, make "
                "their key from a constant in the call.",
            )


def constant_of(leaf: Any, *, numbers: bool = True) -> Constant | None:
    """What a leaf is if it is no parameter; None for an array, and for a number if `numbers`."""
    if is_key(leaf):
        return RandomKey.of(leaf)
    number = numbers and isinstance(leaf, bool | int | float | complex | np.generic)
    return None if number or is_array(leaf) else Static(leaf)


def key_path(path: Sequence[Any]) -> KeyPath:
    """A JAX key path as strings. A key that holds "/" (Haiku's `mlp/~/linear`) becomes several."""
    return tuple(part for entry in path for part in _key(entry).split("/"))


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array or number, in the dtype that JAX gives it."""
    if not hasattr(leaf, "shape"):
        leaf = jax.eval_shape(lambda: jnp.asarray(leaf))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array: of JAX (traced ones too), of NumPy, or abstract. NumPy scalars are not: modules use
    them as they use Python's, for sizes and flags.
    """
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, which never is a parameter."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
