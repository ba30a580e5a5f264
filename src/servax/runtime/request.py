"""A request and its result, free of any wire format."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def new_id() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a client wants computed.

    Attributes:
      function: name of the function.
      tensors: by input name; NumPy arrays, lists, or rows of different length; lists of str for a processor.
      id: the client's id; None: nobody has asked for one. `new_id` makes one where it is needed, on the wire.
      deadline: on `time.monotonic`'s clock, in seconds; None: no deadline.
      priority: higher runs earlier.
      owned: nobody writes to the tensors until the answer is there, so they need not be copied.
    """

    function: str
    tensors: Mapping[str, Any]
    id: str | None = None
    deadline: float | None = None
    priority: int = 0
    owned: bool = False


@dataclass(frozen=True, slots=True)
class InferResult:
    """What the function gave.

    Attributes:
      tensors: by output name, in the order of the signature; cut to the request's own sizes.
      bucket: label of the bucket that ran.
      times: seconds by step: `queue`, `pad`, `transfer`, `execute`, `copy`.
      version: of the servable that answered; empty where it is not known.
    """

    tensors: Mapping[str, np.ndarray[Any, Any]]
    bucket: str
    times: Mapping[str, float] = field(default_factory=dict[str, float])
    version: str = ""
