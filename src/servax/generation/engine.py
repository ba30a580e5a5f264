"""The generation loop: one thread, one step at a time, shapes that are all compiled ahead.

A step takes in what was asked, admits, runs at most one chunk of one prompt, then one burst of the rows that answer; it
reads the burst before while that one runs. So no stream waits longer between two tokens than one chunk and one burst
take, and tokens never leave the device between steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from servax.core.errors import (
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    NotReady,
    RecompileError,
    ServaxError,
    TooLarge,
    first_line,
)
from servax.core.events import BurstDone, PromptDone, SequenceDone, emit
from servax.generation.delivery import Deliveries
from servax.generation.entrance import EngineLimits, Entrance
from servax.generation.pace import Pace
from servax.generation.params import SamplingParams
from servax.generation.programs import Array, Burst, Programs
from servax.generation.sequence import Delta, Finish, Sequence, Token
from servax.generation.slots import SlotTable
from servax.model.language import LanguageSpec
from servax.model.sampling import STOPS

T = TypeVar("T")

FAILURES = 3
"""Failed steps, with no token between them, that cast doubt on the device."""

_AHEAD = 1
"""Chunks of prompts that are called before the one before them has run."""

_log = logging.getLogger("servax")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is at.

    Attributes:
      waiting: sequences without a slot.
      running: sequences with one.
      slots: rows of the cache.
      held: tokens whose keys and values are kept, of `capacity`.
      silent: seconds since its last sign of life; 0 while it has nothing to do.
    """

    waiting: int
    running: int
    slots: int
    held: int
    capacity: int
    silent: float


class Engine:
    """The sequences of one language model.

    `step` is for the device's thread alone; everything else is for any thread.

    Args:
      name: of the model, for events.
      version: of the model, for events.
      spec: of the model.
      programs: its compiled functions.
      wake: called when there is something to do; raises NotReady when nobody will do it any more.
      limits: what may wait.
      overlap: whether a burst is called before the one before it is read.
      on_broken: called with the reason when the device runs nothing any more.
    """

    def __init__(
        self,
        name: str,
        version: str,
        spec: LanguageSpec,
        programs: Programs,
        wake: Callable[[], None],
        *,
        limits: EngineLimits | None = None,
        overlap: bool = True,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        self.spec = spec
        self.pace = Pace(spec.burst)
        self._name = name
        self._version = version
        self._programs = programs
        self._wake = wake
        self._overlap = overlap
        self._on_broken = on_broken
        self._stepping = threading.Lock()
        self._entrance = Entrance(limits or EngineLimits())
        self._filling: list[Sequence] = []
        self._running: dict[int, Sequence] = {}
        self._slots = SlotTable(spec.slots)
        self._burst: Burst | None = None
        self._chunks: deque[Mapping[str, Any]] = deque()
        self._replacement: tuple[Callable[[], Any], Future[Any]] | None = None
        self._deliveries = Deliveries()
        self._closed = False
        self._failures = 0
        self._undisturbed = True
        self._beat = time.monotonic()
        self._read_at = 0.0
        self._random = random.SystemRandom()

    def expect(self, steps: Mapping[int, float], copy: float, token: float) -> None:
        """Takes over what warming has measured.

        Args:
          steps: seconds of a step of `decode`, by batch size.
          copy: seconds of copying a row.
          token: seconds of a token of a prompt.
        """
        for batch, seconds in steps.items():
            self.pace.expect(batch, seconds)
        self._slots.worth = max(self._slots.worth, math.ceil(copy / max(token, 1e-9)))

    @property
    def status(self) -> EngineStatus:
        """What it is at."""
        return EngineStatus(
            waiting=len(self._entrance),
            running=len(self._running) + len(self._filling),
            slots=self.spec.slots,
            held=self._slots.held,
            capacity=self.spec.slots * self.spec.context,
            silent=time.monotonic() - self._beat if self.busy else 0.0,
        )

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(
            self._entrance.busy
            or self._filling
            or self._running
            or self._burst is not None
            or self._replacement is not None
        )

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raises what is wrong with a request whatever the queue.

        Raises:
          InvalidInput: the prompt is empty, or more ids would end the answer than are looked for.
          TooLarge: prompt and answer exceed the context.
        """
        if prompt_tokens < 1:
            raise InvalidInput("the prompt is empty", where="prompt", expected="at least one token")
        answer = 1 if params.max_tokens is None else params.max_tokens
        if prompt_tokens + answer > self.spec.context:
            raise TooLarge(
                "prompt and answer do not fit into the context",
                where="prompt",
                seen=f"{prompt_tokens} tokens of prompt and {answer} of answer",
                expected=f"at most {self.spec.context} tokens in all",
                remedy="shorten the prompt, or ask for fewer tokens",
            )
        ends = params.ends(self.spec)
        if len(ends) > STOPS:
            raise InvalidInput(
                "too many tokens would end the answer",
                where="stop_token_ids",
                seen=f"{len(ends)}, those of the model among them",
                expected=f"at most {STOPS}",
            )

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; from here on it gets deltas until one has `finish` or `error`.

        Raises:
          InvalidInput, TooLarge: as `check`; or a token id is none.
          Overloaded: too much waits.
          NotReady: the engine was closed.
        """
        params = sequence.params
        self.check(len(sequence.prompt), params)
        for where, ids in (
            ("prompt", sequence.prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.spec.vocabulary):
                raise InvalidInput(
                    "there is no such token",
                    where=where,
                    seen=str(min(ids) if min(ids) < 0 else max(ids)),
                    expected=f"0 to {self.spec.vocabulary - 1}",
                )
        sequence.seed = (self._random.getrandbits(32) if params.seed is None else params.seed) & 0xFFFFFFFF
        if not self.busy:
            self._beat = time.monotonic()  # it was idle: its silence begins now
        self._entrance.add(sequence)
        try:
            self._wake()
        except ServaxError:
            self._entrance.withdraw(sequence)
            raise

    def abort(self, sequence: Sequence, finish: Finish = Finish.ABORT) -> None:
        """Ends a sequence, wherever it is, within a step; nothing more is delivered. Nothing if it is over.

        `finish` says why: whoever finds a stop string in what was delivered ends it with `Finish.STOP`.
        """
        self._give_up(sequence, finish)

    def give_up(self, sequence: Sequence, error: ServaxError) -> None:
        """As `abort`, with an error that is delivered."""
        self._give_up(sequence, error)

    def _give_up(self, sequence: Sequence, why: Finish | ServaxError) -> None:
        if self._entrance.give_up(sequence, why):
            with contextlib.suppress(NotReady):  # the device's thread has ended: `close` answers
                self._wake()

    def replace_parameters(self, replace: Callable[[], T]) -> T:
        """Calls `replace`, which changes the parameters, between sequences, and gives what it returns; blocks.

        Those that run finish before, those that wait begin after; what was kept of the cache is forgotten.

        Raises:
          NotReady: the engine was closed, or they are being replaced already.
        """
        future: Future[T] = Future()
        with self._stepping:
            if self._closed or self._replacement is not None:
                raise NotReady("the engine was closed" if self._closed else "the parameters are being replaced already")
            self._replacement = replace, future
        self._wake()
        return future.result()

    def close(self, error: ServaxError | None = None) -> None:
        """Refuses further sequences and answers all there are with `error`, once the step that runs is over."""
        failure = error or NotReady("the servable was closed while the request ran")
        left = self._entrance.close(failure)
        with self._stepping:
            self._closed = True
            self._fail([*left, *self._filling, *self._running.values()], failure)
            self._burst = None
            self._chunks.clear()
            if self._replacement is not None:
                self._replacement[1].set_exception(failure)
                self._replacement = None
            self._deliveries.send()

    def step(self) -> None:
        """One round; blocks no longer than the burst before takes.

        Whatever goes wrong costs the sequences that have a slot, and no more (contract 7).
        """
        with self._stepping:
            if self._closed:
                return
            try:
                self._round()
            except Exception as error:
                self._lost(error)
            for sequence in self._deliveries.send():
                self._entrance.give_up(sequence, Finish.ABORT)
            self._beat = time.monotonic()

    def _round(self) -> None:
        self._drain()
        self._replace()
        self._admit()
        self._fill()
        self._decode()

    def _drain(self) -> None:
        for sequence in self._entrance.turn():
            if isinstance(sequence.given_up, ServaxError):
                self._fail([sequence], sequence.given_up)
            elif not sequence.over and sequence.given_up is not None:
                self._end(sequence, sequence.given_up, told=False)
        now = time.monotonic()
        late = [
            each
            for each in (*self._entrance, *self._filling, *self._running.values())
            if each.deadline is not None and each.deadline <= now
        ]
        if late:
            self._fail(late, DeadlineExceeded("the deadline passed before the answer was complete"))

    def _replace(self) -> None:
        """Changes the parameters once nobody has a slot."""
        if self._replacement is None or self._filling or self._running or self._burst is not None:
            return
        (replace, future), self._replacement = self._replacement, None
        self._slots.forget()
        try:
            future.set_result(replace())
        except BaseException as error:
            future.set_exception(error)

    def _admit(self) -> None:
        while self._replacement is None and (sequence := self._entrance.first()) is not None:
            if self._slots.worth_waiting(sequence, self._filling):
                return  # prompts are written one after the other: nothing is lost, and this one is copied then
            placement = self._slots.place(sequence)
            if placement is None:
                return
            self._entrance.remove(sequence, admitted=True)
            self._filling.append(sequence)
            sequence.admitted = time.perf_counter()
            for source, target in placement.copies:
                self._undisturbed = False
                self._programs.copy(source, target, placement.reused)

    def _fill(self) -> None:
        """At most one chunk; then prompts that are complete begin to answer."""
        for sequence in self._filling:
            left = len(sequence.prompt) - 1 - sequence.done
            if left:
                slot = _slot(sequence)
                size = self._programs.chunk(left, sequence.done)
                part = sequence.prompt[sequence.done : sequence.done + size]
                while len(self._chunks) > _AHEAD:
                    self._programs.wait(self._chunks.popleft())  # what was called can't be aborted
                self._undisturbed = False
                self._chunks.append(self._programs.prefill(part, slot, sequence.done))
                sequence.done += size
                self._slots.slots[slot].ids.extend(part)
                break
        for sequence in [each for each in self._filling if each.done == len(each.prompt) - 1]:
            self._programs.begin(sequence, _slot(sequence))
            self._filling.remove(sequence)
            self._running[_slot(sequence)] = sequence
            now = sequence.prefilled = time.perf_counter()
            came, admitted = sequence.came, sequence.admitted or now
            emit(
                PromptDone(
                    self._name,
                    self._version,
                    tokens=len(sequence.prompt),
                    reused=sequence.reused,
                    queued=admitted - came,
                    seconds=now - admitted,
                )
            )

    def _decode(self) -> None:
        before, self._burst = self._burst, None
        if before is not None and not self._overlap:
            self._read(before)
            before = None
        self._compact()
        free = {
            slot: row for slot, row in self._running.items() if row.constraint is None and self._may_go_on(row, before)
        }
        if free:
            steps = self.pace.steps(self._programs.batch(max(free) + 1))
            alone = self._undisturbed and all(row.constraint is None for row in self._running.values())
            self._burst = self._programs.decode(free, steps, undisturbed=alone)
            self._undisturbed = True
        constrained = None
        if masks := self._masks():
            constrained = self._programs.decode({slot: self._running[slot] for slot in masks}, 1, masks)
        if before is not None:
            self._read(before)
        if constrained is not None:
            self._read(constrained)  # what may follow is known once it is read

    def _may_go_on(self, row: Sequence, before: Burst | None) -> bool:
        """Whether a row can have tokens left beyond the burst that is not read yet."""
        pending = before.steps if before is not None and row in before.rows.values() else 0
        return len(row.prompt) + len(row.tokens) + pending < row.limit(self.spec.context)

    def _masks(self) -> dict[int, Array]:
        """What each constrained row may take next; those that can take nothing end with an error."""
        masks: dict[int, Array] = {}
        for slot, row in list(self._running.items()):
            if row.constraint is None:
                continue
            try:
                mask = row.constraint.mask()
            except Exception as error:
                self._fail([row], _constraint_error(error))
                continue
            if mask.any():
                masks[slot] = mask
            else:
                self._fail([row], InvalidInput("the constraint allows no token to follow", where="constraint"))
        return masks

    def _compact(self) -> None:
        """Moves a sequence to a lower row where that lets the batch be smaller."""
        while (move := self._slots.lower()) is not None:
            source, target = move
            row = self._slots.slots[source].owner
            if row is None or source not in self._running:
                return
            others = max(
                (slot + 1 for slot in (*self._running, *map(_slot, self._filling)) if slot != source), default=0
            )
            if self._programs.batch(max(others, target + 1)) >= self._programs.batch(source + 1):
                return
            self._undisturbed = False
            held = len(self._slots.slots[source].ids)
            if self._slots.move(source, target):
                self._programs.exchange(source, target)
            else:
                self._programs.copy(source, target, held)
            self._running[target] = self._running.pop(source)

    def _read(self, burst: Burst) -> None:
        """Waits for a burst and hands out its tokens."""
        host = self._programs.read(burst)
        now = time.perf_counter()
        ran = int((host["tokens"] >= 0).sum(axis=1).max(initial=0))
        if ran and burst.undisturbed:
            self.pace.note(burst.batch, ran, now - max(burst.began, self._read_at))
        self._read_at = now
        self._failures = 0
        produced, firsts, gaps = 0, list[float](), list[tuple[float, int]]()
        for slot, sequence in burst.rows.items():
            if sequence.over:
                continue
            tokens = self._tokens(sequence, slot, host)
            if not tokens or any(token.logprob != token.logprob for token in tokens):
                seen = "no token" if not tokens else "a log probability that is no number"
                self._fail([sequence], ExecutionError("the model gave nothing to go on with", seen=seen))
                continue
            produced += len(tokens)
            if sequence.first is None or sequence.last is None:
                sequence.first = now
                firsts.append(now - sequence.came)
            else:
                gaps.append(((now - sequence.last) / len(tokens), len(tokens)))
            sequence.last = now
            finish = self._take(sequence, tokens)
            if sequence.over:
                continue
            if finish is None:
                self._deliveries.add(sequence, Delta(tokens))
            else:
                self._end(sequence, finish, tokens)
        emit(
            BurstDone(
                self._name,
                self._version,
                batch=burst.batch,
                rows=len(burst.rows),
                steps=ran,
                tokens=produced,
                seconds=now - burst.began,
                firsts=tuple(firsts),
                gaps=tuple(gaps),
            )
        )

    def _tokens(self, sequence: Sequence, slot: int, host: Mapping[str, Array]) -> tuple[Token, ...]:
        ids: list[int] = host["tokens"][slot].tolist()
        own: list[float] = host["logprobs"][slot].tolist()
        count = sequence.params.logprobs
        if not count:
            return tuple(Token(token, logprob) for token, logprob in zip(ids, own, strict=True) if token >= 0)
        top, logprobs = host["top_tokens"][slot, :, :count].tolist(), host["top_logprobs"][slot, :, :count].tolist()
        return tuple(
            Token(token, own[step], tuple(zip(top[step], logprobs[step], strict=True)))
            for step, token in enumerate(ids)
            if token >= 0
        )

    def _take(self, sequence: Sequence, tokens: Iterable[Token]) -> Finish | None:
        """Notes what was drawn; the reason if the sequence ends with it. A constraint that breaks fails it."""
        complete = False
        held = self._slots.slots[_slot(sequence)].ids
        for token in tokens:
            # The cache holds all but the last token, whose keys and values are written when the next one is drawn.
            held.append(sequence.tokens[-1] if sequence.tokens else sequence.prompt[-1])
            sequence.tokens.append(token.id)
            if sequence.constraint is not None:
                try:
                    complete = sequence.constraint.accept(token.id) or complete
                except Exception as error:
                    self._fail([sequence], _constraint_error(error))
                    return None
        if complete or sequence.tokens[-1] in sequence.params.ends(self.spec):
            return Finish.STOP
        whole = len(sequence.prompt) + len(sequence.tokens)
        return Finish.LENGTH if whole >= sequence.limit(self.spec.context) else None

    def _end(self, sequence: Sequence, finish: Finish, tokens: tuple[Token, ...] = (), *, told: bool = True) -> None:
        sequence.finish = finish
        self._remove(sequence)
        if told:
            self._deliveries.add(sequence, Delta(tokens, finish))
        self._tell(sequence, str(finish))

    def _fail(self, sequences: Iterable[Sequence], error: ServaxError) -> None:
        for sequence in list(sequences):
            if not sequence.over:
                sequence.failed = True
                self._remove(sequence)
                self._deliveries.add(sequence, Delta(error=error))
                self._tell(sequence, type(error).__name__)

    def _remove(self, sequence: Sequence) -> None:
        self._entrance.remove(sequence)
        if sequence in self._filling:
            self._filling.remove(sequence)
        if sequence.slot is not None:
            self._running.pop(sequence.slot, None)
        self._slots.release(sequence)

    def _lost(self, error: Exception) -> None:
        """A step failed: the state is gone, and with it every sequence that had a row."""
        if not isinstance(error, ServaxError):
            _log.error("a step of the engine of %s failed", self._name, exc_info=error)
            error = ExecutionError(
                "a step of the engine failed", where=self._name, seen=f"{type(error).__name__}: {first_line(error)}"
            )
        self._burst = None
        self._chunks.clear()
        self._fail([*self._filling, *self._running.values(), *self._slots.owners], error)
        self._slots.forget()
        if isinstance(error, RecompileError):
            return
        self._failures += 1
        if self._failures >= FAILURES and self._on_broken is not None:
            self._failures = 0
            try:
                self._programs.probe()
            except Exception as again:
                seen = again.sentence() if isinstance(again, ServaxError) else first_line(again)
                self._on_broken(f"{FAILURES} steps in a row failed, and so did one of our own: {seen}")

    def _tell(self, sequence: Sequence, status: str) -> None:
        if sequence.over_now is not None:
            sequence.over_now()
        emit(
            SequenceDone(
                self._name,
                self._version,
                status,
                prompt=len(sequence.prompt),
                reused=sequence.reused,
                tokens=len(sequence.tokens),
                came=sequence.came,
                admitted=sequence.admitted,
                prefilled=sequence.prefilled,
                first=sequence.first,
                last=sequence.last,
                over=time.perf_counter(),
            )
        )


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "it was admitted"
    return sequence.slot


def _constraint_error(error: Exception) -> ServaxError:
    if isinstance(error, ServaxError):
        return error
    return ExecutionError(
        "the constraint failed", where="constraint", seen=f"{type(error).__name__}: {first_line(error)}"
    )
