"""A model's `tokenizer.json`: text <-> token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from servax.core.errors import StartupError


class Tokenizer:
    """Text to token ids and back, by Hugging Face's `tokenizers`; for any thread.

    Args:
      source: path of `tokenizer.json`, or its text.

    Raises:
      StartupError: it cannot be read.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        from tokenizers import Tokenizer as Library

        text = source if isinstance(source, str) and source.lstrip().startswith("{") else None
        try:
            self._library = Library.from_str(Path(source).read_text(encoding="utf-8") if text is None else text)
        except Exception as error:  # the library raises bare Exception
            where = os.fspath(source) if text is None else "tokenizer.json"
            raise StartupError("the tokenizer cannot be read", where=where, seen=str(error)) from error
        self._library.no_truncation()
        self._library.no_padding()

    @property
    def definition(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._library.to_str()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; `special` adds what the tokenizer puts around one (a rendered chat has it already)."""
        return self._library.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def text(self, token: int) -> str:
        """One id as text, special tokens too; what is no whole character shows as replacement characters."""
        return self._library.decode([token], skip_special_tokens=False)
