"""Tokens in, tokens out: the engine that serves language models, their sampling parameters, and their text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.generation.params import SamplingParams
    from servax.generation.servable import Answer, LanguageServable, Part, Usage

__all__ = ["Answer", "LanguageServable", "Part", "SamplingParams", "Usage"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Answer": "servable",
        "LanguageServable": "servable",
        "Part": "servable",
        "SamplingParams": "params",
        "Usage": "servable",
    },
)
