"""What the language models of a data plane have done so far, counted from events and read by metrics."""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from servax.core.events import BurstDone, Event, PromptDone, SequenceDone, subscribe

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, math.inf,
)  # fmt: skip
"""Upper bounds of the classes of durations."""

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, math.inf)
"""Upper bounds of the classes of lengths."""


class Classes:
    """Values by class.

    Attributes:
      bounds: upper bounds of the classes, ascending.
      counts: how many values fell into each.
      total: their sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value, as often as it was there."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Classes:
        same = Classes(self.bounds)
        same.counts, same.total = list(self.counts), self.total
        return same


class GenerationCounts:
    """What one version of a language model did.

    Attributes:
      statuses: sequences by what became of them: `stop`, `length`, `abort`, or the error's class.
      prompt_tokens: of prompts that were written into the cache.
      reused_tokens: of these, those that were in it already.
      answer_tokens: that were drawn.
      bursts, steps: calls of `decode`, and the steps they ran.
      first: seconds from a sequence's arrival to its first token.
      gap: seconds between two tokens of a sequence.
      whole, queue, prefill, decode: seconds of whole sequences that were answered, and of their parts.
      prompt, answer: lengths of these, in tokens.
    """

    SECONDS = ("first", "gap", "whole", "queue", "prefill", "decode")
    LENGTHS = ("prompt", "answer")

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.prompt_tokens = self.reused_tokens = self.answer_tokens = self.bursts = self.steps = 0
        self.first, self.gap, self.whole = Classes(SECONDS), Classes(SECONDS), Classes(SECONDS)
        self.queue, self.prefill, self.decode = Classes(SECONDS), Classes(SECONDS), Classes(SECONDS)
        self.prompt, self.answer = Classes(TOKENS), Classes(TOKENS)

    def copy(self) -> GenerationCounts:
        same = GenerationCounts()
        same.__dict__.update(self.__dict__)
        same.statuses = dict(self.statuses)
        for name in (*self.SECONDS, *self.LENGTHS):
            setattr(same, name, getattr(self, name).copy())
        return same


class GenerationStatistics:
    """A listener to the events of engines, as long as it lives.

    Args:
      serves: whether a model of this name is counted here; a process may have several applications.
    """

    def __init__(self, serves: Callable[[str], bool]) -> None:
        self._serves = serves
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, str], GenerationCounts] = {}
        weak = weakref.ref(self)

        def listener(event: Event) -> None:
            if isinstance(event, PromptDone | BurstDone | SequenceDone) and (statistics := weak()) is not None:
                statistics(event)

        weakref.finalize(self, subscribe(listener))

    def __call__(self, event: PromptDone | BurstDone | SequenceDone) -> None:
        with self._lock:
            counts = self._versions.get((event.servable, event.version))
            if counts is None:
                if not self._serves(event.servable):
                    return
                counts = self._versions[event.servable, event.version] = GenerationCounts()
            if isinstance(event, PromptDone):
                counts.prompt_tokens += event.tokens
                counts.reused_tokens += event.reused
                counts.queue.add(event.queued)
                counts.prefill.add(event.seconds)
            elif isinstance(event, BurstDone):
                counts.bursts += 1
                counts.steps += event.steps
                counts.answer_tokens += event.tokens
                for seconds in event.firsts:
                    counts.first.add(seconds)
                for seconds, times in event.gaps:
                    counts.gap.add(seconds, times)
            else:
                _on_sequence(counts, event)

    def versions(self) -> Mapping[tuple[str, str], GenerationCounts]:
        """What is counted so far, by model and version; a copy."""
        with self._lock:
            return {key: counts.copy() for key, counts in sorted(self._versions.items())}


def _on_sequence(counts: GenerationCounts, event: SequenceDone) -> None:
    counts.statuses[event.status] = counts.statuses.get(event.status, 0) + 1
    if event.status not in ("stop", "length"):
        return
    counts.whole.add(event.over - event.came)
    if event.prefilled is not None and event.last is not None:
        counts.decode.add(event.last - event.prefilled)
    counts.prompt.add(event.prompt)
    counts.answer.add(event.tokens)
