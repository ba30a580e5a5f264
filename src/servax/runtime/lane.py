"""The requests of one function that wait, by shape and priority, and the pick of those that run next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from servax.core.tensors import Signature
from servax.runtime.costs import Costs
from servax.runtime.pending import PendingRequest
from servax.runtime.planner import Ladder, plan
from servax.stages.buckets import Bucket, choose
from servax.stages.joining import Joiner
from servax.stages.padding import CheckedTensors
from servax.stages.quick import QuickCheck

_LOOKED_AT = 64
"""Requests too large for the places left that are passed over in the search for smaller ones behind them."""

_KNOWN_SIZES = 4096
"""Combinations of sizes whose shapes are remembered."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The buckets of one function that differ in their rows alone.

    Attributes:
      sizes: of the other dimensions, in order of name.
      buckets: by rows, ascending.
    """

    sizes: tuple[tuple[str, int], ...]
    buckets: Mapping[int, Bucket]

    @property
    def most(self) -> int:
        """Rows of the largest bucket."""
        return max(self.buckets)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether a request of these sizes, rows aside, fits."""
        return all(sizes[dim] <= size for dim, size in self.sizes)

    def volume(self) -> int:
        """The product of all sizes but the rows."""
        return Bucket(self.sizes).volume()


class Waiting:
    """Requests that may be joined, higher priorities first, each priority in order of arrival.

    Attributes:
      rows: of all of them.
    """

    __slots__ = ("_levels", "rows")

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[PendingRequest, None]] = {}
        self.rows = 0

    def add(self, request: PendingRequest) -> None:
        level = self._levels.get(request.priority)
        if level is None:
            self._levels[request.priority] = level = OrderedDict()
            if len(self._levels) > 1:
                self._levels = dict(sorted(self._levels.items(), reverse=True))
                level = self._levels[request.priority]
        level[request] = None
        request.level = level
        self.rows += request.rows

    def remove(self, request: PendingRequest) -> None:
        """Takes a request out, wherever it stands, in constant time."""
        level = request.level
        assert level is not None
        del level[request]
        request.level = None
        self.rows -= request.rows
        if not level:
            del self._levels[request.priority]

    def first(self) -> PendingRequest:
        """The one that is to run next."""
        return next(iter(next(iter(self._levels.values()))))

    def oldest(self) -> PendingRequest:
        """The one that has waited longest, whatever its priority."""
        if len(self._levels) == 1:
            return self.first()
        return min((next(iter(level)) for level in self._levels.values()), key=lambda request: request.came)

    def take(self, rows: int) -> list[PendingRequest]:
        """Takes requests of at most `rows` rows in all, in order; those too large for what is left are passed over."""
        taken: list[PendingRequest] = []
        passed = 0
        for request in self:
            if request.rows <= rows:
                taken.append(request)
                rows -= request.rows
                if not rows:
                    break
            elif (passed := passed + 1) >= _LOOKED_AT:
                break
        for request in taken:
            self.remove(request)
        return taken

    def __iter__(self) -> Iterator[PendingRequest]:
        for level in self._levels.values():
            yield from level

    def __bool__(self) -> bool:
        return bool(self._levels)


class Lane:
    """One function of a servable: what is known of it ahead, and its requests that wait.

    Not for several threads at once: the batcher's lock is held around all that touches what waits.

    Attributes:
      serial: whether requests run one by one and in order of arrival: those of a function with a state, or whose rows
        cannot be told apart.
    """

    def __init__(self, name: str, signature: Signature, grid: Sequence[Bucket], costs: Costs, *, stateful: bool):
        self.name = name
        self.signature = signature
        self.stateful = stateful
        self.joiner = Joiner(signature)
        self.quick = QuickCheck(signature)
        self.serial = stateful or not self.joiner.joins
        self.rows = 0
        self._grid = tuple(grid)
        self.shapes = _shapes(self._grid, signature.batch if signature.batch in signature.dims else None)
        self._dims = tuple(dim for dim, _ in self.shapes[0].sizes)
        self._within = tuple(_within(self.shapes, shape) for shape in self.shapes)
        self._costs = costs
        self._revision = -1
        self._ladders: tuple[Ladder, ...] = ()
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._waiting: dict[object, dict[int, Waiting]] = {}

    def classify(self, checked: CheckedTensors) -> tuple[int, int]:
        """The shape that a request is padded to, and the most rows that run at once in it.

        Raises:
          TooLarge: it fits no bucket and cannot run in parts.
        """
        sizes = checked.sizes
        key = tuple([sizes[dim] for dim in self._dims])
        fitting = self._known.get(key)
        if fitting is None:
            fitting = tuple(index for index, shape in enumerate(self.shapes) if shape.holds(sizes))
            if len(self._known) < _KNOWN_SIZES:
                self._known[key] = fitting
        rows = self.joiner.rows(checked)
        for index in fitting:
            if rows <= self.shapes[index].most:
                return index, self.shapes[index].most
        if not fitting or self.serial or not self.joiner.splits:
            choose(self._grid, sizes)  # raises: nothing fits
        largest = max(fitting, key=lambda index: self.shapes[index].most)
        return largest, self.shapes[largest].most

    def label(self, request: PendingRequest) -> str:
        """The label of the smallest bucket that holds a request."""
        return self.bucket(request.shape, request.rows).label

    def bucket(self, shape: int, rows: int) -> Bucket:
        """The cheapest bucket of a shape that holds so many rows."""
        return self.shapes[shape].buckets[self.ladders()[shape].fitting(rows)]

    def ladders(self) -> tuple[Ladder, ...]:
        """The batch sizes of each shape with their costs, as last measured."""
        revision = self._costs.revision
        if self._revision != revision:
            self._ladders = tuple(
                Ladder(tuple(shape.buckets), self._costs.ladder(self.name, shape.buckets)) for shape in self.shapes
            )
            self._revision = revision
        return self._ladders

    def add(self, request: PendingRequest) -> None:
        """Lets a request wait."""
        if self.serial:
            key, shape = None, 0
        else:
            key, shape = self.joiner.key(request.checked), request.shape
        group = self._waiting.get(key)
        if group is None:
            group = self._waiting[key] = {}
        waiting = group.get(shape)
        if waiting is None:
            waiting = group[shape] = Waiting()
        request.group = key
        waiting.add(request)
        self.rows += request.rows

    def remove(self, request: PendingRequest) -> None:
        """Takes a waiting request out."""
        shape = 0 if self.serial else request.shape
        self._waiting[request.group][shape].remove(request)
        self._left(request.group, shape, request.rows)

    def head(self, *, oldest: bool) -> PendingRequest | None:
        """The request that is to run next, or the one that has waited longest; None where none waits."""
        head: PendingRequest | None = None
        for group in self._waiting.values():
            for waiting in group.values():
                each = waiting.oldest() if oldest else waiting.first()
                if head is None or each.is_before(head, oldest=oldest):
                    head = each
        return head

    def take(self, head: PendingRequest) -> tuple[Bucket, list[PendingRequest]]:
        """The next batch and its bucket; `head` is in it."""
        self.remove(head)
        if self.serial:
            return self.bucket(head.shape, head.rows), [head]
        group = self._waiting.get(head.group)
        if not group:
            return self.bucket(head.shape, head.rows), [head]
        rows = {shape: waiting.rows for shape, waiting in group.items()}
        rows[head.shape] = rows.get(head.shape, 0) + head.rows
        run = plan(self.ladders(), self._within, rows, head.shape, head.rows)
        taken, free = [head], run.capacity - head.rows
        for shape in run.members:
            if free and (waiting := group.get(shape)):
                more = waiting.take(free)
                count = sum([request.rows for request in more])
                free -= count
                taken += more
                self._left(head.group, shape, count)
        return self.bucket(run.shape, run.capacity - free), taken

    def bucket_of(self, bucket: Bucket, requests: Sequence[PendingRequest]) -> Bucket:
        """The bucket for some of the requests that another was chosen for."""
        sizes = tuple(each for each in bucket.sizes if each[0] != self.signature.batch)
        shape = next(index for index, each in enumerate(self.shapes) if each.sizes == sizes)
        return self.bucket(shape, sum(request.rows for request in requests))

    def room(self, head: PendingRequest) -> int:
        """Rows of the cheapest batch that are still free."""
        return max(0, self.ladders()[head.shape].best - self.rows_beside(head))

    def is_full(self, head: PendingRequest) -> bool:
        """Whether nothing that arrives later could make the next batch cheaper by the row."""
        return self.serial or self.rows_beside(head) >= self.ladders()[head.shape].best

    def rows_beside(self, head: PendingRequest) -> int:
        """Rows that wait with a request's shape, its own included."""
        return self._waiting[head.group][0 if self.serial else head.shape].rows

    def saved_by_joining(self, head: PendingRequest) -> float:
        """The share of a row's cost that is saved when one more joins those that wait with `head`."""
        ladder, rows = self.ladders()[head.shape], self.rows_beside(head)
        alone = ladder.total(1)
        return (ladder.total(rows) + alone - ladder.total(rows + 1)) / alone

    def seconds(self, head: PendingRequest) -> float:
        """The cost of a request's own bucket."""
        ladder = self.ladders()[head.shape]
        return ladder.seconds[ladder.capacities.index(ladder.fitting(head.rows))]

    def backlog(self) -> float:
        """Seconds that all that waits will take."""
        return sum(
            self.ladders()[shape].total(waiting.rows)
            for group in self._waiting.values()
            for shape, waiting in group.items()
        )

    def drain(self) -> list[PendingRequest]:
        """Takes out all that waits."""
        left = [request for group in self._waiting.values() for waiting in group.values() for request in waiting]
        for request in left:
            request.level = None
        self._waiting.clear()
        self.rows = 0
        return left

    def _left(self, key: object, shape: int, rows: int) -> None:
        self.rows -= rows
        group = self._waiting[key]
        if not group[shape]:
            del group[shape]
            if not group:
                del self._waiting[key]


def _shapes(grid: Sequence[Bucket], batch: str | None) -> tuple[Shape, ...]:
    """The shapes of a grid, smallest first; a function without rows has buckets of one."""
    found: dict[tuple[tuple[str, int], ...], dict[int, Bucket]] = {}
    for bucket in grid:
        sizes = tuple(each for each in bucket.sizes if each[0] != batch)
        found.setdefault(sizes, {})[1 if batch is None else bucket[batch]] = bucket
    shapes = [Shape(sizes, dict(sorted(buckets.items()))) for sizes, buckets in found.items()]
    return tuple(sorted(shapes, key=lambda shape: (shape.volume(), shape.sizes)))


def _within(shapes: Sequence[Shape], shape: Shape) -> tuple[int, ...]:
    """Indices of the shapes whose requests fit into `shape`, itself aside, the largest first."""
    fitting = [index for index, other in enumerate(shapes) if other is not shape and shape.holds(dict(other.sizes))]
    return tuple(reversed(fitting))
