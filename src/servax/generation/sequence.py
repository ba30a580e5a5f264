"""A prompt on its way through the engine, and the tokens that come of it."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from servax.core.errors import ServaxError
from servax.generation.params import SamplingParams

if TYPE_CHECKING:
    import asyncio

    import numpy as np


class Finish(enum.StrEnum):
    """Why an answer ended; the words are the OpenAI API's, but for `abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer.

    Attributes:
      id: of the vocabulary.
      logprob: natural logarithm of its probability, by the model's own logits.
      top: alternatives with their log probabilities, likeliest first; empty where none were asked for.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step of the engine gave to one sequence.

    Attributes:
      tokens: new ones, in order.
      finish: why it ended; None while it goes on.
      error: why it failed; nothing follows.
    """

    tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    error: ServaxError | None = None


class Constraint(Protocol):
    """What an answer may consist of, token by token; used by the engine's thread alone."""

    def mask(self) -> np.ndarray[Any, Any]:
        """The tokens that may follow, uint32 `[vocabulary / 32]`, lowest bit first."""
        ...

    def accept(self, token: int) -> bool:
        """Takes a token in; True once the answer is complete."""
        ...


Receive = Callable[[Delta], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt with its parameters and what has come of it.

    Attributes:
      prompt: token ids, at least one.
      params: how the answer is drawn.
      receive: gets every delta: on `loop` where there is one, else on the engine's thread.
      loop: the event loop that `receive` runs on.
      constraint: None: any token may follow.
      priority: higher runs earlier.
      deadline: on `time.monotonic`'s clock; None: none.
      seed: what the noise is drawn from.
      came: when it came, on `time.perf_counter`'s clock.
      slot: the row of the cache it has; None while it waits.
      done: how many tokens of the prompt are in the cache.
      tokens: ids of the answer so far.
      finish: why it ended.
      reused: tokens of the prompt that were in the cache already.
      failed: whether it ended with an error.
      given_up: with what it is to end at the next step.
      over_now: called on the engine's thread when nothing follows.
      admitted, prefilled: when it got a slot, and when its prompt was in it.
      first, last: when its first and its latest token were read; None before.
    """

    prompt: Ids[int]
    params: SamplingParams
    receive: Receive
    loop: asyncio.AbstractEventLoop | None = None
    constraint: Constraint | None = None
    priority: int = 0
    deadline: float | None = None
    seed: int = 0
    came: float = field(default_factory=time.perf_counter)
    slot: int | None = None
    done: int = 0
    reused: int = 0
    tokens: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    failed: bool = False
    given_up: Finish | ServaxError | None = None
    over_now: Callable[[], None] | None = None
    admitted: float | None = None
    prefilled: float | None = None
    first: float | None = None
    last: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.failed

    def limit(self, context: int) -> int:
        """Most tokens of prompt and answer together."""
        most = self.params.max_tokens
        return context if most is None else min(context, len(self.prompt) + most)
