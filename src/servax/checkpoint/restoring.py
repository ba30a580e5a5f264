"""A checkpoint's parameters, straight onto the device (contract 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from servax.checkpoint.layout import locate
from servax.checkpoint.placement import put_copy, sharding_of
from servax.checkpoint.select import choose, subtree
from servax.checkpoint.steps import Step
from servax.checkpoint.stored import Location, PathLike, Source, StoredLeaf, Wanted
from servax.checkpoint.stored_tree import VALUE_KEYS, random_paths
from servax.core.device import Device
from servax.core.errors import CheckpointError
from servax.core.tensors import dtype_of
from servax.core.trees import KeyPath, Tree, flatten, path_text, unflatten

Origin = Literal["checkpoint", "model"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where parameters came from, as a manifest records it.

    Attributes:
      path: as given, absolute; local or a URL.
      layout: `orbax v0`, `orbax v1`, `safetensors` or `gguf`.
      step: the training step, where the path has one.
      item: the item of the step, where it has items.
      select: the subtree, named or found; None for the whole tree.
    """

    path: str
    layout: str
    step: int | None = None
    item: str | None = None
    select: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """Parameters on the device.

    Attributes:
      params: nested dictionary of committed arrays.
      provenance: where they came from.
      origins: by leaf, whether the checkpoint or the model's definition gave it.
    """

    params: dict[str, Any]
    provenance: Provenance
    origins: Mapping[KeyPath, Origin]


def restore(
    path: PathLike,
    *,
    like: Tree | None,
    select: str | None = None,
    step: Step | None = None,
    item: str | None = None,
    dtype: str | None = None,
    placement: Device | jax.sharding.Sharding | None = None,
    defaults: Mapping[KeyPath, np.ndarray[Any, Any]] | None = None,
) -> Restored:
    """Restores a model's parameters onto a device, reading no other bytes and compiling nothing.

    Args:
      path: a run's directory, one step, one item, a safetensors or GGUF file or folder; local or a URL.
      like: the model's parameters, `jax.ShapeDtypeStruct` leaves; None: everything under `select`, as it is stored,
        without PRNG keys.
      select: the subtree that holds them; None: found, if it is the only one that fits.
      step: of a run; None is the latest.
      item: of a step; None: whichever item has the parameters.
      dtype: for floating leaves, in place of the dtypes of `like` or of the checkpoint.
      placement: the device or sharding of every leaf; None: the first device of the default backend.
      defaults: values of leaves that the checkpoint may lack.

    Raises:
      CheckpointError: the path is no checkpoint, is damaged, or does not match `like`.
    """
    location = locate(path, step=step, item=item)
    source = open_source(location)
    sharding = sharding_of(placement)
    values = defaults or {}
    if like is None:
        prefix, sources = _everything(location, source, select)
        wanted = {leaf: _canonical(source.leaves[stored].dtype) for leaf, stored in sources.items()}
    else:
        flat = flatten(like)
        selection = choose(source.leaves, flat, select=select, optional=values.keys(), where=_where(location))
        prefix, sources = selection.prefix, selection.sources
        wanted = {leaf: np.dtype(abstract.dtype) for leaf, abstract in flat.items()}
    if dtype is not None:
        wanted = {leaf: _floating(stored, dtype_of(dtype)) for leaf, stored in wanted.items()}

    read = source.read({stored: Wanted(wanted[leaf], sharding) for leaf, stored in sources.items()})
    arrays = {
        leaf: read[sources[leaf]] if leaf in sources else put_copy(values[leaf], wanted[leaf], sharding)
        for leaf in wanted
    }
    jax.block_until_ready(arrays)
    origins: dict[KeyPath, Origin] = {leaf: "checkpoint" if leaf in sources else "model" for leaf in wanted}
    return Restored(unflatten(arrays), _provenance(location, prefix), origins)


def open_source(location: Location) -> Source:
    """The checkpoint at `location`, its metadata read."""
    if location.layout == "safetensors":
        from servax.checkpoint.safetensors import open_safetensors

        return open_safetensors(location)
    if location.layout == "gguf":
        from servax.checkpoint.gguf import open_gguf

        return open_gguf(location)
    from servax.checkpoint.orbax import open_orbax

    return open_orbax(location)


def _everything(location: Location, source: Source, select: str | None) -> tuple[KeyPath, dict[KeyPath, KeyPath]]:
    """Every leaf under `select` but PRNG keys, by its path there; `value` keys that `nnx.State` added are dropped."""
    prefix = subtree(source.leaves, select, _where(location))
    if not prefix and len(location.items) > 1:
        raise CheckpointError(
            "the checkpoint has several items",
            where=_where(location),
            seen=f"items: {', '.join(str(name) for name in location.items)}",
            expected="one of them, where the model does not say what it needs",
            remedy=f"name one: item={location.items[0]!r}",
        )
    inside: dict[KeyPath, StoredLeaf] = {
        path: leaf for path, leaf in source.leaves.items() if path[: len(prefix)] == prefix
    }
    random = random_paths(inside)
    kept = sorted(path for path in inside if path not in random)
    if not kept:
        raise CheckpointError(
            "the subtree holds no arrays", where=_where(location), seen=path_text(prefix) or "nothing"
        )
    boxed = _boxed(kept, len(prefix))
    return prefix, {(path[len(prefix) : -1] if boxed else path[len(prefix) :]): path for path in kept}


def _boxed(paths: list[KeyPath], depth: int) -> bool:
    """Whether each leaf is the `value` of an `nnx.Variable`: every path ends so, below a name of its own."""
    parents = {path[:-1] for path in paths}
    return len(parents) == len(paths) and all(path[-1] in VALUE_KEYS and len(path) > depth + 1 for path in paths)


def _canonical(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that JAX holds it in: 64 bits are 32 unless x64 is on."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _floating(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> np.dtype[Any]:
    return wanted if jnp.issubdtype(dtype, jnp.floating) else dtype


def _where(location: Location) -> str:
    return str(location.path) if location.step is None else f"{location.path}, step {location.step}"


def _provenance(location: Location, prefix: KeyPath) -> Provenance:
    item: str | None = location.items[0]
    if len(location.items) > 1:
        item, prefix = prefix[0] if prefix else None, prefix[1:]
    return Provenance(str(location.path), location.layout, location.step, item, path_text(prefix) or None)
