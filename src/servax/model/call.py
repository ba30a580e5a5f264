"""A user's function as the pure `Call`: canonical parameters and flat, named arrays in, flat, named arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from servax.core.errors import ModelError
from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import Tree
from servax.model.adapter import Adapter, NetFunction
from servax.model.explain import explained
from servax.model.function import Arrays, Call
from servax.model.layout import is_key, key_path
from servax.model.signature import nested

OUTPUT = "output"
"""The name of an output that has none; those of a tuple are `output_0`, `output_1`, ..."""


def make_call(
    adapter: Adapter,
    function: NetFunction,
    *,
    name: str,
    signature: Signature,
    state: Sequence[TensorSpec] | None,
    fixed: Mapping[str, Any],
    vmap: bool,
) -> Call:
    """The pure function of one entry point.

    The net is made of the parameters inside the call (and, with `vmap`, inside the mapped function, for modules refuse
    to be changed from another trace than the one that made them).
    """

    def one(params: Tree, state_arrays: Arrays | None, inputs: Arrays) -> Any:
        arguments = () if state_arrays is None else (nested(state_arrays),)
        return adapter.run(params, function, arguments, {**nested(inputs), **fixed})

    def call(params: Tree, state_arrays: Arrays | None, inputs: Arrays) -> tuple[Arrays | None, Arrays]:
        # A user's code may index, update or compare arrays as only JAX's can be; traced ones pass through as they are.
        params, state_arrays, inputs = jax.tree.map(jnp.asarray, (params, state_arrays, inputs))
        with explained(name, observed_sizes(signature, inputs)):
            if state is not None:
                return _stateful(name, state, one(params, state_arrays, inputs))
            if not vmap:
                return None, named_outputs(name, one(params, None, inputs))
            axes = {spec.name: spec.shape.index(signature.batch) for spec in signature.inputs if signature.batch}
            rows = jax.vmap(
                lambda row: named_outputs(name, one(params, None, row)),
                in_axes=({each: axes[each] for each in inputs},),
                axis_name=signature.batch,
            )
            return None, rows(dict(inputs))

    return call


def observed_sizes(signature: Signature, inputs: Arrays) -> dict[str, Any]:
    """Sizes of the named dimensions, as the arrays have them."""
    sizes: dict[str, Any] = {}
    for spec in signature.inputs:
        if spec.name in inputs:
            for dim, size in zip(spec.shape, np.shape(inputs[spec.name]), strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
    return sizes


def named_outputs(function: str, result: Any) -> dict[str, Any]:
    """What a function returned, as flat arrays by name: nested names are joined by dots.

    Raises:
      ModelError: there is no output, two have the same name, or one is no array.
    """
    leaves = jax.tree_util.tree_leaves_with_path(result)
    outputs: dict[str, Any] = {}
    faults: list[str] = []
    for path, leaf in leaves:
        keys = list(key_path(path))
        if not keys:
            keys = [OUTPUT]
        elif isinstance(path[0], jax.tree_util.SequenceKey):
            keys[0] = f"{OUTPUT}_{keys[0]}"
        name = ".".join(keys)
        if name in outputs:
            faults.append(f"{name!r} is the name of two outputs (rename one)")
        elif is_key(leaf):
            faults.append(f"{name!r} is a typed PRNG key (return jax.random.key_data of it)")
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            outputs[name] = jnp.asarray(leaf)
        else:
            faults.append(f"{name!r} is a {type(leaf).__name__} (return arrays only)")
    if not leaves:
        faults.append("nothing is returned (return an array, a tuple, or a dictionary of arrays)")
    if faults:
        raise ModelError(
            f"the outputs of function {function!r} have {len(faults)} fault{'s' if len(faults) > 1 else ''}",
            where=f"function {function!r}",
            seen="; ".join(faults),
            remedy="Change what each fault names in brackets.",
        )
    return outputs


def _stateful(function: str, specs: Sequence[TensorSpec], result: Any) -> tuple[Arrays, Arrays]:
    """State and outputs of a stateful function; the state must come back as it went in.

    Raises:
      ModelError: it did not; every difference is listed.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise ModelError(
            f"stateful function {function!r} does not return (state, outputs)",
            where=f"function {function!r}",
            seen=f"a {type(result).__name__}",
            remedy="Return a tuple of two: the new state, a dictionary like the one passed in, and the outputs.",
        )
    state = named_outputs(function, result[0]) if result[0] else {}
    expected = {spec.name: spec for spec in specs}
    faults = [f"{name} is missing" for name in expected if name not in state]
    faults += [f"{name} is not in state=" for name in state if name not in expected]
    for name, spec in expected.items():
        if name in state and (state[name].shape, state[name].dtype.name) != (spec.shape, spec.dtype):
            shape = ", ".join(map(str, state[name].shape))
            faults.append(f"{name} is {state[name].dtype.name}[{shape}], declared as {spec.text()}")
    if faults:
        raise ModelError(
            f"function {function!r} returns another state than it takes ({len(faults)} differences)",
            where=f"function {function!r}",
            seen="; ".join(faults),
            remedy="Return every array of the state with its declared shape and dtype (cast with .astype).",
        )
    return state, named_outputs(function, result[1])
