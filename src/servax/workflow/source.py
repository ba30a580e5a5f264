"""A model and its parameters brought together: what `build` and an in-process `load` both start from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from servax.checkpoint.placement import put_copy
from servax.checkpoint.quantized import quantized, restore_quantized
from servax.checkpoint.restoring import restore
from servax.checkpoint.steps import Step
from servax.core import trees
from servax.core.device import Device
from servax.core.errors import ModelError, UsageError
from servax.core.events import step as named_step
from servax.core.tensors import dtype_of
from servax.core.trees import KeyPath, Tree
from servax.model.function import Function
from servax.model.language import LanguageModel
from servax.model.model import Model
from servax.model.outputs import infer_outputs
from servax.model.reference import load_model
from servax.stages.buckets import BucketGrid, make_grid
from servax.targets.manifest import ProvenanceRecord

Buckets = Mapping[str, Sequence[int]] | Sequence[str]
"""Sizes by dimension, `{"batch": [1, 8]}`, or texts as `--bucket` takes them."""


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """Which parameters of which checkpoint.

    Attributes:
      path: an Orbax directory, a safetensors or GGUF file; local path or URL.
      select: subtree with the parameters.
      step: step of a CheckpointManager directory.
      item: item of a CheckpointManager checkpoint.
      dtype: what floating leaves are cast to while they are restored.
      weights: of a language model: `float32`, `bfloat16` or `int8`, in place of `dtype`.
    """

    path: str | os.PathLike[str] | None = None
    select: str | None = None
    step: Step | None = None
    item: str | None = None
    dtype: str | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A model with its parameters on a device, its outputs inferred and its buckets fixed.

    Attributes:
      model: the model, its parameters' structure known.
      functions: by name, with outputs.
      grid: the buckets of each function.
      params: nested dictionary of arrays committed to the device.
      origins: where each leaf came from: `checkpoint` or `model`.
      provenance: what the manifest says of it.
    """

    model: Model
    functions: Mapping[str, Function]
    grid: BucketGrid
    params: Tree
    origins: Mapping[KeyPath, Literal["checkpoint", "model"]]
    provenance: ProvenanceRecord


def prepare(
    model: Model | str,
    choice: CheckpointChoice,
    *,
    params: Any = None,
    device: Device,
    buckets: Sequence[str] = (),
    bucket_file: str | os.PathLike[str] | None = None,
    grid: BucketGrid | None = None,
) -> Source:
    """Resolves the model, places its parameters on `device`, fixes its buckets and infers its outputs.

    Args:
      model: a Model, or `MODEL.py:NAME`.
      choice: the checkpoint; without a path `params` must be given.
      params: a live module or tree of arrays in place of a checkpoint.
      device: where the parameters go.
      buckets: overrides as the command line takes them, e.g. `batch=1,8`.
      bucket_file: JSON with the buckets of each function.
      grid: the buckets themselves, in place of the model's own.

    Raises:
      UsageError: neither or both of checkpoint and params.
      ModelError, CheckpointError: the model or the checkpoint does not fit.
    """
    if isinstance(model, str):
        model = load_model(model)
    model, choice = _with_weights(model, choice)
    if choice.dtype is not None:
        _check_dtype(choice.dtype)
    if (choice.path is None) == (params is None):
        raise UsageError(
            "parameters come from a checkpoint or from params=, one of the two",
            seen="neither" if params is None else "both",
            remedy='pass --checkpoint PATH (Python: checkpoint="PATH", or params=live_module)',
        )
    with named_step("restore"):
        model, placed, origins, provenance = (
            _from_checkpoint(model, choice, device) if params is None else _from_live(model, params, choice, device)
        )
    grid = grid or make_grid(model.functions, buckets, bucket_file)
    avals = abstract(placed)
    functions = {
        name: infer_outputs(function, avals, state_avals(function), [bucket.mapping() for bucket in grid[name]])
        for name, function in model.functions.items()
    }
    return Source(model, functions, grid, placed, origins, provenance)


def _with_weights(model: Model, choice: CheckpointChoice) -> tuple[Model, CheckpointChoice]:
    """The model whose network takes these weights, and the dtype that they mean."""
    if choice.weights is None:
        return model, choice
    if choice.dtype is not None:
        raise UsageError(
            "weights and dtype say the same", seen=f"weights {choice.weights}, dtype {choice.dtype}", remedy="leave one"
        )
    if not isinstance(model, LanguageModel):
        raise UsageError(
            "weights are chosen for language models", seen=model.name, remedy="for other models: dtype, e.g. bfloat16"
        )
    return model.with_weights(choice.weights), replace(
        choice, dtype=None if choice.weights == "int8" else choice.weights
    )


def is_int8(model: Model) -> bool:
    """Whether a model's matrices are kept in 8 bits."""
    return isinstance(model, LanguageModel) and model.weights == "int8"


def _check_dtype(name: str) -> None:
    """Raises UsageError for a dtype that floating parameters cannot be cast to."""
    floating = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
    if name not in floating:
        raise UsageError("parameters cannot be cast to this dtype", seen=name, expected=" or ".join(floating))
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise UsageError("float64 needs JAX's 64-bit mode", seen="jax_enable_x64=False", remedy="set JAX_ENABLE_X64=1")


def bucket_texts(buckets: Buckets) -> Sequence[str]:
    """Buckets as `--bucket` takes them: `{"batch": [1, 8]}` becomes `batch=1,8`."""
    if isinstance(buckets, Mapping):
        wrong = [f"{dim}: {sizes!r}" for dim, sizes in buckets.items() if not _is_sizes(sizes)]
        if wrong:
            raise UsageError("buckets are not lists of sizes", seen="; ".join(wrong), expected='{"batch": [1, 8]}')
        return [f"{dim}={','.join(map(str, sizes))}" for dim, sizes in buckets.items()]
    return [buckets] if isinstance(buckets, str) else buckets


def _is_sizes(sizes: object) -> bool:
    return isinstance(sizes, (list, tuple, range)) and all(type(size) is int for size in sizes)  # pyright: ignore[reportUnknownVariableType]  # elements of anything


def abstract(params: Tree) -> dict[str, Any]:
    """Shapes and dtypes of a tree of arrays, without a device."""
    return trees.unflatten(
        {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in trees.flatten(params).items()}
    )


def state_avals(function: Function) -> dict[str, Any] | None:
    """Shapes and dtypes of a function's state; None for a stateless function."""
    if function.state is None:
        return None
    return {spec.name: jax.ShapeDtypeStruct(spec.concrete({}), spec.numpy_dtype) for spec in function.state}


Prepared = tuple[Model, Tree, Mapping[KeyPath, Literal["checkpoint", "model"]], ProvenanceRecord]


def _from_checkpoint(model: Model, choice: CheckpointChoice, device: Device) -> Prepared:
    assert choice.path is not None
    like = model.abstract_params()
    options: dict[str, Any] = {
        "select": choice.select,
        "step": choice.step,
        "item": choice.item,
        "placement": device,
        "defaults": model.defaults(),
    }
    if like is not None and is_int8(model):
        restored = restore_quantized(choice.path, like=like, **options)
    else:
        restored = restore(choice.path, like=like, dtype=choice.dtype, **options)
    if like is None:
        model = model.bind(abstract(restored.params))
    found = restored.provenance
    provenance = ProvenanceRecord(
        checkpoint=str(found.path),
        layout=found.layout,
        step=found.step,
        item=found.item,
        select=found.select,
        source=model.reference,
    )
    return model, restored.params, restored.origins, provenance


def _from_live(model: Model, params: Any, choice: CheckpointChoice, device: Device) -> Prepared:
    live = _live(model, params, device)
    if model.abstract_params() is None:
        model = model.bind(abstract(live))
    lifted = model.defaults()
    placed = {path: _own(leaf, choice.dtype, device) for path, leaf in sorted(trees.flatten(live).items())}
    origins: dict[KeyPath, Literal["checkpoint", "model"]] = {
        path: "model" if path in lifted else "checkpoint" for path in placed
    }
    return model, trees.unflatten(placed), origins, ProvenanceRecord(source=model.reference)


def _live(model: Model, params: Any, device: Device) -> Tree:
    """Canonical parameters of what is live; of a floating network, brought to 8 bits for a model that has them so."""
    if not is_int8(model):
        return model.params_of(params)
    try:
        return model.params_of(params)
    except ModelError:
        assert isinstance(model, LanguageModel)
        whole, like = model.with_weights("float32").params_of(params), model.abstract_params()
        assert like is not None, "a network of 8 bits is a module"
        wide = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in trees.flatten(whole).items()}
        return quantized(trees.unflatten(wide), trees.flatten(like), device)


def _own(leaf: Any, dtype: str | None, device: Device) -> Any:
    """A copy of an array on `device`, cast if asked: the caller may donate or overwrite his own (contract 7)."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    wanted = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if dtype is not None and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
        wanted = dtype_of(dtype)
    # Through host memory: `device_put` of an array that lies on the device already is a view of it.
    return put_copy(np.asarray(leaf), wanted, jax.sharding.SingleDeviceSharding(device))
