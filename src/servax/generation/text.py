"""Tokens become text as they come: no character is split, and what could begin a stop string is held back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from servax.generation.sequence import Finish, Token

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text; special tokens are left out."""

_BROKEN = "�"
_LONGEST_CHARACTER = 4
"""Tokens after which an undecodable byte is taken for what it is: UTF-8 has at most four bytes a character."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown, with the tokens it came of.

    Attributes:
      text: may be empty, of tokens that show nothing.
      tokens: each with where its text begins in the whole answer, in characters, and its own part of it.
    """

    text: str
    tokens: tuple[tuple[Token, int, str], ...]


class Detokenizer:
    """The text of token ids, in parts whose concatenation is the text of all of them.

    A token's text depends on those before it, so a few of them are decoded again each time; what ends in the middle of
    a character is kept back until the rest of it is there, or `flush`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # ids whose text has been given
        self._context = 0  # ids from which decoding starts, so that spaces come out as in the whole

    def add(self, token: int) -> str:
        """The text that a token completes."""
        self._ids.append(token)
        text = self._fresh()
        if text.endswith(_BROKEN) and len(self._ids) - self._shown < _LONGEST_CHARACTER:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """The text of what was kept back."""
        text = self._fresh()
        self._context = self._shown = len(self._ids)
        return text

    def _fresh(self) -> str:
        before = self._decode(self._ids[self._context : self._shown])
        return self._decode(self._ids[self._context :])[len(before) :]


class TextStream:
    """The text of one answer as it grows, whole or streamed: the one path from tokens to text.

    Args:
      decode: of the tokenizer.
      stop: texts that end the answer.

    Attributes:
      text: all that may be shown so far.
      stopped: whether a stop string was found; what follows it is dropped.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = tuple(stop)
        self._held = ""
        self._tokens: list[tuple[Token, str]] = []
        self.text = ""
        self.stopped = False

    def add(self, tokens: Iterable[Token], finish: Finish | None = None) -> Piece:
        """What may be shown after these tokens; all that is left, if the answer is over."""
        parts: list[Piece] = []
        for token in tokens:
            if self.stopped:
                break
            text = self._detokenizer.add(token.id)
            self._tokens.append((token, text))
            self._held += text
            parts.append(self._release())
        if finish is not None and not self.stopped:
            self._held += (rest := self._detokenizer.flush())
            if rest and self._tokens:
                token, text = self._tokens[-1]
                self._tokens[-1] = (token, text + rest)
            parts.append(self._release(last=True))
        return Piece("".join(part.text for part in parts), tuple(each for part in parts for each in part.tokens))

    def _release(self, *, last: bool = False) -> Piece:
        """What is held back and can no longer be part of a stop string."""
        found = [index for text in self._stop if (index := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            last = True
        kept = 0 if last else self._suspicious()
        text = self._held[: len(self._held) - kept]
        self._held = self._held[len(text) :]
        start, end = len(self.text), len(self.text) + len(text)
        self.text += text
        given: list[tuple[Token, int, str]] = []
        while self._tokens and (last or start + len(self._tokens[0][1]) <= end):
            token, own = self._tokens.pop(0)
            if last and start >= end and own:
                continue  # of the stop string or beyond
            given.append((token, start, own))
            start += len(own)
        if self._tokens and start < end:  # a token whose text is shown in part: the rest is held
            token, own = self._tokens[0]
            self._tokens[0] = (token, own[end - start :])
        return Piece(text, tuple(given))

    def _suspicious(self) -> int:
        """Characters at the end that may begin a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - count :]
            if any(text.startswith(tail) for text in self._stop):
                return count
        return 0
