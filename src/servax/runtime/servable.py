"""What can be called: a servable, in this process or behind a URL."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from servax.core.tensors import Signature
from servax.runtime.request import InferRequest, InferResult

if TYPE_CHECKING:
    from servax.runtime.swap import SwapReport

Outputs = Mapping[str, np.ndarray[Any, Any]]
"""Arrays by output name, cut to the request's own sizes; they belong to the caller."""


class State(enum.StrEnum):
    """The life of a servable: `LOADING -> WARMING -> READY -> DRAINING -> UNLOADED`, or `FAILED` at any point."""

    LOADING = "LOADING"
    WARMING = "WARMING"
    READY = "READY"
    DRAINING = "DRAINING"
    UNLOADED = "UNLOADED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far warming is.

    Attributes:
      done: programs that have run, as `function@bucket`.
      left: programs that have not.
    """

    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Servable(Protocol):
    """A loaded model or bundle, or a model behind a URL.

    Attributes:
      name: the name it is served under.
      version: its version as text; `"1"` where nothing else is known.
      platform: the wrapper's name on the wire: `jax_jit`, `jax_executable`, `jax_stablehlo`.
      signatures: by function name; without what processors add.
      texts: by function name, the text tensors that a request may carry, each with the input it is turned into.
      state: where in its life it is.
      reason: why it failed; None otherwise.
      progress: how far warming is.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def signatures(self) -> Mapping[str, Signature]: ...
    @property
    def texts(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def state(self) -> State: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def stages(self) -> Any: ...
    @property
    def app(self) -> Any:
        """An ASGI application that serves this alone; UsageError where there is none to have."""
        ...

    def predict(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        """Calls a function: `predict`, or the only one, unless named."""
        ...

    async def predict_async(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        """As `predict`; cancelling it takes the request out of the queue."""
        ...

    def infer(self, request: InferRequest) -> InferResult:
        """Answers one request; blocks."""
        ...

    async def infer_async(self, request: InferRequest) -> InferResult:
        """As `infer`; cancelling it takes the request out of the queue."""
        ...

    def swap(self, checkpoint: str | os.PathLike[str], **options: Any) -> SwapReport:
        """Takes the parameters of another checkpoint, with no compilation; UsageError where that is not possible."""
        ...

    def close(self) -> None:
        """Lets requests in flight finish, refuses new ones, and frees what it holds."""
        ...

    def __getattr__(self, name: str) -> Callable[..., Outputs]:
        """`servable.embed(...)` calls the function `embed`."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


def default_function(name: str | None, signatures: Mapping[str, Signature]) -> str:
    """The function that a call without a name means: `predict`, or the only one there is."""
    if name is not None:
        return name
    return next(iter(signatures)) if len(signatures) == 1 else "predict"


def no_attribute(servable: object, name: str, functions: Iterable[str]) -> AttributeError:
    """The error for an attribute that is neither the servable's nor a function of its model."""
    return AttributeError(
        f"{type(servable).__name__} has no attribute {name!r}, and its model no such function; "
        f"there are: {', '.join(sorted(functions))}",
        name=name,
        obj=servable,
    )


def flat_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs by their names on the wire: nested dictionaries are joined by dots (`image={"left": x}`: `image.left`)."""
    flat: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{rest}": leaf for rest, leaf in flat_inputs(value).items()}
        else:
            flat[name] = value
    return flat
