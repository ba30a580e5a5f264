"""What integers a function's inputs may hold, found in its jaxpr: an index must lie inside the table it looks into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Taint = frozenset[str]
_NOTHING: _Taint = frozenset()


def index_bounds(jaxpr: Any, inputs: Mapping[str, int]) -> dict[str, int]:
    """The number of valid values, 0 up to it, of each input that is used as an index; others are absent.

    `inputs` gives the position of each integer input among the jaxpr's. An input that looks into several tables is
    bounded by the smallest. A size-one axis, which any index is clamped to or broadcast along, bounds nothing.
    """
    bounds: dict[str, int] = {}
    core = getattr(jaxpr, "jaxpr", jaxpr)
    taints = [_NOTHING] * len(core.invars)
    for name, position in inputs.items():
        taints[position] = frozenset((name,))
    _walk(core, taints, bounds)
    return bounds


def _walk(jaxpr: Any, incoming: Sequence[_Taint], bounds: dict[str, int]) -> list[_Taint]:
    taints: dict[Any, _Taint] = dict(zip(jaxpr.invars, incoming, strict=True))
    parts: dict[Any, list[_Taint]] = {}

    def read(atom: Any) -> _Taint:
        return _NOTHING if hasattr(atom, "val") else taints.get(atom, _NOTHING)

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name == "concatenate" and eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
            parts[eqn.outvars[0]] = [
                taint for atom, taint in zip(eqn.invars, given, strict=True) for _ in range(atom.aval.shape[-1])
            ]
        elif name == "gather":
            _gather(eqn, given[1], parts.get(eqn.invars[1]) if not hasattr(eqn.invars[1], "val") else None, bounds)
        elif name == "dynamic_slice":
            shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
            for taint, whole, size in zip(given[1:], shape, sizes, strict=False):
                _bound(taint, whole - size + 1, bounds)
        for variable, taint in zip(eqn.outvars, _flow(eqn, given, bounds), strict=True):
            # What a look-up gives back is data, no index; only integers can become one.
            taints[variable] = taint if name != "gather" and _is_integer(variable.aval) else _NOTHING
    return [read(atom) for atom in jaxpr.outvars]


def _flow(eqn: Any, given: Sequence[_Taint], bounds: dict[str, int]) -> list[_Taint]:
    results: list[list[_Taint]] = []
    operands = given[1:] if eqn.primitive.name == "cond" else given
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns") and len(inner.invars) == len(operands):
                results.append(_walk(inner, operands, bounds))
    whole = frozenset[str]().union(*given)
    matching = [each for each in results if len(each) == len(eqn.outvars)]
    if not matching:
        return [whole] * len(eqn.outvars)
    return [frozenset[str]().union(*each) for each in zip(*matching, strict=True)]


def _gather(eqn: Any, taint: _Taint, parts: list[_Taint] | None, bounds: dict[str, int]) -> None:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    axes = eqn.params["dimension_numbers"].start_index_map
    if parts is None or len(parts) != len(axes):
        parts = [taint] * len(axes)
    for part, axis in zip(parts, axes, strict=True):
        _bound(part, shape[axis] - sizes[axis] + 1, bounds)


def _bound(names: _Taint, count: int, bounds: dict[str, int]) -> None:
    for name in names:
        if count > 1:
            bounds[name] = min(bounds.get(name, count), count)


def _is_integer(aval: Any) -> bool:
    return str(getattr(aval, "dtype", "")).lstrip("u").startswith("int")
