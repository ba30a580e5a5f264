"""What the model room asks of each kind of module, and the choice of the one that fits a source."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import numpy as np

from servax.core.errors import ModelError
from servax.core.trees import KeyPath, Tree
from servax.model.explain import first_lines, hint, location

Net = Any
"""What a user's function gets first: the live module, or the parameters of a plain function."""

NetFunction = Callable[..., Any]
"""`f(net, *arguments, **inputs)`, as users write it."""

EVALUATION_FLAGS: Mapping[str, bool] = {
    "train": False,
    "training": False,
    "is_training": False,
    "deterministic": True,
    "use_running_average": True,
    "inference": True,
}
"""Arguments by which modules are told to evaluate rather than to train."""


@dataclass(frozen=True, slots=True)
class Example:
    """A function with abstract arguments, by which Linen finds out what parameters a module has.

    Attributes:
      name: of the function.
      sizes: of its dimensions.
      arrays: abstract arguments, a pytree.
      call: `call(net, arrays)`.
    """

    name: str
    sizes: Mapping[str, int]
    arrays: Any
    call: Callable[[Net, Any], Any]


Examples = Callable[[], Sequence[Example]]
"""One example a function of the model; functions may be added at any time."""


class Adapter(Protocol):
    """One kind of module, seen as functions of canonical parameters.

    Attributes:
      kind: `nnx`, `linen`, `equinox` or `plain`.
      name: of the module's class, or of the function.
      signature: arguments of what the model's own function calls, whose names are the inputs' names; None where
        there is nothing to call.
      predict: the model's own function, `f(net, **inputs)`.
    """

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> inspect.Signature | None: ...
    @property
    def predict(self) -> NetFunction: ...

    def abstract(self) -> Tree | None:
        """Canonical parameters as `jax.ShapeDtypeStruct`s, made without allocating; None where nobody can know."""
        ...

    def defaults(self) -> dict[KeyPath, np.ndarray]:
        """Values of the arrays that a checkpoint may lack because the definition gives them."""
        ...

    def random(self) -> tuple[KeyPath, ...]:
        """Paths of RNG state, which a checkpoint may hold and which is no parameter."""
        ...

    def run(self, params: Tree, function: NetFunction, arguments: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """`function(net, *arguments, **inputs)` with a net made of `params`; traceable by JAX."""
        ...

    def canonical(self, live: Any) -> dict[str, Any]:
        """Canonical parameters of a live module, or of a pytree of parameters."""
        ...


def net_call(net: Net, /, **inputs: Any) -> Any:
    """The call of a module itself."""
    return net(**inputs)


def adapter_of(source: Any, *, params: Any, examples: Examples) -> Adapter:
    """The adapter for a module, for a factory that returns one, or for a plain function `f(params, **inputs)`.

    A factory is a callable without required arguments. It is called under abstract evaluation.

    Raises:
      ModelError: the source is none of these, or the factory raised.
    """
    if (adapter := _of_module(source, None, examples)) is not None:
        return adapter
    if not callable(source):
        raise ModelError(
            "the source of the model is neither a module nor a function",
            seen=_described(source),
            expected="a Flax NNX, Linen or Equinox module, a factory that returns one, or f(params, **inputs)",
        )
    if _needs_arguments(source):
        from servax.model.plain import PlainAdapter

        return PlainAdapter(source, params)
    made = _sample(source)
    if (adapter := _of_module(made, source, examples)) is not None:
        return adapter
    raise ModelError(
        "the factory returns no module",
        seen=_described(made),
        expected="a Flax NNX, Linen or Equinox module, or (Equinox module, State)",
        remedy="Return the module itself; a plain function takes its parameters first: f(params, **inputs).",
    )


def call_signature(function: Any, *, skip: int = 0) -> inspect.Signature | None:
    """Arguments of a callable without its first `skip`; None where it has none that Python could tell."""
    if not callable(function):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=list(signature.parameters.values())[skip:])


def _of_module(made: Any, factory: Callable[[], Any] | None, examples: Examples) -> Adapter | None:
    # A module can only exist once its library was imported, so nothing is imported to find out.
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(made, nnx.Module):
        from servax.model.nnx import NnxAdapter

        return NnxAdapter(made, factory)
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(made, linen.Module):
        from servax.model.linen import LinenAdapter

        # Linen modules hold no arrays until they are initialised: made again, outside abstract evaluation.
        return LinenAdapter(made if factory is None else factory(), examples)
    equinox = sys.modules.get("equinox")
    if equinox is not None:
        first = cast("Any", made[0]) if isinstance(made, tuple) and made else made
        if isinstance(first, equinox.Module):
            from servax.model.equinox import EquinoxAdapter

            return EquinoxAdapter(made, factory)
    return None


def _sample(factory: Callable[[], Any]) -> Any:
    """What the factory returns, its arrays abstract; only its type and its signature are of use."""
    made: list[Any] = []

    def build() -> None:
        with unsharded():
            made.append(factory())

    try:
        jax.eval_shape(build)
    except Exception as error:
        raise ModelError(
            f"the factory of the model raised {type(error).__name__}",
            where=location(error),
            seen=first_lines(error),
            remedy=hint(error) or "A factory is called without arguments, under jax.eval_shape.",
        ) from error
    return made[0]


def unsharded() -> contextlib.AbstractContextManager[Any]:
    """Lets Flax NNX make Variables with sharding annotations where there is no mesh; servax places arrays itself."""
    nnx = sys.modules.get("flax.nnx")
    return contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False)


def _needs_arguments(source: Callable[..., Any]) -> bool:
    signature = call_signature(source)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return signature is None or any(
        each.default is each.empty and each.kind not in variadic for each in signature.parameters.values()
    )


def _described(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" + (f" {text}" if len(text) < 60 else "")
