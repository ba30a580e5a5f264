"""Parameters of a request: plain values in JSON, messages in gRPC."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from servax.core.errors import InvalidInput
from servax.protocols.wording import short

_NAMES = ("function", "priority", "timeout")
_LONGEST = 1 << 63


class Choices(NamedTuple):
    """What a request says beside its tensors.

    Attributes:
      function: of the model; None: its default.
      priority: higher runs earlier.
      deadline: on `time.monotonic`'s clock, in seconds; None: no deadline.
    """

    function: str | None = None
    priority: int = 0
    deadline: float | None = None


def read_choices(parameters: Any, deadline: float | None) -> Choices:
    """As `choices_of`, of a map of gRPC's InferParameter."""
    if not parameters:
        return Choices(None, 0, deadline)
    return choices_of({name: value_of(parameters[name]) for name in _NAMES if name in parameters}, deadline)


def choices_of(parameters: Mapping[str, Any] | None, deadline: float | None, priority: int = 0) -> Choices:
    """The parameters `function`, `priority` and `timeout` (microseconds); others are passed over.

    Args:
      parameters: of the request, by name.
      deadline: of the call; the request's own may be earlier.
      priority: where the request has none of its own.

    Raises:
      InvalidInput: a parameter is of another kind.
    """
    if not parameters:
        return Choices(None, priority, deadline)
    timeout = _read(parameters, "timeout", int, "microseconds, an integer above 0")
    if timeout is not None:
        if not 0 < timeout <= _LONGEST:
            raise _wrong("timeout", str(timeout), "microseconds, an integer above 0")
        ends = time.monotonic() + timeout / 1e6
        deadline = ends if deadline is None else min(deadline, ends)
    own = _read(parameters, "priority", int, "an integer; higher runs earlier")
    return Choices(_read(parameters, "function", str, "a string"), priority if own is None else own, deadline)


def value_of(parameter: Any) -> Any:
    """The Python value of a parameter message; None where it is empty."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _read(parameters: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    if name not in parameters:
        return None
    value = parameters[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _wrong(name, "nothing" if value is None else f"a {type(value).__name__}", expected)
    return value


def _wrong(name: str, seen: str, expected: str) -> InvalidInput:
    what = "the function is not a name" if name == "function" else f"the parameter {name!r} cannot be read"
    return InvalidInput(what, where=f"parameters.{name}", seen=short(seen), expected=expected)
