"""The tree that a checkpoint holds, and the parts of it that are never parameters: optimizer and PRNG state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servax.checkpoint.stored import StoredLeaf
from servax.core.trees import KeyPath

VALUE_KEYS = ("value", "raw_value")
"""What `nnx.State` adds below each variable."""

_OPTIMIZER = {
    "opt", "opt_state", "opt_states", "optim", "optimizer", "optimizers", "optimizer_state", "inner_opt_state",
    "tx", "mu", "nu", "trace", "momentum", "momenta", "acc_grads", "grads", "v_row", "v_col", "sum_of_squares",
}  # fmt: skip
_MOMENTS = {"mu", "nu", "trace"}
_MOMENT_FIELDS = {*_MOMENTS, "count", "nu_max"}
LINEN = "params"
"""The collection that Linen wraps parameters in."""


class StoredTree:
    """The tree of a checkpoint: its nodes, and which of them are optimizer or PRNG state.

    Attributes:
      leaves: by key path.
      children: keys below each inner node.
      random: leaves that are PRNG state.
    """

    def __init__(self, leaves: Mapping[KeyPath, StoredLeaf], like: Mapping[KeyPath, Any]) -> None:
        self.leaves = leaves
        self.children: dict[KeyPath, set[str]] = {}
        for path in leaves:
            for depth in range(len(path)):
                self.children.setdefault(path[:depth], set()).add(path[depth])
        self.random = random_paths(leaves)
        names = {key for path in like for key in path}
        self._moments = {
            node
            for node, keys in self.children.items()
            if keys & _MOMENTS and (keys <= _MOMENT_FIELDS or not names & _MOMENTS)  # a model may use the names too
        }

    def optimizer(self, path: KeyPath) -> bool:
        """Whether `path` lies in optimizer state."""
        for depth in range(len(path)):
            node, key = path[:depth], path[depth]
            if key.lower() in _OPTIMIZER:
                return True
            if node in self._moments and key != LINEN:
                return True
            if key.isdigit() and self._chain(node):
                return True
        return False

    def leaf_at(self, path: KeyPath) -> KeyPath | None:
        """The leaf at `path`, or at the `value` below it; None where neither is one."""
        for full in (path, *((*path, value) for value in VALUE_KEYS)):
            if full in self.leaves:
                return full
        return None

    def _chain(self, node: KeyPath) -> bool:
        """Whether a tuple is an optax chain: its first element has moments."""
        return all(key.isdigit() for key in self.children[node]) and (*node, "0") in self._moments


def random_paths(leaves: Mapping[KeyPath, StoredLeaf]) -> set[KeyPath]:
    """PRNG state: typed keys, and nnx's `key` and `count` beside each other."""
    found: set[KeyPath] = set()
    for path, leaf in leaves.items():
        bare = path[:-1] if len(path) > 1 and path[-1] in VALUE_KEYS else path
        beside = {"key": "count", "count": "key"}.get("".join(bare[-1:]))
        if leaf.random:
            found |= {path, bare}
        elif leaf.dtype.kind == "u" and leaf.dtype.itemsize == 4 and beside is not None:
            other = leaves.get((*bare[:-1], beside, *path[len(bare) :]))
            if other is not None and (other.random or other.dtype.kind == "u"):
                found |= {path, bare}
    return found
