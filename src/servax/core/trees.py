"""Trees of parameters: nested dictionaries with string keys, and flat tuples in the order of sorted key paths.

Sorted key paths are the order in which JAX flattens nested dictionaries, so the flat tuple of a `Program` and
`jax.tree.leaves` of the nested dictionary agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KeyPath = tuple[str, ...]
Tree = Mapping[str, Any]
"""A nested dictionary: values are leaves or trees; keys are strings without "/"."""


def flatten(tree: Tree) -> dict[KeyPath, Any]:
    """Leaves of `tree` by key path, in sorted order. Empty dictionaries have no leaves and vanish."""
    leaves: dict[KeyPath, Any] = {}
    _collect((), tree, leaves)
    return leaves


def unflatten(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The nested dictionary with these leaves; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _collect(prefix: KeyPath, node: Any, leaves: dict[KeyPath, Any]) -> None:
    # No closure: one that calls itself is a cycle, and would keep device memory until the collector comes by.
    if isinstance(node, Mapping):
        for key in sorted(node):
            _collect((*prefix, key), node[key], leaves)
    else:
        leaves[prefix] = node


def path_text(path: KeyPath) -> str:
    """A key path as people read it: `layers/0/kernel`."""
    return "/".join(path)


def path_of(text: str) -> KeyPath:
    """The key path that `path_text` wrote."""
    return tuple(text.split("/")) if text else ()
