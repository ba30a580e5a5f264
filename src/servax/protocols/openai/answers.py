"""Answers to prompts on the wire: what completions and chat have in common, whole and streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from servax.generation.sequence import Finish, Token
from servax.generation.servable import Part
from servax.generation.vocabulary import Vocabulary
from servax.protocols.openai.generation import Work

Message = dict[str, Any]
Tokens = Sequence[tuple[Token, int, str]]
"""Tokens, each with where its text begins in the answer and its own part of it."""

DONE = b"data: [DONE]\n\n"

_LEAST = -9999.0
"""What the OpenAI API gives for the logarithm of a probability that is hardly there; JSON has no minus infinity."""


def event(message: Message) -> bytes:
    """A message as a server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(message)


@dataclass(frozen=True, slots=True)
class Head:
    """What every message of an answer begins with."""

    id: str
    created: int
    model: str

    @classmethod
    def fresh(cls, prefix: str, model: str) -> Head:
        """With a new id."""
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)

    def message(self, kind: str, choices: Sequence[Message], **rest: Any) -> Message:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **rest,
        }


class Form(Protocol):
    """How an API words answers."""

    def chunks(self, number: int, part: Part) -> list[Message]:
        """The choices of the events that tell a part; none for one that shows nothing."""
        ...

    def whole(self, number: int, answer: Collected) -> Message:
        """The choice of a whole answer."""
        ...

    @property
    def kinds(self) -> tuple[str, str]:
        """Names of the object, whole and streamed."""
        ...


@dataclass(slots=True)
class Collected:
    """One answer, whole.

    Attributes:
      texts: of its parts.
      tokens: all of them.
      finish: why it ended.
    """

    texts: list[str] = field(default_factory=list[str])
    tokens: list[tuple[Token, int, str]] = field(default_factory=list[tuple[Token, int, str]])
    finish: Finish | None = None

    def add(self, part: Part) -> None:
        self.texts.append(part.text)
        self.tokens += part.tokens
        self.finish = part.finish


class Bill:
    """Tokens that a request cost so far; a prompt counts once, however many answers it has."""

    def __init__(self, work: Work) -> None:
        self._choices = work.choices
        self._prompt = sum(map(len, work.prompts))
        self._answers = [0] * (len(work.prompts) * work.choices)
        self._reused = [0] * len(work.prompts)

    def note(self, number: int, part: Part) -> None:
        self._answers[number] = part.usage.answer
        if number % self._choices == 0:
            self._reused[number // self._choices] = part.usage.reused

    def usage(self) -> Message:
        answers = sum(self._answers)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": answers,
            "total_tokens": self._prompt + answers,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused)},
        }


class Shown:
    """Tokens as log probabilities show them.

    Args:
      work: whose answers they are of.
      vocabulary: None: tokens have no text.
    """

    def __init__(self, work: Work, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._ends = frozenset((*work.servable.spec.end, *work.params.stop_token_ids))

    def content(self, tokens: Tokens, finish: Finish | None) -> Tokens:
        """The tokens without the one that ended the answer, which is no part of it."""
        if finish is Finish.STOP and tokens and tokens[-1][0].id in self._ends and not tokens[-1][2]:
            return tokens[:-1]
        return tokens

    def bytes(self, token: int) -> bytes:
        return b"" if self._vocabulary is None else self._vocabulary.bytes(token)

    def text(self, token: int) -> str:
        return self.bytes(token).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """A log probability as JSON has numbers."""
    return max(logprob, _LEAST)
