"""Outputs of a function, inferred: their names, dtypes, and dimensions in terms of the inputs' dimensions.

The function is evaluated abstractly at its largest bucket and at other sizes, one dimension changed at a time; a size
of an output that follows exactly one dimension, by a whole number for each step, is an affine expression of it. A last
evaluation with all dimensions changed at once confirms it. No size goes beyond the largest bucket unless there is no
other (position tables limit the length).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from servax.core.errors import ModelError
from servax.core.tensors import Dim, TensorSpec, evaluate_dim
from servax.core.trees import Tree
from servax.model.function import Function

Sizes = Mapping[str, int]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Outputs at one set of sizes."""

    sizes: Sizes
    outputs: Shapes


def infer_outputs(
    function: Function, params: Tree, state: Mapping[str, Any] | None, sizes: Sequence[Mapping[str, int]]
) -> Function:
    """The function with its outputs filled in.

    Args:
      function: a function of a model.
      params: canonical parameters, arrays or `jax.ShapeDtypeStruct`s.
      state: the model's state by name, likewise; None for the specs that the function has itself.
      sizes: of its buckets, all named dimensions in each; one empty mapping where there are none.

    Raises:
      ModelError: the function cannot be evaluated at a bucket, or a dimension of an output follows no one dimension of
        the inputs by an affine rule; every such dimension is named.
    """
    dims = function.signature.dims
    if missing := [dim for dim in dims if any(dim not in each for each in sizes)]:
        raise ModelError(
            f"function {function.name!r} has dimensions without a size",
            where=f"function {function.name!r}",
            seen=", ".join(missing),
            remedy="Give them sizes with buckets= or --bucket DIM=SIZE,SIZE.",
        )
    if state is None and function.state is not None:
        state = {spec.name: jax.ShapeDtypeStruct(spec.concrete({}), spec.numpy_dtype) for spec in function.state}

    def evaluate(at: Sizes) -> _Seen:
        return _Seen(at, _evaluate(function, params, state, at))

    largest = {dim: max(each[dim] for each in sizes) for dim in dims}
    base = evaluate(largest)
    varied = {dim: _vary(dim, sorted({each[dim] for each in sizes}), base, evaluate, function.name) for dim in dims}
    confirming = _confirm(base, varied, evaluate)
    specs, faults = _explain(base, varied, confirming)
    if faults:
        raise ModelError(
            f"{len(faults)} dimension{'s' if len(faults) > 1 else ''} of the outputs of function {function.name!r} "
            "cannot be explained by the inputs' dimensions",
            where=f"function {function.name!r}",
            seen="".join(f"\n    {fault}" for fault in faults),
            expected="a fixed size, or a whole multiple of one named dimension plus a fixed number",
            remedy="Return the tensor with separate axes (do not merge batch and length), or padded to one of its "
            "inputs' dimensions, or fix the dimension in the spec of the input.",
        )
    return function.with_signature(function.signature.with_outputs(specs))


def _evaluate(function: Function, params: Tree, state: Mapping[str, Any] | None, sizes: Sizes) -> Shapes:
    inputs = {
        spec.name: jax.ShapeDtypeStruct(spec.concrete(sizes), jnp.dtype(spec.numpy_dtype))
        for spec in function.signature.inputs
    }
    jaxpr, (_, outputs) = jax.make_jaxpr(function.call, return_shape=True)(params, state, inputs)
    if leaked := [each.aval.str_short() for each in jaxpr.consts if isinstance(each, Tracer)]:
        # JAX itself finds out only when the program is compiled.
        raise ModelError(
            f"function {function.name!r} uses arrays that the module's definition hid from JAX",
            where=f"function {function.name!r}",
            seen=", ".join(leaked),
            expected="arrays that are attributes of a module, or in lists, dictionaries and registered pytrees there",
            remedy="Take the arrays out of the object that holds them and assign them to the module, or make them "
            "with NumPy.",
        )
    return dict(outputs)


def _vary(dim: str, listed: Sequence[int], base: _Seen, evaluate: Any, function: str) -> _Seen:
    """Outputs with another size of one dimension: the smallest bucket's, else one nearby at which it can be traced.

    Raises:
      ModelError: the function can be traced at no other size.
    """
    size = base.sizes[dim]
    if listed[0] != size:
        return evaluate({**base.sizes, dim: listed[0]})
    errors: list[ModelError] = []
    for other in dict.fromkeys((size - 1, size // 2, size // 2 * 2 - 2, size + 1, size * 2)):
        if other < 1 or other == size:
            continue
        try:
            return evaluate({**base.sizes, dim: other})
        except ModelError as error:
            errors.append(error)
    raise ModelError(
        f"function {function!r} runs at {dim}={size} only, so what its outputs have of {dim!r} is unknown",
        where=f"function {function!r}",
        seen=errors[0].sentence(),
        remedy=f"Write the number {size} in place of {dim!r} in the specs of the inputs.",
    ) from errors[0]


def _confirm(base: _Seen, varied: Mapping[str, _Seen], evaluate: Any) -> list[_Seen]:
    """Outputs with every dimension changed at once, to a size that no evaluation had before, and with each at 1; none
    where that raises: a function may demand, say, multiples of eight, as all of its buckets are.
    """
    if not varied:
        return []
    used = {dim: {base.sizes[dim], seen.sizes[dim]} for dim, seen in varied.items()}
    fresh = {
        dim: next((size for size in range(base.sizes[dim] - 1, 0, -1) if size not in used[dim]), base.sizes[dim])
        for dim in varied
    }
    if fresh == dict(base.sizes):
        return []
    # Requests may be as small as 1, where a slice or a minimum size shows that larger sizes hide.
    small = [{**base.sizes, dim: 1} for dim in varied if base.sizes[dim] > 1 and 1 not in used[dim]]
    found: list[_Seen] = []
    for sizes in (fresh, *small):
        with contextlib.suppress(ModelError):
            found.append(evaluate(sizes))
    return found


def _explain(
    base: _Seen, varied: Mapping[str, _Seen], confirming: Sequence[_Seen]
) -> tuple[list[TensorSpec], list[str]]:
    specs: list[TensorSpec] = []
    faults: list[str] = []
    everything = (base, *varied.values(), *confirming)
    for name in sorted({name for seen in everything for name in seen.outputs}):
        absent = [seen for seen in everything if name not in seen.outputs]
        if absent:
            faults.append(
                f"output {name!r} is missing at {_at(absent[0])}, and there at {_at(_present(everything, name))}"
            )
            continue
        if len({(len(seen.outputs[name].shape), seen.outputs[name].dtype) for seen in everything}) > 1:
            kinds = ", ".join(dict.fromkeys(f"{_text(seen.outputs[name])} at {_at(seen)}" for seen in everything))
            faults.append(f"output {name!r} has another rank or dtype at other sizes: {kinds}")
            continue
        shape: list[Dim] = []
        for axis in range(len(base.outputs[name].shape)):
            dim = _dim(name, axis, base, varied)
            if dim is None or any(_disagrees(dim, seen, name, axis) for seen in everything):
                first: dict[int, str] = {}
                for seen in everything:
                    first.setdefault(seen.outputs[name].shape[axis], _at(seen))
                sizes = ", ".join(f"{size} at {at}" for size, at in first.items())
                faults.append(f"output {name!r}, axis {axis}, has size {sizes}")
            else:
                shape.append(dim)
        specs.append(TensorSpec(name, base.outputs[name].dtype.name, tuple(shape)))
    return specs, faults


def _disagrees(dim: Dim, seen: _Seen, name: str, axis: int) -> bool:
    size = evaluate_dim(dim, seen.sizes)
    # Below the reach of a convolution there is no output, and the rule goes on to negative sizes.
    return size > 0 and size != seen.outputs[name].shape[axis]


def _dim(name: str, axis: int, base: _Seen, varied: Mapping[str, _Seen]) -> Dim | None:
    """The dimension that explains an axis of an output; None if several have a part in it, or none by whole steps."""
    size = base.outputs[name].shape[axis]
    moving = [dim for dim, seen in varied.items() if seen.outputs[name].shape[axis] != size]
    if not moving:
        return size
    if len(moving) > 1:
        return None
    dim = moving[0]
    seen = varied[dim]
    scale, rest = divmod(size - seen.outputs[name].shape[axis], base.sizes[dim] - seen.sizes[dim])
    if rest:
        return None
    offset = size - scale * base.sizes[dim]
    return f"{'' if scale == 1 else f'{scale}*'}{dim}{f'{offset:+d}' if offset else ''}"


def _present(everything: Sequence[_Seen], name: str) -> _Seen:
    return next(seen for seen in everything if name in seen.outputs)


def _at(seen: _Seen) -> str:
    return ",".join(f"{dim}={size}" for dim, size in seen.sizes.items()) or "fixed sizes"


def _text(shape: jax.ShapeDtypeStruct) -> str:
    return f"{shape.dtype.name}[{', '.join(map(str, shape.shape))}]"
