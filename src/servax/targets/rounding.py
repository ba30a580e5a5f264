"""Rounding errors estimated from a jaxpr: what each operation adds, along the longest path to every output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from servax.core.device import PLATFORMS
from servax.targets.samples import Rounding
from servax.targets.tolerance import UNIT

LOOP = 16
"""Trips assumed of a `while` loop, whose number no jaxpr tells."""

_DOT_UNIT = {"cuda": 2.0**-11, "tpu": 2.0**-8}
"""Unit roundoff of a float32 product at default matmul precision: TF32 on NVIDIA, bfloat16 passes on TPU."""

_EXACT = {
    *("abs", "argmax", "argmin", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p", "device_put"),
    *("dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "imag", "iota", "max", "min", "neg"),
    *("optimization_barrier", "pad", "real", "reduce_max", "reduce_min", "reduce_window_max", "reshape", "rev"),
    *("scatter", "select_n", "sign", "slice", "sort", "split", "squeeze", "stop_gradient", "top_k", "transpose"),
}
_LINALG = {
    *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve"),
}

_QUANTIZED = 2.0**-8
"""Half a step of a value brought to 8 bits, over the largest one: rounding before it decides which step is taken."""

_Error = tuple[float, float]
"""Squared relative error, and the largest unit roundoff that went into it."""

_NONE: _Error = (0.0, 0.0)


def estimate(jaxpr: Any, names: Sequence[str]) -> dict[str, dict[str, Rounding]]:
    """The rounding of each output by platform: `names` are those of the jaxpr's outputs, in order.

    Integer and boolean outputs are exact (`unit` 0) unless rounded values decided them, as an `argmax` or a comparison
    does: then they have the rounding of those values.
    """
    found: dict[str, dict[str, Rounding]] = {name: {} for name in names}
    for platform in PLATFORMS:
        core = _open(jaxpr)
        errors = _walk(core, [_NONE] * len(core.invars), platform)
        for name, variable, (square, unit) in zip(names, core.outvars, errors, strict=True):
            own = _unit(variable.aval)
            # An output that only moves its inputs is still compared within one rounding of its own type.
            found[name][platform] = Rounding(max(unit, own), math.sqrt(max(square, own * own)))
    return found


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _walk(jaxpr: Any, inputs: Sequence[_Error], platform: str) -> list[_Error]:
    errors: dict[Any, _Error] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Error:
        return _NONE if hasattr(atom, "val") else errors.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        incoming = [read(atom) for atom in eqn.invars]
        for variable, error in zip(eqn.outvars, _equation(eqn, incoming, platform), strict=True):
            errors[variable] = error
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, incoming: Sequence[_Error], platform: str) -> list[_Error]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _loop(params["jaxpr"], _carried(eqn), params["length"], incoming, platform)
    if name == "while":
        return _while(params, incoming, platform)
    if name == "cond":
        branches = [_walk(_open(branch), incoming[1:], platform) for branch in params["branches"]]
        return [_join((incoming[0], *each)) for each in zip(*branches, strict=True)]
    inner = _called(eqn)
    if inner is not None:
        return _walk(inner, incoming, platform)
    before = _join(incoming)
    return [_add(before, _own(eqn, variable.aval, platform)) for variable in eqn.outvars]


def _carried(eqn: Any) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried from one trip to the next.

    Read off the shapes, since versions of JAX differ in what the equation's parameters say: what is scanned over has
    one axis more than the body sees.
    """
    inner = _open(eqn.params["jaxpr"])

    def scanned(outer: Sequence[Any], body: Sequence[Any]) -> int:
        return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in zip(outer, body, strict=True))

    carries = len(eqn.outvars) - scanned(eqn.outvars, inner.outvars)
    return len(eqn.invars) - scanned(eqn.invars, inner.invars) - carries, carries


def _loop(body: Any, carried: tuple[int, int], trips: int, incoming: Sequence[_Error], platform: str) -> list[_Error]:
    """Errors of a loop's results; a result that nothing rounded reaches in any trip, such as a counter, has none."""
    inner = _open(body)
    consts, carries = carried
    into = list(incoming)
    while True:
        results = _walk(inner, into, platform)
        reached = [at for at in range(carries) if results[at] != _NONE and into[consts + at] == _NONE]
        if not reached:
            break
        for at in reached:
            into[consts + at] = results[at]
    square, unit = _join(_walk(inner, [_NONE] * len(inner.invars), platform))
    after = _add(_join(incoming), (trips * square, unit))
    return [_NONE if result == _NONE else after for result in results]


def _while(params: Mapping[str, Any], incoming: Sequence[_Error], platform: str) -> list[_Error]:
    body, conditional = params["body_nconsts"], params["cond_nconsts"]
    before = incoming[conditional + body :]
    results = _loop(params["body_jaxpr"], (body, len(before)), LOOP, incoming[conditional:], platform)
    seen = [_join(each) for each in zip(before, results, strict=True)]
    (ends,) = _walk(_open(params["cond_jaxpr"]), [*incoming[:conditional], *seen], platform)
    # A rounded value that ends the loop decides what it counts.
    return [ends if result == _NONE else result for result in results]


def _called(eqn: Any) -> Any | None:
    """The jaxpr that an equation such as `jit` or `custom_jvp_call` runs on exactly its own operands."""
    for value in eqn.params.values():
        inner = _open(value)
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
            return inner
    return None


def _own(eqn: Any, aval: Any, platform: str) -> _Error:
    """What one operation adds to the relative error of its result."""
    name = eqn.primitive.name
    unit = _unit(aval)
    if name == "convert_element_type" and str(aval.dtype) == "int8" and _unit(eqn.invars[0].aval):
        return _QUANTIZED**2, _QUANTIZED
    if name in _EXACT or unit == 0:
        return _NONE
    if name == "convert_element_type":
        source = _unit(eqn.invars[0].aval)
        return (unit * unit, unit) if unit > source else _NONE
    terms = _TERMS[name](eqn) if name in _TERMS else 1
    if name in _LINALG:
        terms = (10 * max(aval.shape, default=1)) ** 2  # backward stable, times a condition number of some hundreds
    # Sums of narrow types are accumulated in float32.
    square = unit * unit + (terms - 1) * min(unit, UNIT["float32"]) ** 2
    if name in ("dot_general", "conv_general_dilated") and _default_precision(eqn) and unit == UNIT["float32"]:
        product = _DOT_UNIT.get(platform, 0.0)
        return square + product * product, max(unit, product)
    return square, unit


def _unit(aval: Any) -> float:
    """Unit roundoff of a value's dtype; 0 for integers, booleans, random keys and what has no dtype."""
    return UNIT.get(str(getattr(aval, "dtype", "")), 0.0)


def _default_precision(eqn: Any) -> bool:
    precision = eqn.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(each is None or str(each).rpartition(".")[2] == "DEFAULT" for each in given)


def _dot_terms(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)


def _conv_terms(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    return math.prod(kernel) // max(1, kernel[eqn.params["dimension_numbers"].rhs_spec[0]])


def _reduction_terms(eqn: Any) -> int:
    return max(1, math.prod(eqn.invars[0].aval.shape) // max(1, math.prod(eqn.outvars[0].aval.shape)))


def _axis_terms(eqn: Any) -> int:
    return eqn.invars[0].aval.shape[eqn.params["axis"]]


def _window_terms(eqn: Any) -> int:
    return math.prod(eqn.params["window_dimensions"])


def _update_terms(eqn: Any) -> int:
    return max(1, math.prod(eqn.invars[2].aval.shape))


_TERMS: Mapping[str, Callable[[Any], int]] = {
    "dot_general": _dot_terms,
    "conv_general_dilated": _conv_terms,
    "reduce_sum": _reduction_terms,
    "reduce_prod": _reduction_terms,
    "cumsum": _axis_terms,
    "cumprod": _axis_terms,
    "cumlogsumexp": _axis_terms,
    "reduce_window_sum": _window_terms,
    "scatter-add": _update_terms,
    "fft": lambda eqn: math.prod(eqn.params["fft_lengths"]),
}


def _join(errors: Sequence[_Error]) -> _Error:
    return max((square for square, _ in errors), default=0.0), max((unit for _, unit in errors), default=0.0)


def _add(before: _Error, own: _Error) -> _Error:
    return before[0] + own[0], max(before[1], own[1])
