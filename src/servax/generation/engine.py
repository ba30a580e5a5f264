"""The generation loop: one thread, one step at a time, shapes that are all compiled ahead.

A step drains what was asked, admits, runs at most one chunk of one prompt, then one burst of the rows that answer; it
reads the burst before while that one runs. So no stream waits longer between two tokens than one chunk and one burst
take, and tokens never leave the device between steps.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from servax.core.errors import DeadlineExceeded, InvalidInput, NotReady, Overloaded, ServaxError, TooLarge
from servax.core.events import BurstDone, SequenceDone, emit
from servax.generation.programs import Burst, Programs
from servax.generation.sequence import Delta, Finish, Sequence, Token
from servax.generation.slots import SlotTable
from servax.model.language import LanguageSpec

_BURST_SECONDS = 0.06
"""How long a burst may take: it bounds the gap between what a stream is sent."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What may wait.

    Attributes:
      requests: sequences that wait for a slot.
      tokens: of their prompts, in all.
    """

    requests: int = 256
    tokens: int = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is at.

    Attributes:
      waiting: sequences without a slot.
      running: sequences with one.
      slots: rows of the cache.
      held: tokens whose keys and values are kept, of `capacity`.
      beat: when the last step ended, on `time.monotonic`'s clock.
    """

    waiting: int
    running: int
    slots: int
    held: int
    capacity: int
    beat: float


class Engine:
    """The sequences of one language model.

    `submit` and `abort` are for any thread; `step` is for the device's alone.

    Args:
      name: of the model, for events.
      spec: of the model.
      programs: its compiled functions.
      limits: what may wait.
      wake: called when there is something to do.
      overlap: whether a burst is called before the one before it is read.
    """

    def __init__(
        self,
        name: str,
        spec: LanguageSpec,
        programs: Programs,
        limits: EngineLimits,
        wake: Callable[[], None],
        *,
        overlap: bool = True,
    ) -> None:
        self.spec = spec
        self._name = name
        self._programs = programs
        self._limits = limits
        self._wake = wake
        self._overlap = overlap
        self._lock = threading.Lock()
        self._arrived: deque[Sequence] = deque()
        self._aborted: deque[Sequence] = deque()
        self._closed: ServaxError | None = None
        self._waiting: list[Sequence] = []
        self._filling: list[Sequence] = []
        self._running: dict[int, Sequence] = {}
        self._slots = SlotTable(spec.slots)
        self._burst: Burst | None = None
        self._asked = 0
        self._asked_tokens = 0
        self._seconds: dict[int, float] = {}
        self._deliveries: list[tuple[Sequence, Delta]] = []
        self._beat = time.monotonic()
        self._read_at = 0.0
        self._random = random.SystemRandom()

    @property
    def status(self) -> EngineStatus:
        """What it is at; from any thread."""
        running = len(self._running) + len(self._filling)
        return EngineStatus(
            self._asked,
            running,
            self.spec.slots,
            self._slots.held,
            self.spec.slots * self.spec.context,
            self._beat,
        )

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(
            self._arrived or self._aborted or self._waiting or self._filling or self._running or self._burst is not None
        )

    def check(self, prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises what is wrong with a request whatever the queue.

        Raises:
          InvalidInput: the prompt is empty.
          TooLarge: prompt and answer exceed the context.
        """
        if prompt_tokens < 1:
            raise InvalidInput("the prompt is empty", where="prompt", expected="at least one token")
        wanted = prompt_tokens + (1 if max_tokens is None else max_tokens)
        if wanted > self.spec.context:
            raise TooLarge(
                "prompt and answer do not fit into the context",
                where="prompt",
                seen=f"{prompt_tokens} tokens of prompt and {wanted - prompt_tokens} of answer",
                expected=f"at most {self.spec.context} tokens in all",
                remedy="shorten the prompt, or ask for fewer tokens",
            )

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; from here on it gets deltas until one has `finish` or `error`.

        Raises:
          InvalidInput, TooLarge: as `check`; or a token id is none.
          Overloaded: too much waits.
          NotReady: the engine was closed.
        """
        self.check(len(sequence.prompt), sequence.params.max_tokens)
        bad = [each for each in (*sequence.prompt, *sequence.params.logit_bias) if not 0 <= each < self.spec.vocabulary]
        if bad:
            raise InvalidInput(
                "there is no such token",
                where="prompt or logit_bias",
                seen=str(bad[0]),
                expected=f"0 to {self.spec.vocabulary - 1}",
            )
        params = sequence.params
        sequence.seed = (self._random.getrandbits(32) if params.seed is None else params.seed) & 0xFFFFFFFF
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if self._asked >= self._limits.requests or self._asked_tokens + len(sequence.prompt) > self._limits.tokens:
                raise Overloaded(
                    "too many prompts wait",
                    seen=f"{self._asked} requests of {self._asked_tokens} tokens",
                    expected=f"at most {self._limits.requests} requests and {self._limits.tokens} tokens",
                    remedy="send it again later, or raise the limits",
                )
            self._asked += 1
            self._asked_tokens += len(sequence.prompt)
            self._arrived.append(sequence)
        self._wake()

    def abort(self, sequence: Sequence, finish: Finish = Finish.ABORT) -> None:
        """Ends a sequence, wherever it is, within a step; nothing more is delivered. Nothing if it is over.

        `finish` says why: whoever finds a stop string in what was delivered ends it with `Finish.STOP`.
        """
        self._give_up(sequence, finish)

    def give_up(self, sequence: Sequence, error: ServaxError) -> None:
        """As `abort`, with an error that is delivered."""
        self._give_up(sequence, error)

    def _give_up(self, sequence: Sequence, why: Finish | ServaxError) -> None:
        if sequence.over or sequence.aborted is not None:
            return
        sequence.aborted = why
        with self._lock:
            self._aborted.append(sequence)
        self._wake()

    def close(self, error: ServaxError | None = None) -> None:
        """Refuses further sequences and answers all there are with `error`; on the device's thread, or after it."""
        failure = error or NotReady("the servable was closed while the request ran")
        with self._lock:
            self._closed = failure
            left = [*self._arrived, *self._waiting, *self._filling, *self._running.values()]
            self._arrived.clear()
            self._asked = self._asked_tokens = 0
        self._waiting.clear()
        self._filling.clear()
        self._running.clear()
        self._burst = None
        self._fail(left, failure)
        self._deliver()

    def step(self) -> None:
        """One round; blocks no longer than the burst before takes. An error of the device costs the live sequences."""
        try:
            self._drain()
            self._admit()
            self._fill()
            self._decode()
        except ServaxError as error:
            self._lost(error)
        self._beat = time.monotonic()
        self._deliver()

    def _drain(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            aborted, self._aborted = self._aborted, deque()
        self._waiting.extend(arrived)
        self._waiting.sort(key=lambda sequence: (-sequence.priority, sequence.came))
        for sequence in aborted:
            if isinstance(sequence.aborted, ServaxError):
                self._fail([sequence], sequence.aborted)
            elif not sequence.over and sequence.aborted is not None:
                self._end(sequence, sequence.aborted, told=False)
        if any(sequence.deadline is not None for sequence in self._waiting):
            late = [each for each in self._waiting if each.deadline is not None and each.deadline <= time.monotonic()]
            self._fail(late, DeadlineExceeded("the deadline passed while the prompt waited for a slot"))

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            placement = self._slots.place(sequence)
            if placement is None:
                return
            self._waiting.pop(0)
            self._left_queue(sequence)
            for source, target in placement.copies:
                self._programs.copy(source, target, placement.reused)
            sequence.admitted = time.perf_counter()
            self._filling.append(sequence)

    def _fill(self) -> None:
        """At most one chunk; then prompts that are complete begin to answer."""
        for sequence in self._filling:
            left = len(sequence.prompt) - 1 - sequence.done
            if left:
                slot = _slot(sequence)
                size = self._programs.chunk(left, sequence.done)
                part = sequence.prompt[sequence.done : sequence.done + size]
                self._programs.prefill(part, slot, sequence.done)
                sequence.done += size
                self._slots.slots[slot].ids.extend(part)
                break
        for sequence in [each for each in self._filling if each.done == len(each.prompt) - 1]:
            self._filling.remove(sequence)
            self._programs.begin(sequence, _slot(sequence))
            sequence.prefilled = time.perf_counter()
            self._running[_slot(sequence)] = sequence

    def _decode(self) -> None:
        before, self._burst = self._burst, None
        constrained = {slot: row for slot, row in self._running.items() if row.constraint is not None}
        if before is not None and (constrained or not self._overlap):
            self._read(before)
            before = None
            constrained = {slot: row for slot, row in self._running.items() if row.constraint is not None}
        self._compact()
        free = {
            slot: row for slot, row in self._running.items() if row.constraint is None and self._may_go_on(row, before)
        }
        if free:
            self._burst = self._programs.decode(free, self._steps(max(free) + 1), time.perf_counter())
        if constrained := {slot: row for slot, row in self._running.items() if row.constraint is not None}:
            self._read(self._programs.decode(constrained, 1, time.perf_counter()))
        if before is not None:
            self._read(before)

    def _may_go_on(self, row: Sequence, before: Burst | None) -> bool:
        """Whether a row can have tokens left beyond the burst that is not read yet."""
        pending = before.steps if before is not None and row in before.rows.values() else 0
        return len(row.prompt) + len(row.tokens) + pending < row.limit(self.spec.context)

    def _steps(self, rows: int) -> int:
        """Steps of the next burst: as many as fit into its time by what the last ones of its size took."""
        batch = next(size for size in self._programs.batches if size >= rows)
        seconds = self._seconds.get(batch)
        return self.spec.burst if seconds is None else int(np.clip(_BURST_SECONDS / seconds, 1, self.spec.burst))

    def _compact(self) -> None:
        """Moves a sequence to a lower row where that lets the batch be smaller."""
        while (move := self._slots.lower()) is not None:
            source, target = move
            others = max(
                (slot + 1 for slot in (*self._running, *map(_slot, self._filling)) if slot != source), default=0
            )
            row = self._slots.slots[source].owner
            if (
                row is None
                or source not in self._running
                or self._batch(max(others, target + 1)) >= self._batch(source + 1)
            ):
                return
            self._programs.copy(source, target, len(self._slots.slots[source].ids))
            self._slots.move(source, target)
            self._running[target] = self._running.pop(source)

    def _batch(self, rows: int) -> int:
        return next(size for size in self._programs.batches if size >= rows)

    def _read(self, burst: Burst) -> None:
        """Waits for a burst and hands out its tokens."""
        host = self._programs.read(burst)
        now = time.perf_counter()
        ran = int((host["tokens"] >= 0).sum(axis=1).max(initial=0))
        if ran:
            taken = (now - max(burst.began, self._read_at)) / ran
            old = self._seconds.get(burst.batch, taken)
            self._seconds[burst.batch] = 0.8 * old + 0.2 * taken
        self._read_at = now
        produced = 0
        for slot, sequence in burst.rows.items():
            if sequence.over:
                continue
            tokens = self._tokens(sequence, slot, host)
            produced += len(tokens)
            if sequence.first is None and tokens:
                sequence.first = now
            sequence.last = now
            finish = self._take(sequence, tokens, bool(host["done"][slot]))
            if finish is None:
                self._deliveries.append((sequence, Delta(tokens)))
            else:
                self._end(sequence, finish, tokens)
        emit(BurstDone(self._name, burst.batch, len(burst.rows), ran, produced, now - burst.began))

    def _tokens(self, sequence: Sequence, slot: int, host: dict[str, np.ndarray]) -> tuple[Token, ...]:
        count = sequence.params.logprobs
        found: list[Token] = []
        for step, token in enumerate(host["tokens"][slot].tolist()):
            if token < 0:
                break
            top: tuple[tuple[int, float], ...] = ()
            if count:
                ids, values = host["top_tokens"][slot, step, :count], host["top_logprobs"][slot, step, :count]
                top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            found.append(Token(token, float(host["logprobs"][slot, step]), top))
        return tuple(found)

    def _take(self, sequence: Sequence, tokens: Iterable[Token], done: bool) -> Finish | None:
        """Notes what was drawn; the reason if the sequence ends with it."""
        complete = False
        for token in tokens:
            sequence.tokens.append(token.id)
            if sequence.constraint is not None:
                complete = sequence.constraint.accept(token.id) or complete
        # The cache holds all but the last token, whose keys and values are written when the next one is drawn.
        if sequence.slot is not None:
            ids = self._slots.slots[sequence.slot].ids
            ids[:] = [*sequence.prompt, *sequence.tokens[:-1]]
        if not done and not complete:
            return None
        ends = () if sequence.params.ignore_eos else self.spec.end
        stopped = complete or sequence.tokens[-1] in (*ends, *sequence.params.stop_token_ids)
        return Finish.STOP if stopped else Finish.LENGTH

    def _end(self, sequence: Sequence, finish: Finish, tokens: tuple[Token, ...] = (), *, told: bool = True) -> None:
        sequence.finish = finish
        self._remove(sequence)
        if told:
            self._deliveries.append((sequence, Delta(tokens, finish)))
        self._tell(sequence, str(finish))

    def _fail(self, sequences: Iterable[Sequence], error: ServaxError) -> None:
        for sequence in list(sequences):
            if not sequence.over:
                sequence.failed = True
                self._remove(sequence)
                self._deliveries.append((sequence, Delta(error=error)))
                self._tell(sequence, type(error).__name__)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._left_queue(sequence)
        if sequence in self._filling:
            self._filling.remove(sequence)
        if sequence.slot is not None:
            self._running.pop(sequence.slot, None)
        self._slots.release(sequence)

    def _left_queue(self, sequence: Sequence) -> None:
        with self._lock:
            self._asked = max(0, self._asked - 1)
            self._asked_tokens = max(0, self._asked_tokens - len(sequence.prompt))

    def _lost(self, error: ServaxError) -> None:
        """The device failed: the state is gone, and with it every sequence that had a row (contract 7)."""
        self._burst = None
        self._fail([*self._filling, *self._running.values()], error)
        self._slots.forget()

    def _deliver(self) -> None:
        """Hands over what the step gave: once for each event loop."""
        deliveries, self._deliveries = self._deliveries, []
        by_loop: dict[object, list[tuple[Sequence, Delta]]] = {}
        for sequence, delta in deliveries:
            by_loop.setdefault(sequence.loop, []).append((sequence, delta))
        for items in by_loop.values():
            loop = items[0][0].loop
            if loop is None:
                _receive(items)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_receive, items)

    def _tell(self, sequence: Sequence, status: str) -> None:
        if sequence.over_now is not None:
            sequence.over_now()
        emit(
            SequenceDone(
                self._name,
                status,
                prompt=len(sequence.prompt),
                reused=sequence.reused,
                tokens=len(sequence.tokens),
                came=sequence.came,
                admitted=sequence.admitted,
                prefilled=sequence.prefilled,
                first=sequence.first,
                last=sequence.last,
            )
        )


def _receive(items: list[tuple[Sequence, Delta]]) -> None:
    for sequence, delta in items:
        sequence.receive(delta)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "it was admitted"
    return sequence.slot
