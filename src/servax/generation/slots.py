"""Rows of the cache: which tokens each holds, who uses it, and which one a prompt should have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from servax.generation.sequence import Sequence


@dataclass(slots=True)
class Slot:
    """One row of the cache.

    Attributes:
      ids: tokens whose keys and values it holds, from position 0.
      owner: the sequence that writes to it; None: what it holds is kept in case a prompt begins with it.
      used: grows with every use, over all slots.
    """

    ids: list[int] = field(default_factory=list[int])
    owner: Sequence | None = None
    used: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes.

    Attributes:
      slot: its row.
      reused: tokens of the prompt that the row holds once `copies` are made.
      copies: rows to copy before, `(source, target)`, in order.
    """

    slot: int
    reused: int
    copies: tuple[tuple[int, int], ...] = ()


class SlotTable:
    """The rows of one cache.

    Sequences sit in the lowest rows, since a batch is the rows from 0 on. What a finished one leaves is kept: a prompt
    that begins alike copies it, or goes on from it where it lies.

    Args:
      count: rows.

    Attributes:
      worth: tokens in common from which on a copy is cheaper than computing them again.
    """

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]
        self.worth = 16
        self._clock = itertools.count(1)

    @property
    def free(self) -> int:
        """How many rows nobody writes to."""
        return sum(slot.owner is None for slot in self.slots)

    @property
    def rows(self) -> int:
        """Rows that a batch must have to hold every sequence."""
        return max((index + 1 for index, slot in enumerate(self.slots) if slot.owner is not None), default=0)

    @property
    def owners(self) -> list[Sequence]:
        """Those who have a row."""
        return [slot.owner for slot in self.slots if slot.owner is not None]

    @property
    def held(self) -> int:
        """Tokens whose keys and values are kept."""
        return sum(len(slot.ids) for slot in self.slots)

    def worth_waiting(self, sequence: Sequence, filling: Iterable[Sequence]) -> bool:
        """Whether one of the prompts that are being written will have more in common with this one than any row has."""
        coming = max((self._common(other.prompt[:-1], sequence.prompt) for other in filling), default=0)
        return coming >= self.worth and coming > self._longest(sequence.prompt)[1]

    def place(self, sequence: Sequence) -> Placement | None:
        """Gives a sequence a row and notes the copies as made; None where every row is taken.

        The last token of a prompt is never reused: its logits are what the answer begins with.
        """
        index = next((index for index, slot in enumerate(self.slots) if slot.owner is None), None)
        if index is None:
            return None
        source, common = self._longest(sequence.prompt)
        copies: list[tuple[int, int]] = []
        target = self.slots[index]
        if common < self.worth:
            common = min(self._common(target.ids, sequence.prompt), common)
            source = index if common else None
        if source != index and target.ids:
            self._keep(index, source, copies)
        if source is not None and source != index:
            copies.append((source, index))
            self.slots[source].used = next(self._clock)
        target.ids = list(sequence.prompt[:common])
        target.owner, target.used = sequence, next(self._clock)
        sequence.slot, sequence.done, sequence.reused = index, common, common
        return Placement(index, common, tuple(copies))

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's row back; what it holds is kept."""
        if sequence.slot is not None and self.slots[sequence.slot].owner is sequence:
            self.slots[sequence.slot].owner = None
            self.slots[sequence.slot].used = next(self._clock)
        sequence.slot = None

    def lower(self) -> tuple[int, int] | None:
        """A sequence's row and the free row below it that it can move to; None where they are the lowest already."""
        top = self.rows - 1
        index = next((index for index, slot in enumerate(self.slots[: max(top, 0)]) if slot.owner is None), None)
        return None if index is None else (top, index)

    def move(self, source: int, target: int) -> bool:
        """Notes that a sequence moves to a free row: in exchange for what that holds, or else as a copy.

        Returns whether it is worth an exchange.
        """
        old, new = self.slots[source], self.slots[target]
        owner = old.owner
        assert owner is not None
        assert new.owner is None
        worthy = len(new.ids) >= self.worth
        self.slots[source] = Slot(new.ids if worthy else list(old.ids), None, new.used if worthy else 0)
        self.slots[target] = Slot(old.ids, owner, next(self._clock))
        owner.slot = target
        return worthy

    def forget(self) -> None:
        """Notes that every row's contents are lost, and its owner with them."""
        for slot in self.slots:
            slot.ids.clear()
            slot.owner = None

    def _longest(self, prompt: Ids[int]) -> tuple[int | None, int]:
        best, most, free = None, 0, False
        for index, slot in enumerate(self.slots):
            common = self._common(slot.ids, prompt)
            # Of equal ones a free row goes first: it needs no copy if it is the target.
            if common and (common, slot.owner is None) > (most, free):
                best, most, free = index, common, slot.owner is None
        return best, most

    def _common(self, ids: Ids[int], prompt: Ids[int]) -> int:
        """How many tokens both begin with, by halving: slices are compared at the speed of C."""
        most = min(len(ids), len(prompt) - 1)
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if tuple(ids[low:middle]) == tuple(prompt[low:middle]):
                low = middle
            else:
                high = middle - 1
        return low

    def _keep(self, index: int, source: int | None, copies: list[tuple[int, int]]) -> None:
        """Moves what a row holds to a free row above it that holds nothing, or what has not been used for longest."""
        if len(self.slots[index].ids) < self.worth:
            return
        others = [
            other
            for other, slot in enumerate(self.slots)
            if slot.owner is None and other not in (index, source) and slot.used < self.slots[index].used
        ]
        if not others:
            return
        victim = min(others, key=lambda other: (len(self.slots[other].ids) >= self.worth, self.slots[other].used))
        self.slots[victim].ids = list(self.slots[index].ids)
        self.slots[victim].used = self.slots[index].used
        copies.append((index, victim))
