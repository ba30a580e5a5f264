"""A language model in this process: a servable whose functions the engine calls, and which answers with text."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

from servax.core.errors import ServaxError, UsageError
from servax.generation.constraints import Grammars
from servax.generation.engine import Engine, EngineLimits
from servax.generation.params import SamplingParams
from servax.generation.programs import Programs
from servax.generation.sequence import Constraint, Delta, Finish, Sequence, Token
from servax.generation.template import ChatTemplate
from servax.generation.text import TextStream
from servax.generation.tokenizer import Tokenizer
from servax.generation.vocabulary import Vocabulary
from servax.model.language import LanguageSpec
from servax.runtime.local import LocalServable
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import State


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request cost.

    Attributes:
      prompt: of the prompt.
      reused: of these, how many were in the cache already.
      answer: of the answer.
    """

    prompt: int
    reused: int
    answer: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer.

    Attributes:
      text: what is new.
      tokens: new ones, each with where its text begins in the answer, in characters, and its own part of it.
      finish: why the answer ended; None while it goes on.
      usage: so far.
    """

    text: str
    tokens: tuple[tuple[Token, int, str], ...]
    finish: Finish | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; the fields of its parts, joined."""

    text: str
    tokens: tuple[tuple[Token, int, str], ...]
    finish: Finish
    usage: Usage


class LanguageServable(LocalServable):
    """A `LocalServable` over the functions of a `LanguageModel`; other arguments are those of `LocalServable`.

    Args:
      spec: of the model.
      tokenizer: None: prompts are token ids, and answers have no text.
      template: None: there is no chat.
      limits: what may wait for a slot.
      overlap: whether a burst is called before the one before it is read.
    """

    def __init__(
        self,
        name: str,
        *,
        spec: LanguageSpec,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        limits: EngineLimits | None = None,
        overlap: bool = True,
        **local: Any,
    ) -> None:
        super().__init__(name, **local)
        self.spec = spec
        self.tokenizer = tokenizer
        self.template = template
        self.vocabulary = None if tokenizer is None else Vocabulary(tokenizer, spec.vocabulary, spec.end)
        self.grammars = None if self.vocabulary is None else Grammars(self.vocabulary)
        self._turns = _Turns(self._executor.queue)
        self.engine = Engine(
            name,
            spec,
            Programs(self._runner, spec, self.signatures, self.grid),
            limits or EngineLimits(),
            self._turns.wake,
            overlap=overlap,
        )
        self._turns.engine = self.engine
        self._executor.queue.join(self._turns)

    def infer(self, request: InferRequest) -> InferResult:
        raise self._no_function()

    async def infer_async(self, request: InferRequest) -> InferResult:
        raise self._no_function()

    async def stream(
        self,
        prompt: str | Ids[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        constraint: Constraint | None = None,
    ) -> AsyncGenerator[Part]:
        """The answer to a prompt, part by part; closing the iterator, or cancelling who reads it, ends it.

        Raises:
          InvalidInput, TooLarge, Overloaded, NotReady: before the first part, and nothing was queued.
          ExecutionError: the device failed meanwhile.
        """
        received: asyncio.Queue[Delta] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        sequence = Sequence(
            self._ids(prompt),
            params,
            received.put_nowait,
            loop,
            constraint=constraint,
            priority=priority,
            deadline=deadline,
        )
        text = TextStream(self._decoder(), params.stop)
        self._submit_sequence(sequence)
        try:
            while True:
                part = self._part(sequence, text, await received.get())
                yield part
                if part.finish is not None:
                    return
        finally:
            self.engine.abort(sequence)

    def generate(self, prompt: str | Ids[int], params: SamplingParams | None = None, **sampling: Any) -> Answer:
        """The whole answer to a prompt; `sampling` are fields of `SamplingParams`. Blocks."""
        return _joined(self.parts(prompt, params or SamplingParams(**sampling)))

    def parts(
        self, prompt: str | Ids[int], params: SamplingParams, *, constraint: Constraint | None = None
    ) -> Generator[Part]:
        """As `stream`, for a thread that may block."""
        received: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        sequence = Sequence(self._ids(prompt), params, received.put, constraint=constraint)
        text = TextStream(self._decoder(), params.stop)
        self._submit_sequence(sequence)
        try:
            while True:
                part = self._part(sequence, text, received.get())
                yield part
                if part.finish is not None:
                    return
        finally:
            self.engine.abort(sequence)

    def chat(self, messages: Ids[Mapping[str, Any]], params: SamplingParams | None = None, **sampling: Any) -> Answer:
        """The whole answer to a conversation, `{"role": ..., "content": ...}` each; as `generate`."""
        return self.generate(self.render(messages), params, **sampling)

    def render(self, messages: Ids[Mapping[str, Any]], **extra: Any) -> list[int]:
        """The prompt of a conversation.

        Raises:
          UsageError: the model has no chat template.
          InvalidInput: the template refuses the messages.
        """
        if self.template is None or self.tokenizer is None:
            raise UsageError(
                f"{self.name} has no chat template", remedy="send a prompt, or build it with a tokenizer and a template"
            )
        return self.tokenizer.encode(self.template.render(messages, **extra))

    def close(self, timeout: float | None = None) -> None:
        self.drain(timeout)
        if self.state is not State.UNLOADED:
            self._executor.queue.leave(self._turns)
            self.engine.close()
        super().close(timeout)

    def _ids(self, prompt: str | Ids[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise UsageError(f"{self.name} has no tokenizer", remedy="send the prompt as token ids")
        return tuple(self.tokenizer.encode(prompt, special=True))

    def _submit_sequence(self, sequence: Sequence) -> None:
        accepted = _Accepted(self.engine, sequence)
        self._lifecycle.admit(accepted)
        sequence.over_now = lambda: self._lifecycle.release(accepted)
        try:
            self.engine.submit(sequence)
        except ServaxError:
            self._lifecycle.release(accepted)
            raise

    def _decoder(self) -> Any:
        return self.tokenizer.decode if self.tokenizer is not None else (lambda ids: "")

    def _part(self, sequence: Sequence, text: TextStream, delta: Delta) -> Part:
        if delta.error is not None:
            raise delta.error
        piece = text.add(delta.tokens, delta.finish)
        finish = delta.finish
        if text.stopped and finish is None:
            self.engine.abort(sequence, Finish.STOP)
        if text.stopped:
            finish = Finish.STOP
        return Part(piece.text, piece.tokens, finish, Usage(len(sequence.prompt), sequence.reused, text.count))

    def _no_function(self) -> UsageError:
        return UsageError(
            f"{self.name} is a language model: its functions are its engine's",
            remedy="POST /v1/chat/completions or /v1/completions; in Python: servable.generate, chat, stream",
        )


class _Turns:
    """The engine's share of the device: one step a turn."""

    def __init__(self, waiting: Any) -> None:
        self.used = 0.0
        self.engine: Engine | None = None
        self._queue = waiting

    def wake(self) -> None:
        with self._queue.lock:
            self._queue.require_open()
            self._queue.wake(self)

    def next(self, now: float) -> Any:
        return self if self.engine is not None and self.engine.busy else None

    def ahead(self, now: float) -> None:
        """No step is known before the one that runs is done."""

    def begin(self) -> bool:
        return True

    def prepare(self) -> None:
        """Nothing can be done ahead."""

    def run(self, meanwhile: Callable[[], None] | None) -> None:
        assert self.engine is not None
        self.engine.step()

    def fail(self, error: ServaxError) -> None:
        if self.engine is not None:
            self.engine.close(error)

    def close(self) -> Ids[Any]:
        return (self,)

    def __len__(self) -> int:
        return 0 if self.engine is None else self.engine.status.waiting


class _Accepted:
    """A sequence as the servable's lifecycle sees it."""

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence

    def abandon(self, error: ServaxError) -> None:
        self._engine.give_up(self._sequence, error)


def _joined(parts: Iterator[Part]) -> Answer:
    collected = list(parts)
    last = collected[-1]
    assert last.finish is not None
    return Answer(
        "".join(part.text for part in collected),
        tuple(each for part in collected for each in part.tokens),
        last.finish,
        last.usage,
    )
