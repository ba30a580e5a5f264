"""The buckets that observed shapes cost least in, under a limit of their number, by dynamic programming.

Along one dimension the answer is exact: a shape runs at the next size that is kept, and the sizes worth keeping are
among the observed ones. With several dimensions the shapes are divided into classes along the first one, `length` say,
each class a range of sizes that is padded to its largest; every class has sizes of its own along the next dimension,
and so on. Of all such grids the cheapest is found. A run may do better than that, never worse: where a bucket of a
longer class costs less than its own class's next one, it is free to take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core.errors import UsageError
from servax.stages.buckets import Bucket

Cost = Callable[[Bucket], float]
"""What one run of a bucket costs; more, or as much, for a larger one."""

Shapes = Mapping[Bucket, float]
"""Observed sizes with how often each came; 0 for sizes that must be served all the same."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class _Solved:
    """Least costs with at most 0, 1, 2... buckets, and the sizes that reach them."""

    costs: Floats
    sizes: Callable[[int], list[tuple[int, ...]]]


class Fitting:
    """The cheapest grids of one function, one for each limit.

    Args:
      shapes: all of the same dimensions.
      cost: of a bucket.
      most: the largest limit that is asked for.
      order: the dimensions, outermost first; the last is the one that each class has sizes of its own of.

    Attributes:
      costs: by limit, `[most + 1]`; infinite at 0.
    """

    def __init__(self, shapes: Shapes, cost: Cost, most: int, order: Sequence[str]) -> None:
        self._order = tuple(order)
        known: dict[tuple[int, ...], float] = {}

        def cost_of(sizes: tuple[int, ...]) -> float:
            if sizes not in known:
                known[sizes] = cost(self._bucket(sizes))
            return known[sizes]

        points = np.array([[bucket[dim] for dim in self._order] for bucket in shapes], np.int64)
        points = points.reshape(len(shapes), len(self._order))
        weights = np.array(list(shapes.values()), np.float64)
        self._solved = _solve(points, weights, (), cost_of, most)
        self.costs = self._solved.costs

    def buckets(self, limit: int) -> tuple[Bucket, ...]:
        """The cheapest grid of at most `limit` buckets, smallest first."""
        found = {self._bucket(sizes) for sizes in self._solved.sizes(limit)}
        return tuple(sorted(found, key=lambda bucket: (bucket.volume(), bucket.sizes)))

    def _bucket(self, sizes: tuple[int, ...]) -> Bucket:
        return Bucket.of(**dict(zip(self._order, sizes, strict=True)))


def share(costs: Mapping[str, Floats], limit: int) -> dict[str, int]:
    """How many of `limit` buckets each function has, so that all together cost least.

    Args:
      costs: of each function, by its own limit, as `Fitting.costs`.
      limit: of all together.

    Raises:
      UsageError: there are more functions than that.
    """
    if len(costs) > limit:
        raise UsageError(
            "each function needs a bucket", seen=f"a limit of {limit}", expected=f"at least {len(costs)} executables"
        )
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    taken: list[np.ndarray[Any, Any]] = []
    for of_function in costs.values():
        options = np.full((limit + 1, limit + 1), np.inf)  # [all together, of this function]
        for own in range(1, min(limit, len(of_function) - 1) + 1):
            options[own:, own] = best[: limit + 1 - own] + of_function[own]
        taken.append(options.argmin(1))
        best = options.min(1)
    left = int(best.argmin())
    shares: dict[str, int] = {}
    for name, choice in zip(reversed(list(costs)), reversed(taken), strict=True):
        shares[name] = int(choice[left])
        left -= shares[name]
    return {name: shares[name] for name in costs}


def expected(shapes: Shapes, buckets: Sequence[Bucket], cost: Cost) -> float:
    """What the shapes cost in these buckets, each in the cheapest it fits into; infinite where one fits into none."""
    costs = {bucket: cost(bucket) for bucket in buckets}
    total = 0.0
    for shape, weight in shapes.items():
        if not weight:
            continue
        sizes = shape.mapping()
        total += weight * min((costs[bucket] for bucket in buckets if bucket.fits(sizes)), default=np.inf)
    return total


def thin(shapes: Shapes, most: int) -> dict[Bucket, float]:
    """The shapes with at most `most` different sizes a dimension, others rounded up to the next one kept.

    The largest is kept, and of the others those that divide the observations evenly.
    """
    dims = [dim for dim, _ in next(iter(shapes)).sizes] if shapes else []
    kept: dict[str, np.ndarray[Any, Any]] = {}
    for dim in dims:
        sizes, where = np.unique([bucket[dim] for bucket in shapes], return_inverse=True)
        if len(sizes) > most:
            reached = np.cumsum(np.bincount(where, weights=list(shapes.values())))
            picked = np.searchsorted(reached, reached[-1] * np.arange(1, most) / most)
            sizes = sizes[np.unique([*picked, len(sizes) - 1])]
        kept[dim] = sizes
    thinned: dict[Bucket, float] = {}
    for bucket, weight in shapes.items():
        sizes = {dim: int(kept[dim][np.searchsorted(kept[dim], size)]) for dim, size in bucket.sizes}
        rounded = Bucket.of(**sizes)
        thinned[rounded] = thinned.get(rounded, 0.0) + weight
    return thinned


def _solve(
    points: np.ndarray[Any, Any], weights: Floats, prefix: tuple[int, ...], cost: Callable[..., float], most: int
) -> _Solved:
    """Grids for points `[n, dimensions]` within the outer sizes `prefix`."""
    if points.shape[1] == 0:
        costs = np.full(most + 1, np.inf)
        costs[1:] = cost(prefix) * weights.sum()
        return _Solved(costs, lambda _: [prefix])
    if points.shape[1] == 1:
        return _segments(points[:, 0], weights, prefix, cost, most)
    return _classes(points, weights, prefix, cost, most)


def _segments(
    sizes: np.ndarray[Any, Any], weights: Floats, prefix: tuple[int, ...], cost: Callable[..., float], most: int
) -> _Solved:
    """Along the last dimension: the sizes in order, cut into segments, each padded to its largest."""
    kept, where = np.unique(sizes, return_inverse=True)
    reached = np.concatenate([[0.0], np.cumsum(np.bincount(where, weights=weights, minlength=len(kept)))])
    prices = np.array([cost((*prefix, int(size))) for size in kept])
    count = len(kept)
    # [first size of the segment, its last one]: what the segment's observations cost at its largest size
    segment = np.where(np.tri(count, dtype=bool).T, (reached[None, 1:] - reached[:-1, None]) * prices, np.inf)
    best = np.concatenate([[0.0], np.full(count, np.inf)])
    costs = np.full(most + 1, np.inf)
    begins: list[np.ndarray[Any, Any]] = []
    for limit in range(1, min(most, count) + 1):
        options = best[:count, None] + segment
        begins.append(options.argmin(0))
        best = np.concatenate([[np.inf], options.min(0)])
        costs[limit] = min(costs[limit - 1], best[count])
    costs[min(most, count) + 1 :] = costs[min(most, count)]

    def chosen(limit: int) -> list[tuple[int, ...]]:
        layer = int(np.argmax(costs == costs[limit]))  # the fewest sizes that cost as little
        end, found = count, list[tuple[int, ...]]()
        for number in range(layer - 1, -1, -1):
            found.append((*prefix, int(kept[end - 1])))
            end = int(begins[number][end - 1])
        return found

    return _Solved(costs, chosen)


def _classes(
    points: np.ndarray[Any, Any], weights: Floats, prefix: tuple[int, ...], cost: Callable[..., float], most: int
) -> _Solved:
    """Along an outer dimension: the sizes in order, cut into classes, each with a grid of its own."""
    ordered = np.argsort(points[:, 0], kind="stable")
    points, weights = points[ordered], weights[ordered]
    kept, begins = np.unique(points[:, 0], return_index=True)
    bounds = [*map(int, begins), len(points)]
    count = len(kept)

    def grid(first: int, end: int) -> _Solved:
        rows = slice(bounds[first], bounds[end])
        return _solve(points[rows, 1:], weights[rows], (*prefix, int(kept[end - 1])), cost, most)

    best = np.full((count + 1, most + 1), np.inf)  # [sizes covered, buckets used]
    best[0, 0] = 0.0
    taken = np.zeros((count + 1, most + 1, 2), np.int64)  # where the last class begins, and its buckets
    for end in range(1, count + 1):
        of_class = np.stack([grid(first, end).costs for first in range(end)])
        for limit in range(1, most + 1):
            options = best[:end, limit - 1 :: -1] + of_class[:, 1 : limit + 1]
            first, own = divmod(int(options.argmin()), limit)
            best[end, limit] = options[first, own]
            taken[end, limit] = first, own + 1

    def chosen(limit: int) -> list[tuple[int, ...]]:
        end, left, found = count, int(best[count, : limit + 1].argmin()), list[tuple[int, ...]]()
        while end:
            first, own = map(int, taken[end, left])
            found += grid(first, end).sizes(own)
            end, left = first, left - own
        return found

    return _Solved(np.minimum.accumulate(best[count]), chosen)
