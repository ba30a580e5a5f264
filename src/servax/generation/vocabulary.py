"""The tokens of a model as bytes, and the grammar library's view of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from servax.core.errors import InvalidInput, first_line
from servax.generation.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """What each token of a model stands for; for any thread.

    Args:
      tokenizer: of the model.
      size: number of token ids; the model may have more than its tokenizer.
      end: ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end: Sequence[int]) -> None:
        self.size = size
        self.end = tuple(end)
        self._tokenizer = tokenizer
        self._loading = threading.Lock()

    def load(self) -> None:
        """Reads every token, once: some tenths of a second for a large vocabulary."""
        with self._loading:
            _ = self._found

    def bytes(self, token: int) -> bytes:
        """What a token adds to a text; of a special one, its name."""
        if not 0 <= token < self.size:
            return b""
        self.load()
        if isinstance(self._found, str):
            return self._tokenizer.text(token).encode()
        return self._found.decode_bytes([token])

    @property
    def grammars(self) -> LLTokenizer:
        """For compiling grammars.

        Raises:
          InvalidInput: the tokenizer's tokens are no bytes, so that no grammar can be followed.
        """
        self.load()
        if isinstance(self._found, str):
            raise InvalidInput(
                "this model's tokenizer cannot follow a grammar",
                where="response_format",
                seen=self._found,
                expected="a byte-level tokenizer, or one with byte fallback",
            )
        return self._found

    @functools.cached_property
    def _found(self) -> LLTokenizer | str:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._tokenizer.definition, n_vocab=self.size, eos_token=list(self.end) or None)
        except Exception as error:  # the library raises bare ValueError, and more
            return first_line(error)
