"""Arrays that a traced function closes over, and its calls back into Python (contract 2: weights are arguments)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]  # published there, without the mark of a re-export
    Jaxpr,
    JaxprEqn,
    Literal,
)

from servax.core.errors import ModelError
from servax.core.table import bytes_text
from servax.core.trees import Tree, flatten, path_text

FLOATING_LIMIT = 64 << 10
"""Bytes that one closed-over floating array may have."""

TOTAL_LIMIT = 8 << 20
"""Bytes that all closed-over arrays of a function may have together."""

_CALLBACKS = {
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
}


@dataclass(frozen=True, slots=True)
class Constant:
    """An array that stands in a program instead of being an argument of it.

    Attributes:
      dtype: the dtype's name.
      bytes: its size.
      parameter: path of the parameter that has the same bytes, if one has.
      used_at: `FILE:LINE (function)` of the user's code that uses it first, where JAX kept it.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    parameter: str | None = None
    used_at: str | None = None

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}] of {bytes_text(self.bytes)}"
        if self.parameter is not None:
            text += f", equal to parameter {self.parameter}"
        return text if self.used_at is None else f"{text}, used at {self.used_at}"


def closed_over(traced: jax.stages.Traced, params: Tree | None = None) -> tuple[Constant, ...]:
    """Every array that the function closes over, largest first: weights, tables, what NumPy computed while tracing.

    Args:
      traced: the function; nested functions, loops and branches are looked into.
      params: with these, each constant is compared, byte by byte, with the parameters of its shape and dtype.
    """
    leaves = [] if params is None else list(flatten(params).items())
    seen: dict[int, tuple[Any, str | None]] = {}
    for value, used_at in _arrays(traced.jaxpr):
        if id(value) not in seen or seen[id(value)][1] is None:
            seen[id(value)] = value, used_at
    constants = [
        Constant(tuple(value.shape), str(value.dtype), _bytes(value), _equal_parameter(value, leaves), used_at)
        for value, used_at in seen.values()
    ]
    return tuple(sorted(constants, key=lambda constant: -constant.bytes))


def check_constants(traced: jax.stages.Traced, params: Tree, *, where: str) -> tuple[Constant, ...]:
    """The function's closed-over arrays, when they are few and small enough to be no weights.

    Args:
      traced: the function.
      params: its parameters; abstract ones are not compared.
      where: `function@bucket`, for the error.

    Raises:
      ModelError: a floating array is over 64 KiB, or all arrays are over 8 MiB together; each is listed.
    """
    constants = closed_over(traced, params)
    large = [each for each in constants if _is_floating(each.dtype) and each.bytes > FLOATING_LIMIT]
    total = sum(each.bytes for each in constants)
    if not large and total <= TOTAL_LIMIT:
        return constants
    refused = large or constants
    shown = "; ".join(map(str, refused[:20])) + (f"; and {len(refused) - 20} more" if len(refused) > 20 else "")
    equal = any(each.parameter for each in refused)
    raise ModelError(
        "the function closes over its weights" if equal else "the function closes over large arrays",
        where=where,
        seen=shown if large else f"{bytes_text(total)} in {len(constants)} arrays: {shown}",
        expected=f"no floating array over {bytes_text(FLOATING_LIMIT)}"
        if large
        else f"at most {bytes_text(TOTAL_LIMIT)} in all",
        remedy=(
            "take the arrays from the module or the params that the function is called with instead of closing over "
            "them: as constants they would stay as they are when new weights are loaded"
            if equal
            else "keep the arrays as attributes of the module (servax turns them into arguments), or compute them with "
            "jax.numpy inside the function"
        ),
    )


def callbacks(traced: jax.stages.Traced) -> tuple[str, ...]:
    """The function's calls back into Python, each once: `jax.pure_callback of lookup, used at net.py:31 (__call__)`."""
    found: dict[str, None] = {}
    for equation in _equations(traced.jaxpr.jaxpr):
        name = str(equation.primitive.name)
        if name not in _CALLBACKS:
            continue
        text = _CALLBACKS[name]
        called = getattr(equation.params.get("callback"), "callback_func", None)
        if name in ("pure_callback", "io_callback"):
            text += f" of {getattr(called, '__name__', 'a callable')}"
        used_at = _used_at(equation)
        found[text if used_at is None else f"{text}, used at {used_at}"] = None
    return tuple(found)


def check_exportable(traced: jax.stages.Traced, *, where: str) -> None:
    """Checks that the function can be written to a file: as an export, an executable or a SavedModel.

    Raises:
      ModelError: it calls back into Python, which no file can hold; every call is listed.
    """
    if found := callbacks(traced):
        raise ModelError(
            "the function calls back into Python, and Python cannot be serialized",
            where=where,
            seen="; ".join(found),
            expected="operations of JAX only",
            remedy="remove the callback or do its work before or after the call; the jit target can serve it as it is",
        )


def _arrays(closed: ClosedJaxpr) -> Iterator[tuple[Any, str | None]]:
    """Constants of a jaxpr and of those inside it, with the place of their first use."""
    jaxpr = closed.jaxpr
    users: dict[Any, JaxprEqn] = {}
    for equation in jaxpr.eqns:
        for operand in equation.invars:
            if isinstance(operand, Literal):
                if np.ndim(operand.val) > 0:
                    yield operand.val, _used_at(equation)
            else:
                users.setdefault(operand, equation)
    for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            yield value, _used_at(users[variable]) if variable in users else None
    for equation in jaxpr.eqns:
        for inner in _inner(equation):
            yield from _arrays(inner)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner.jaxpr)


def _inner(equation: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """The jaxprs among an equation's parameters: bodies of loops, branches, nested functions."""

    def search(value: Any) -> Iterator[ClosedJaxpr]:
        if isinstance(value, ClosedJaxpr):
            yield value
        elif isinstance(value, Jaxpr):
            yield ClosedJaxpr(value, [None] * len(value.constvars))
        elif isinstance(value, tuple | list):
            for each in value:
                yield from search(each)

    for value in equation.params.values():
        yield from search(value)


def _used_at(equation: JaxprEqn) -> str | None:
    """Where the user's code made this equation: the innermost frame that is neither JAX, a model library nor servax."""
    traceback = getattr(equation.source_info, "traceback", None)
    if traceback is None:
        return None
    for frame in traceback.frames:
        name = str(frame.file_name)
        if not name.startswith("<") and not any(part in name for part in _LIBRARIES):
            return f"{os.path.basename(name)}:{frame.line_num} ({frame.function_name})"
    return None


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (
    *(os.path.join("site-packages", name, "") for name in ("jax", "jaxlib", "flax", "equinox")),
    *(os.path.join(_PACKAGE, room, "") for room in ("model", "stages", "targets", "workflow", "api")),
)


def _equal_parameter(value: Any, leaves: Sequence[tuple[tuple[str, ...], Any]]) -> str | None:
    content: Any = None
    for path, leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.shape != value.shape or leaf.dtype != value.dtype:
            continue
        if content is None:
            content = _raw(value)
        if np.array_equal(content, _raw(leaf)):
            return path_text(path)
    return None


def _raw(array: Any) -> np.ndarray[Any, Any]:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bytes(value: Any) -> int:
    return math.prod(value.shape) * int(value.dtype.itemsize)


def _is_floating(dtype: str) -> bool:
    return "float" in dtype or dtype.startswith("complex")
