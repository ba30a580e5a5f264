"""Modules and functions of users as `Model`s: named, pure functions over canonical parameters, with signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core import lazy

if TYPE_CHECKING:
    from servax.model.digest import source_digest
    from servax.model.function import Function
    from servax.model.model import Model
    from servax.model.outputs import infer_outputs
    from servax.model.processors import Processor, Text
    from servax.model.reference import find_reference, load_model

__all__ = [
    "Function",
    "Model",
    "Processor",
    "Text",
    "find_reference",
    "infer_outputs",
    "load_model",
    "source_digest",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "Function": "function",
        "Model": "model",
        "Processor": "processors",
        "Text": "processors",
        "find_reference": "reference",
        "infer_outputs": "outputs",
        "load_model": "reference",
        "source_digest": "digest",
    },
)
