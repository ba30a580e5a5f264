"""Errors of a user's own code, told with the place in that code, the sizes it ran at and what to change."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Generator, Mapping
from os import sep
from pathlib import Path
from typing import Any

from servax.core.errors import ModelError, ServaxError

_HINTS: tuple[tuple[str, str, str], ...] = (
    (
        "TracerBoolConversionError",
        "",
        "A Python `if`, `while`, `and` or `assert` depends on the values of an array. Use jnp.where or jax.lax.cond, "
        "or decide by shapes, or pass the value with static=.",
    ),
    (
        "TracerIntegerConversionError",
        "",
        "A Python index or size depends on the values of an array. Index with jnp.take, or pass it with static=.",
    ),
    (
        "TracerArrayConversionError",
        "",
        "A NumPy function got a traced array. Use its jax.numpy counterpart.",
    ),
    (
        "NonConcreteBooleanIndexError",
        "",
        "A boolean mask as an index gives a size that depends on values. Use jnp.where with three arguments.",
    ),
    (
        "ConcretizationTypeError",
        "",
        "A size or a Python value depends on the values of an array. Parameters and plain array attributes are "
        "arguments, not constants: keep sizes in Python integers, or pass the value with static=.",
    ),
    (
        "UnexpectedTracerError",
        "",
        "An array made while tracing was kept (in a global, a cache, or an object that JAX does not know). "
        "Return it, or make it anew on each call.",
    ),
    (
        "InvalidRngError",
        "",
        'The module draws random numbers. Switch it to evaluation: static={"deterministic": True} where its call takes '
        "that, Net(deterministic=True) where the module does. Or take seed: uint32[batch] and make a key of it.",
    ),
    (
        "ModifyScopeVariableError",
        "",
        "The module updates a variable, as train-mode BatchNorm and a decoding cache do. Switch it to evaluation: "
        'static={"use_running_average": True} or {"train": False} where its call takes that, Net(train=False) where '
        "the module does. A cache is state: Model(..., state={...}) and a function with stateful=True.",
    ),
    (
        "ScopeParamShapeError",
        "",
        "The parameters do not fit the input. Compare the fixed dimensions of the spec with the module's sizes.",
    ),
    (
        "ScopeCollectionNotFound",
        "",
        "The checkpoint lacks a collection of variables. Select the subtree that holds every collection.",
    ),
    (
        "NameError",
        "unbound axis name",
        "A layer averages over the batch (train-mode BatchNorm). Switch it to inference; Equinox layers with an "
        "axis_name run under vmap=True.",
    ),
    (
        "TypeError",
        "unexpected keyword argument",
        "Inputs are passed by their names: the names in inputs= must be the function's own.",
    ),
    (
        "TypeError",
        "incompatible shapes",
        "Shapes do not fit together. Compare the specs of the inputs with what the function expects; with vmap=True "
        "it gets one example, without the batch axis.",
    ),
    (
        "TypeError",
        "dot_general requires",
        "Shapes do not fit together. Compare the specs of the inputs with what the function expects; with vmap=True "
        "it gets one example, without the batch axis.",
    ),
    (
        "ValueError",
        "ncompatible shapes",
        "Shapes do not fit together. Compare the specs of the inputs, and the largest bucket, with what the function "
        "expects (a position table limits the length).",
    ),
    (
        "TypeError",
        "cannot reshape",
        "A reshape does not fit this size. Reshape by the sizes of the array at hand rather than by fixed numbers.",
    ),
)


@contextlib.contextmanager
def explained(function: str, sizes: Mapping[str, Any]) -> Generator[None]:
    """Turns what a user's function raises into a `ModelError` that names the function and the sizes it ran at."""
    try:
        yield
    except ServaxError:
        raise
    except (Exception, SystemExit) as error:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ModelError(
            f"function {function!r} raised {type(error).__name__}" + (f" at {at}" if at else ""),
            where=location(error),
            seen=first_lines(error),
            remedy=hint(error),
        ) from error


def hint(error: BaseException) -> str | None:
    """What to change, for the kinds of error that users meet most."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    for name, part, advice in _HINTS:
        if name in names and part in text:
            return advice
    return None


def location(error: BaseException) -> str | None:
    """File, line and source line where the error left the user's code, rather than a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not own:
        return None
    frame = own[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{line}"


def first_lines(error: BaseException, count: int = 3) -> str:
    """The error's own words, as far as a person reads them: JAX's long explanations end after the first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]) if lines else type(error).__name__


def _is_library(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return True
    path = str(Path(filename).resolve())
    in_package = any(f"{sep}{name}{sep}" in path for name in _LIBRARIES)
    return (
        (in_package and "site-packages" in path)
        or (path.startswith(_STANDARD) and "site-packages" not in path)
        or (path.startswith(_OWN) and not path.startswith(f"{_OWN}{sep}zoo"))
    )


_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "numpy")
_STANDARD = str(Path(sysconfig.get_path("stdlib")).resolve())
_OWN = str(Path(__file__).resolve().parents[1])
