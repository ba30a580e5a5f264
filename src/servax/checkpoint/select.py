"""The subtree of a checkpoint that holds a model's parameters: named by the user, or the only one that fits.

Nothing is guessed between equals, and optimizer state is never taken: Adam's moments have exactly the tree, shapes
and dtypes of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from servax.checkpoint.stored import StoredLeaf, array_text
from servax.checkpoint.stored_tree import LINEN, StoredTree
from servax.core.errors import CheckpointError
from servax.core.trees import KeyPath, path_of, path_text

_COUNTERS = {"step", "steps", "epoch", "epochs", "count", "iteration", "num_steps"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which stored leaf each of the model's leaves comes from.

    Attributes:
      prefix: the selected subtree; empty for the whole checkpoint.
      sources: the model's key path -> the checkpoint's. Leaves that are absent there are absent here.
    """

    prefix: KeyPath
    sources: Mapping[KeyPath, KeyPath]


@dataclass(frozen=True, slots=True)
class _Fit:
    """How well the subtree under `prefix` fits the model; the sequences are lines for people."""

    prefix: KeyPath
    sources: Mapping[KeyPath, KeyPath]
    missing: tuple[KeyPath, ...]
    misshapen: tuple[str, ...]
    extra: tuple[KeyPath, ...]

    @property
    def holds_all(self) -> bool:
        return not self.missing and not self.misshapen

    @property
    def score(self) -> tuple[int, int, int]:
        return (len(self.sources) - len(self.misshapen), -len(self.extra), -len(self.prefix))


def choose(
    leaves: Mapping[KeyPath, StoredLeaf],
    like: Mapping[KeyPath, Any],
    *,
    select: str | None,
    optional: Collection[KeyPath],
    where: str,
) -> Selection:
    """The subtree of `leaves` that holds every key path and shape of `like`.

    Args:
      leaves: of the checkpoint.
      like: of the model, each with `shape` and `dtype`.
      select: the subtree to look at, e.g. `model` or `state/params`; None: the whole checkpoint.
      optional: leaves that the checkpoint may lack.
      where: the checkpoint's path, for errors.

    Raises:
      CheckpointError: nothing fits, with every missing, extra and misshapen leaf by path, or several do.
    """
    if not like:
        return Selection(subtree(leaves, select, where), {})
    stored = StoredTree(leaves, like)
    scope = subtree(leaves, select, where)
    inside_optimizer = stored.optimizer(scope)
    nodes = [
        node
        for node in sorted(stored.children, key=lambda node: (len(node), node))
        if node[: len(scope)] == scope and (inside_optimizer or not stored.optimizer(node))
    ]
    fits = _distinct([fit for node in nodes for fit in _fits(stored, node, like, optional)])
    whole = [fit for fit in fits if fit.holds_all and fit.sources]
    clean = [fit for fit in whole if not fit.extra]
    best = [fit for fit in clean if fit.prefix == scope] or clean or whole
    if len(best) > 1:
        raise _ambiguous(best, where)
    if clean:
        return Selection(best[0].prefix, best[0].sources)
    near = best or sorted(fits, key=lambda fit: fit.score, reverse=True)[:1]
    if not near or not near[0].sources:
        if all(path in optional for path in like):
            return Selection(scope, {})
        raise _nothing_fits(stored, like, scope, where)
    raise _mismatch(near[0], stored, like, where)


def subtree(leaves: Mapping[KeyPath, StoredLeaf], select: str | None, where: str) -> KeyPath:
    """The key path that `select` names; below an item too, where only one has it.

    Raises:
      CheckpointError: the checkpoint has no such subtree, or two items have it.
    """
    wanted = path_of(select or "")
    nodes = {path[:depth] for path in leaves for depth in range(len(path))}
    if not wanted or wanted in nodes:
        return wanted
    if wanted in leaves:
        raise CheckpointError(
            f"{path_text(wanted)!r} is a single array", where=where, remedy="select the tree that it lies in"
        )
    below = sorted(node for node in nodes if node[1:] == wanted)
    if len(below) == 1:
        return below[0]
    several = ", ".join(path_text(node) for node in below)
    raise CheckpointError(
        f"the checkpoint has no subtree {select!r}" if not below else f"several trees have a subtree {select!r}",
        where=where,
        seen=several or f"subtrees: {_outline(leaves)}",
        remedy="select one of these",
    )


def _fits(stored: StoredTree, node: KeyPath, like: Mapping[KeyPath, Any], optional: Collection[KeyPath]) -> list[_Fit]:
    """The subtree against the model as it is and, for Linen, against the model without its `params` wrapper."""
    tops = {path[0] for path in like}
    found = [_fit(stored, node, like, optional, dict.fromkeys(like, 0))] if stored.children[node] & tops else []
    if tops == {LINEN} and LINEN not in stored.children[node]:
        found.append(_fit(stored, node, like, optional, dict.fromkeys(like, 1)))
    return found


def _fit(
    stored: StoredTree,
    node: KeyPath,
    like: Mapping[KeyPath, Any],
    optional: Collection[KeyPath],
    dropped: Mapping[KeyPath, int],
) -> _Fit:
    sources: dict[KeyPath, KeyPath] = {}
    missing: list[KeyPath] = []
    misshapen: list[str] = []
    for path, wanted in like.items():
        parts = tuple(part for key in path[dropped[path] :] for part in key.split("/"))
        source = stored.leaf_at((*node, *parts))
        if source is None:
            if path not in optional:
                missing.append(path)
            continue
        sources[path] = source
        leaf = stored.leaves[source]
        if leaf.shape != tuple(wanted.shape) or not _castable(leaf, wanted):
            misshapen.append(
                f"{path_text(path)}: {leaf.text()}, the model has {array_text(wanted.dtype, wanted.shape)}"
            )
    return _Fit(node, sources, tuple(missing), tuple(misshapen), _extra(stored, node, like, set(sources.values())))


def _extra(stored: StoredTree, node: KeyPath, like: Mapping[KeyPath, Any], taken: set[KeyPath]) -> tuple[KeyPath, ...]:
    """Leaves under `node` that the model lacks, but for RNGs, optimizers, counters and trees beside Linen's."""
    depth = len(node)
    collections = {path[0] for path in like}
    return tuple(
        path
        for path, leaf in stored.leaves.items()
        if path[:depth] == node
        and path not in taken
        and path not in stored.random
        and not (LINEN in collections and path[depth] not in collections)
        and not (len(path) == depth + 1 and path[-1] in _COUNTERS and leaf.shape == () and leaf.dtype.kind in "iu")
        and not stored.optimizer(path)
    )


def _castable(leaf: StoredLeaf, wanted: Any) -> bool:
    """Whether values keep their meaning: bool to int to float to complex, and never back."""
    return _kind(leaf.dtype) <= _kind(wanted.dtype)


def _kind(dtype: Any) -> int:
    import jax.numpy as jnp

    if jnp.issubdtype(dtype, jnp.floating):
        return 2
    return {"b": 0, "i": 1, "u": 1, "c": 3}.get(dtype.kind, 1)


def _distinct(fits: list[_Fit]) -> list[_Fit]:
    """Fits that take different leaves; of those that take the same, the one nearest to the root."""
    kept: dict[frozenset[KeyPath], _Fit] = {}
    for fit in fits:
        kept.setdefault(frozenset(fit.sources.values()), fit)
    return list(kept.values())


def _ambiguous(fits: list[_Fit], where: str) -> CheckpointError:
    names = sorted((path_text(fit.prefix) for fit in fits), key=lambda name: ("ema" in name, name))
    return CheckpointError(
        f"{len(fits)} subtrees of the checkpoint fit the model equally well",
        where=where,
        seen=", ".join(names),
        expected="one",
        remedy=f"say which: select={names[0]!r}",
    )


def _nothing_fits(stored: StoredTree, like: Mapping[KeyPath, Any], scope: KeyPath, where: str) -> CheckpointError:
    first = ", ".join(
        f"{path_text(path)} {array_text(leaf.dtype, leaf.shape)}" for path, leaf in list(like.items())[:3]
    )
    return CheckpointError(
        "no subtree of the checkpoint has the model's parameters",
        where=f"{where}, at {path_text(scope)}" if scope else where,
        seen=f"subtrees: {_outline(stored.leaves)}",
        expected=f"{len(like)} leaves: {first}{', ...' if len(like) > 3 else ''}",
        remedy="check that model and checkpoint belong together; optimizer state is never taken unless select names it",
    )


def _mismatch(fit: _Fit, stored: StoredTree, like: Mapping[KeyPath, Any], where: str) -> CheckpointError:
    lines = [
        *(
            f"missing    {path_text(path)}: the model has {array_text(like[path].dtype, like[path].shape)}"
            for path in fit.missing
        ),
        *(f"misshapen  {line}" for line in fit.misshapen),
        *(f"extra      {path_text(path[len(fit.prefix) :])}: {stored.leaves[path].text()}" for path in fit.extra),
    ]
    counts = [
        f"{len(found)} {word}"
        for word, found in (("missing", fit.missing), ("misshapen", fit.misshapen), ("extra", fit.extra))
        if found
    ]
    return CheckpointError(
        f"the checkpoint does not match the model: {', '.join(counts)}",
        where=f"{where}, at {path_text(fit.prefix)}" if fit.prefix else where,
        seen="\n    " + "\n    ".join(lines),
        expected=f"the {len(like)} leaves of the model, with their shapes, and no others",
        remedy="make the model with the settings it was trained with, or select another subtree",
    )


def _outline(leaves: Mapping[KeyPath, StoredLeaf]) -> str:
    """The first two levels of a checkpoint, with the number of leaves of each."""
    counts: dict[KeyPath, int] = {}
    for path in leaves:
        for depth in (1, 2):
            if len(path) > depth:
                counts[path[:depth]] = counts.get(path[:depth], 0) + 1
    shown = [f"{path_text(node)} ({count} leaves)" for node, count in sorted(counts.items())]
    return ", ".join(shown[:40]) + (f" and {len(shown) - 40} more" if len(shown) > 40 else "") or "none"
