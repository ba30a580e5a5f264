"""Processors: host-side decoding around a function, declared as data and never as code.

The set is closed: a bundle carries the declaration and the files it names, no Python. Numeric work belongs into the
traced function, anything else into the user's own service around `predict_async`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Text:
    """Text in, token ids out, by a Hugging Face `tokenizer.json`.

    Declared for the input that the program takes, e.g. `processors={"tokens": servax.Text("tokenizer.json",
    max_length=128)}`: requests may then carry `text` (`string[batch]`) in place of `tokens` (`int32[batch, length]`).

    Attributes:
      tokenizer: path of `tokenizer.json`; relative paths are read from the model's source folder.
      max_length: most tokens a row may have, special tokens counted; longer text is cut as the tokenizer does it.
      name: the name of the tensor with the text.
    """

    tokenizer: str | Path
    max_length: int
    name: str = "text"


Processor = Text
"""Every kind of processor; a union as kinds are added."""
