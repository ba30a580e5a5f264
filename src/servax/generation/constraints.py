"""What an answer must look like: a JSON schema, a regular expression or a choice, followed token by token.

Grammars are compiled by `llguidance` on threads of their own, within its bounds of size and a timeout; the engine's
thread only asks a compiled one which tokens may follow.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from servax.core.errors import InvalidInput, first_line
from servax.generation.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST = 256 * 1024
"""Most characters of a schema or a regular expression."""

SECONDS = 10.0
"""Most seconds that compiling one may take."""

_KEPT = 32
"""Compiled grammars that are kept for the next request with the same."""

_WORKERS = 2
_COMPLETE = frozenset({"NoExtension", "NoExtensionBias", "EndOfSentence"})
_SEEN = 300


def json_grammar(schema: Mapping[str, Any], where: str = "response_format") -> str:
    """The grammar of JSON texts that a schema accepts, on one line as `json.dumps` writes them.

    Raises:
      InvalidInput: it is too long.
    """
    from llguidance import LLMatcher

    text = json.dumps(schema)
    _require_short(text, where)
    written: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return LLMatcher.grammar_from_json_schema(text, overrides=written)


def regex_grammar(pattern: str, where: str = "regex") -> str:
    """The grammar of texts that a regular expression matches as a whole.

    Raises:
      InvalidInput: it is too long.
    """
    from llguidance import LLMatcher

    _require_short(pattern, where)
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(texts: Sequence[str], where: str = "choice") -> str:
    """The grammar of these texts alone.

    Raises:
      InvalidInput: there are none, or they are too long.
    """
    from llguidance import LLMatcher

    if not texts or not all(texts):
        raise InvalidInput("there is nothing to choose from", where=where, seen=str(texts)[:_SEEN], expected="texts")
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    _require_short(alternatives, where)
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


class GrammarConstraint:
    """An answer on its way through a grammar; the engine's thread alone uses it.

    It raises nothing, whatever becomes of the library: that thread has other answers to give.

    Args:
      matcher: its own.
      words: of 32 tokens each, in a mask.
      closed: tokens that never follow, whatever the grammar: what the library takes for the end where a model has none.
    """

    def __init__(self, matcher: LLMatcher, words: int, closed: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._closed = closed
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        """Why the answer ended without being complete, where the grammar led to no end; None else."""
        return self._broken

    def mask(self) -> np.ndarray[Any, Any]:
        """The tokens that may follow, uint32 `[vocabulary / 32]`, lowest bit first; an end id only where it may end."""
        try:
            mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: self._words]
        except Exception as error:  # the library raises bare ones; any token may follow, and ends the answer
            self._broken = first_line(error)
            return np.full(self._words, 0xFFFFFFFF, np.uint32)
        if self._closed:
            mask = mask.copy()
            for token in self._closed:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
        return mask

    def accept(self, token: int) -> bool:
        """Takes a token in; True once the answer is complete."""
        if self._broken is not None:
            return True
        try:
            taken = self._matcher.consume_token(token)
            if taken and not self._matcher.is_stopped():
                return False
            reason = self._matcher.stop_reason()
        except Exception as error:
            self._broken = first_line(error)
            return True
        if not taken or reason not in _COMPLETE:
            self._broken = reason if taken else f"{reason}, at token {token}"
        return True


class Grammars:
    """Compiles grammars for one model's vocabulary; for any thread.

    Args:
      vocabulary: of the model.
      seconds: most that compiling one may take.
    """

    def __init__(self, vocabulary: Vocabulary, *, seconds: float = SECONDS) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="servax-grammar")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    async def constraint_async(self, grammar: str) -> GrammarConstraint:
        """As `constraint`, off the event loop.

        Raises:
          InvalidInput: as `constraint`; or compiling takes too long.
        """
        compiling = asyncio.wrap_future(self._workers.submit(self.constraint, grammar))
        try:
            return await asyncio.wait_for(compiling, self._seconds)
        except TimeoutError:
            raise InvalidInput(
                "the grammar takes too long to compile",
                where="response_format",
                seen=f"more than {self._seconds:g} s",
                remedy="make it simpler",
            ) from None

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A fresh constraint by a grammar of `json_grammar`, `regex_grammar` or `choice_grammar`.

        Raises:
          InvalidInput: it cannot be read, or no text meets it.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = matcher
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        closed = () if self._vocabulary.end else self._vocabulary.grammars.eos_tokens
        return GrammarConstraint(matcher.deep_copy(), -(-self._vocabulary.size // 32), closed)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary.grammars, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidInput(
                "the grammar cannot be followed",
                where="response_format",
                seen=matcher.get_error().partition("\n<state>")[0][:_SEEN],
                expected="a JSON schema or a regular expression that some text meets",
            )
        matcher.compute_bitmask()  # finds out whether anything may follow, and spares the first request the time
        if matcher.is_stopped() and not matcher.is_accepting():
            raise InvalidInput("no text meets the grammar", where="response_format", seen=matcher.stop_reason())
        return matcher


def _require_short(text: str, where: str) -> None:
    if len(text) > LONGEST:
        raise InvalidInput(
            "the grammar is too long", where=where, seen=f"{len(text)} characters", expected=f"at most {LONGEST}"
        )
