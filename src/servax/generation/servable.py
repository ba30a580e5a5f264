"""A language model in this process: a servable whose functions the engine calls, and which answers with text."""

from __future__ import annotations

import asyncio
import math
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

from servax.core.device import Device
from servax.core.errors import MemoryShortage, ServaxError, UsageError
from servax.core.events import RequestFailed, emit
from servax.core.table import bytes_text
from servax.core.tensors import TensorSpec
from servax.generation.constraints import Grammars
from servax.generation.engine import Engine
from servax.generation.entrance import EngineLimits
from servax.generation.params import SamplingParams
from servax.generation.programs import STATIC, Programs
from servax.generation.sequence import Constraint, Delta, Finish, Sequence, Token
from servax.generation.template import ChatTemplate
from servax.generation.text import TextStream
from servax.generation.tokenizer import Tokenizer
from servax.generation.vocabulary import Vocabulary
from servax.model.language import COPY, PREFILL, LanguageSpec
from servax.runtime.local import LocalServable
from servax.runtime.memory import free_bytes
from servax.runtime.queue import FairQueue
from servax.runtime.request import InferRequest, InferResult
from servax.stages.buckets import Bucket
from servax.targets.target import FlatArrays, ProgramTable

GENERATE = "generate"
"""The name that requests for text are counted under."""

_CACHE = "cache"
"""What the state's keys and values begin with."""


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

    Raises:
      MemoryShortage: the cache does not fit; says which context would.
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
        require_cache(spec, local["state"], local["table"], local["device"])
        super().__init__(name, **local)
        self.spec = spec
        self.tokenizer = tokenizer
        self.template = template
        self.vocabulary = None if tokenizer is None else Vocabulary(tokenizer, spec.vocabulary, spec.end)
        self.grammars = None if self.vocabulary is None else Grammars(self.vocabulary)
        self._turns = _Turns(self._executor.queue)
        self._programs = Programs(self._runner, spec, self.signatures, self.grid)
        self.engine = self._turns.engine = Engine(
            name,
            self.version,
            spec,
            self._programs,
            self._turns.wake,
            limits=limits,
            overlap=overlap,
            on_broken=self._lifecycle.fail,
        )
        self._executor.queue.join(self._turns)
        # The device's thread outlives a servable that is dropped without `close`.
        weakref.finalize(self, self._executor.queue.leave, self._turns).atexit = False

    @property
    def queued(self) -> int:
        """How many accepted prompts wait for a slot."""
        return self.engine.status.waiting

    @property
    def running(self) -> int:
        """How many sequences have a slot."""
        return self.engine.status.running

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

        Args:
          prompt: text, which is tokenized here, or token ids.
          params: how it is drawn, and when it ends.
          priority: higher runs earlier.
          deadline: on `time.monotonic`'s clock, for the whole answer.
          constraint: what it may consist of.

        Raises:
          InvalidInput, TooLarge, Overloaded, NotReady: before the first part, and nothing was queued.
          DeadlineExceeded, ExecutionError: meanwhile.
        """
        received: asyncio.Queue[Delta] = asyncio.Queue()
        sequence = Sequence(
            self._ids(prompt),
            params,
            received.put_nowait,
            asyncio.get_running_loop(),
            constraint=constraint,
            priority=priority,
            deadline=deadline,
        )
        reply = self._begin(sequence)
        try:
            while not reply.over:
                yield reply.part(await received.get())
        finally:
            self.engine.abort(sequence, reply.why)

    def generate(self, prompt: str | Ids[int], params: SamplingParams | None = None, **sampling: Any) -> Answer:
        """The whole answer to a prompt; `sampling` are fields of `SamplingParams`. Blocks."""
        return _joined(self.parts(prompt, params or SamplingParams(**sampling)))

    def parts(
        self, prompt: str | Ids[int], params: SamplingParams, *, constraint: Constraint | None = None
    ) -> Generator[Part]:
        """As `stream`, for a thread that may block."""
        received: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        sequence = Sequence(self._ids(prompt), params, received.put, constraint=constraint)
        reply = self._begin(sequence)
        try:
            while not reply.over:
                yield reply.part(received.get())
        finally:
            self.engine.abort(sequence, reply.why)

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
        self._executor.queue.leave(self._turns)
        self.engine.close(self._lifecycle.refusal())
        super().close(timeout)

    def _ids(self, prompt: str | Ids[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise UsageError(f"{self.name} has no tokenizer", remedy="send the prompt as token ids")
        return tuple(self.tokenizer.encode(prompt, special=True))

    def _begin(self, sequence: Sequence) -> _Reply:
        """Accepts a sequence and queues it; from here on it gets exactly one answer (contract 8)."""
        lifecycle, accepted = self._lifecycle, _Accepted(self.engine, sequence)
        decode: Callable[[Ids[int]], str] = _no_text if self.tokenizer is None else self.tokenizer.decode
        reply = _Reply(sequence, TextStream(decode, sequence.params.stop))
        try:
            self._executor.require_here()
            lifecycle.admit(accepted)
            sequence.over_now = lambda: lifecycle.release(accepted)
            self.engine.submit(sequence)
        except ServaxError as error:
            lifecycle.release(accepted)
            emit(RequestFailed(self.name, self.version, GENERATE, type(error).__name__))
            raise
        return reply

    def _warm_further(self) -> None:
        runs = 1 if self.device.platform == "cpu" else 3
        steps = self._executor.call(lambda: self._programs.warm(runs))
        self._executor.call(self._runner.reset_state)
        costs = self.costs
        chunk = self._programs.chunks[-1]
        self.engine.expect(steps, costs[COPY, STATIC], costs[PREFILL, Bucket.of(chunk=chunk)] / chunk)

    def _replace(self, fresh: FlatArrays) -> int:
        """Sequences that run finish on the old parameters, those that wait begin on the new ones."""
        return self.engine.replace_parameters(lambda: self._runner.replace(fresh))

    def _no_function(self) -> UsageError:
        return UsageError(
            f"{self.name} is a language model: its functions are its engine's",
            remedy="POST /v1/chat/completions or /v1/completions; in Python: servable.generate, chat, stream",
        )


class _Reply:
    """What has been told of one answer.

    Attributes:
      over: whether its last part was made.
      why: with what its sequence is to end, if it has not ended.
    """

    def __init__(self, sequence: Sequence, text: TextStream) -> None:
        self.over = False
        self.why = Finish.ABORT
        self._sequence = sequence
        self._text = text

    def part(self, delta: Delta) -> Part:
        """The part that a delta makes; raises its error."""
        if delta.error is not None:
            self.over = True
            raise delta.error
        piece = self._text.add(delta.tokens, delta.finish)
        finish = delta.finish
        if self._text.stopped:
            finish = self.why = Finish.STOP
        self.over = finish is not None
        usage = Usage(len(self._sequence.prompt), self._sequence.reused, self._text.count)
        return Part(piece.text, piece.tokens, finish, usage)


class _Turns:
    """The engine's share of the device: one step a turn."""

    def __init__(self, waiting: FairQueue) -> None:
        self.used = 0.0
        self.engine: Engine | None = None
        self._queue = waiting

    def wake(self) -> None:
        """Tells that there is something to do; NotReady once the device's thread has ended."""
        with self._queue.lock:
            self._queue.require_open()
            self._queue.wake(self)

    def next(self, now: float) -> _Turns | None:
        return self if self.engine is not None and self.engine.busy else None

    def ahead(self, now: float) -> None:
        """No step is known before the one that runs is done."""

    def begin(self) -> bool:
        return True

    def prepare(self) -> None:
        """Nothing can be done ahead."""

    def run(self, meanwhile: Callable[[], None] | None) -> None:
        if self.engine is not None:
            self.engine.step()

    def fail(self, error: ServaxError) -> None:
        if self.engine is not None:
            self.engine.close(error)

    def close(self) -> Ids[_Turns]:
        return (self,)

    def __len__(self) -> int:
        return 0 if self.engine is None else self.engine.status.waiting


class _Accepted:
    """A sequence as the servable's lifecycle sees it."""

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence

    def abandon(self, error: ServaxError) -> None:
        if self._sequence.slot is None:
            self._engine.give_up(self._sequence, error)


def require_cache(spec: LanguageSpec, state: Ids[TensorSpec], table: ProgramTable, device: Device) -> None:
    """Raises MemoryShortage, saying which context would fit, unless the cache and what programs need beside it do."""
    free = free_bytes(device)
    sizes = {each.name: math.prod(each.concrete({})) * each.numpy_dtype.itemsize for each in state}
    cache = sum(size for name, size in sizes.items() if name.startswith(_CACHE))
    rest = sum(sizes.values()) - cache
    memory = [table[key].memory for key in table]
    programs = sum(each.get("code", 0) for each in memory) + max((each.get("temp", 0) for each in memory), default=0)
    if free is None or cache + rest + programs <= free:
        return
    fits = max(0, int(spec.context * (free - rest - programs) / max(cache, 1)))
    raise MemoryShortage(
        "the cache does not fit",
        where=f"{device.platform}:{device.id}",
        seen=f"{bytes_text(free)} free ({free} bytes)",
        expected=f"{bytes_text(cache)} for {spec.slots} slots of {spec.context} tokens, {bytes_text(rest)} beside it, "
        f"{bytes_text(programs)} for programs while they run",
        remedy=f"build it with context={fits}, the largest that fits {spec.slots} slots"
        if fits
        else "build it with fewer slots: not even a context of one token fits these",
    )


def _no_text(ids: Ids[int]) -> str:
    return ""


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
