"""Tokens become text as they come: no character is split, and what could begin a stop string is held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from servax.generation.sequence import Finish, Token

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text; special tokens are left out."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED = 3
"""Replacement characters at the end of a text that may still become a character: UTF-8 has at most four bytes for one,
and a decoder shows one replacement for all that are there, or one for each."""

_WINDOW = 4
"""Tokens after which decoding starts from a later one: what is decoded again each time stays this short."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown, with the tokens it came of.

    Attributes:
      text: may be empty, of tokens that show nothing.
      tokens: each with where its text begins in the whole answer, in characters, and its own part of it; the parts of
        all tokens of an answer, joined, are its text.
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
        self._ids: list[int] = []  # from where decoding starts
        self._text = ""  # theirs
        self._given = 0  # characters of it that were given
        self._mark = (
            0  # how many of the ids ended with a whole character, the last time decoding could have started there
        )

    @property
    def pending(self) -> bool:
        """Whether text is kept back."""
        return len(self._text) > self._given

    def add(self, token: int) -> str:
        """The text that a token completes."""
        self._ids.append(token)
        self._text = self._decode(self._ids)
        steady = len(self._text)
        while steady > max(len(self._text) - _UNFINISHED, 0) and self._text[steady - 1] == _BROKEN:
            steady -= 1
        fresh = self._text[self._given : steady]
        self._given = max(self._given, steady)
        if steady == len(self._text) and len(self._ids) - self._mark >= _WINDOW:
            self._move_on()
        return fresh

    def flush(self) -> str:
        """The text of what was kept back."""
        rest = self._text[self._given :]
        self._given = len(self._text)
        return rest

    def _move_on(self) -> None:
        """Starts decoding at the mark, and marks the present end.

        The ids after the mark must show something: decoders take a space away at the beginning of a text, and what
        comes next is no beginning.
        """
        later = self._ids[self._mark :]
        text = self._decode(later)
        if text:
            self._ids, self._text, self._given, self._mark = later, text, len(text), len(later)


class TextStream:
    """The text of one answer as it grows, whole or streamed: the one path from tokens to text.

    The answer ends before the stop string that is the first to be complete; of several that are at once, before the
    longest.

    Args:
      decode: of the tokenizer.
      stop: texts that end the answer.

    Attributes:
      count: tokens that were taken in, those of the stop string included.
      stopped: whether a stop string was found; what follows it is dropped.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = tuple(stop)
        self._held = ""
        self._tokens: deque[tuple[Token, int, str]] = deque()
        self._shown = 0
        self.count = 0
        self.stopped = False

    def add(self, tokens: Iterable[Token], finish: Finish | None = None) -> Piece:
        """What may be shown after these tokens; all that is left, if the answer is over."""
        parts: list[Piece] = []
        for token in tokens:
            if self.stopped:
                break
            self.count += 1
            text = self._detokenizer.add(token.id)
            self._tokens.append((token, self._shown + len(self._held), text))
            self._held += text
            parts.append(self._release())
        if finish is not None and not self.stopped:
            rest = self._detokenizer.flush()
            if self._tokens:
                token, start, text = self._tokens.pop()
                self._tokens.append((token, start, text + rest))
            self._held += rest
            parts.append(self._release(last=True))
        return Piece("".join(part.text for part in parts), tuple(each for part in parts for each in part.tokens))

    def _release(self, *, last: bool = False) -> Piece:
        """What is held back and can no longer be part of a stop string."""
        found = [(index + len(text), index) for text in self._stop if (index := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)[1]]
        over = last or self.stopped
        text = self._held if over else self._held[: len(self._held) - self._suspicious()]
        self._held = self._held[len(text) :]
        self._shown += len(text)
        return Piece(text, tuple(self._rest() if over else self._complete()))

    def _complete(self) -> Iterable[tuple[Token, int, str]]:
        """Tokens all of whose text is shown; one without text of its own goes with the text after it."""
        while self._tokens:
            _, start, own = self._tokens[0]
            if start >= self._shown or start + len(own) > self._shown:
                return
            if len(self._tokens) == 1 and self._detokenizer.pending:
                return  # its last character is not there yet
            yield self._tokens.popleft()

    def _rest(self) -> Iterable[tuple[Token, int, str]]:
        """The last tokens: without those of a stop string."""
        for token, start, own in self._tokens:
            if start < self._shown or not self.stopped:
                yield token, start, own[: self._shown - start]
        self._tokens.clear()

    def _suspicious(self) -> int:
        """Characters at the end that may begin a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - count :]
            if any(text.startswith(tail) for text in self._stop):
                return count
        return 0
