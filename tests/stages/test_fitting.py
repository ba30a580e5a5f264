"""Grids fitted to shapes: by hand, and against every grid there is."""

from __future__ import annotations

from itertools import chain, combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servax.core.errors import UsageError
from servax.stages.buckets import Bucket
from servax.stages.fitting import Fitting, expected, share, thin


def volume(bucket: Bucket) -> float:
    return float(bucket.volume())


def batches(weights: dict[int, float]) -> dict[Bucket, float]:
    return {Bucket.of(batch=size): weight for size, weight in weights.items()}


def test_one_dimension_by_hand() -> None:
    # Nine requests of 1 row, one of 7, one of 8. One bucket: 11 x 8. Two: 9 x 1 + 2 x 8 beats 10 x 7 + 8.
    shapes = batches({1: 9, 7: 1, 8: 1})
    fitting = Fitting(shapes, volume, 4, ["batch"])
    assert fitting.costs.tolist() == [np.inf, 88, 25, 24, 24]
    assert fitting.buckets(1) == (Bucket.of(batch=8),)
    assert fitting.buckets(2) == (Bucket.of(batch=1), Bucket.of(batch=8))
    assert fitting.buckets(3) == fitting.buckets(4) == tuple(Bucket.of(batch=size) for size in (1, 7, 8))


def test_what_must_be_served_is_there_though_nothing_came() -> None:
    shapes = batches({1: 9, 3: 4, 16: 0})
    fitting = Fitting(shapes, volume, 3, ["batch"])
    assert fitting.buckets(1) == (Bucket.of(batch=16),)
    assert fitting.buckets(2) == (Bucket.of(batch=3), Bucket.of(batch=16))
    assert fitting.costs.tolist() == [np.inf, 13 * 16, 13 * 3, 9 + 12]


def test_a_fixed_price_of_each_run_does_not_change_the_number_of_buckets() -> None:
    fitting = Fitting(batches({1: 1, 2: 1}), lambda _: 5.0, 3, ["batch"])
    assert fitting.costs.tolist() == [np.inf, 10, 10, 10]
    assert fitting.buckets(3) == (Bucket.of(batch=2),)


def test_two_dimensions_by_hand() -> None:
    # Short runs are many rows, long ones few; (8, 64) must be served. Two buckets: of
    # classes 16 and 64 with 8 rows each, 10 x 128 + 10 x 512, or of one class with 1 and 8 rows, which is less.
    shapes = {
        Bucket.of(batch=8, length=16): 10.0,
        Bucket.of(batch=1, length=64): 10.0,
        Bucket.of(batch=8, length=64): 0.0,
    }
    fitting = Fitting(shapes, volume, 3, ["length", "batch"])
    assert fitting.costs.tolist() == [np.inf, 20 * 512, 10 * 512 + 10 * 64, 10 * 128 + 10 * 64]
    assert set(fitting.buckets(3)) == set(shapes)


def test_no_dimension_is_one_bucket() -> None:
    fitting = Fitting({Bucket(()): 3.0}, lambda _: 2.0, 2, [])
    assert fitting.costs.tolist() == [np.inf, 6, 6]
    assert fitting.buckets(2) == (Bucket(()),)


sizes = st.integers(1, 12)
weights = st.integers(0, 9).map(float)
prices = st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 3))


@settings(deadline=None, database=None)
@given(st.dictionaries(sizes, weights, min_size=1, max_size=7), st.integers(1, 5), prices)
def test_one_dimension_is_as_good_as_every_grid(by_size: dict[int, float], limit: int, price: tuple[int, ...]) -> None:
    def cost(bucket: Bucket) -> float:
        return price[0] + price[1] * bucket["batch"] + price[2] * bucket["batch"] ** 2

    shapes = batches(by_size)
    fitting = Fitting(shapes, cost, limit, ["batch"])
    largest = max(by_size)
    others = [size for size in range(1, 13) if size < largest]  # also sizes that nothing has
    tried = [
        [Bucket.of(batch=size) for size in (*kept, largest)]
        for number in range(limit)
        for kept in combinations(others, number)
    ]
    best = min(expected(shapes, grid, cost) for grid in tried)
    assert fitting.costs[limit] == pytest.approx(best)
    assert expected(shapes, fitting.buckets(limit), cost) == pytest.approx(best)
    assert len(fitting.buckets(limit)) <= limit


def class_grids(shapes: dict[Bucket, float], limit: int) -> list[list[tuple[int, int, Bucket]]]:
    """Every grid of classes of lengths with own batches: each entry `(over, up to, bucket)`."""
    lengths = sorted({bucket["length"] for bucket in shapes})
    grids: list[list[tuple[int, int, Bucket]]] = []
    for cuts in product([False, True], repeat=len(lengths) - 1):
        ends = [length for length, cut in zip(lengths, (*cuts, True), strict=True) if cut]
        ways: list[list[list[tuple[int, int, Bucket]]]] = []
        for low, high in zip((0, *ends), ends, strict=False):
            here = sorted({bucket["batch"] for bucket in shapes if low < bucket["length"] <= high})
            ways.append(
                [
                    [(low, high, Bucket.of(batch=batch, length=high)) for batch in (*some, here[-1])]
                    for number in range(len(here))
                    for some in combinations(here[:-1], number)
                ]
            )
        grids += [list(chain.from_iterable(parts)) for parts in product(*ways)]
    return [grid for grid in grids if len(grid) <= limit]


@settings(deadline=None, database=None, max_examples=60)
@given(
    st.dictionaries(st.tuples(st.integers(1, 4), st.integers(1, 4)), weights, min_size=1, max_size=7),
    st.integers(1, 5),
    prices,
)
def test_two_dimensions_are_as_good_as_every_grid_of_classes(
    by_size: dict[tuple[int, int], float], limit: int, price: tuple[int, ...]
) -> None:
    def cost(bucket: Bucket) -> float:
        return price[0] + price[1] * bucket.volume() + price[2] * bucket["length"]

    shapes = {Bucket.of(batch=batch, length=length): weight for (batch, length), weight in by_size.items()}

    def in_own_class(grid: list[tuple[int, int, Bucket]]) -> float:
        return sum(
            weight
            * min(
                cost(bucket)
                for low, high, bucket in grid
                if low < shape["length"] <= high and shape["batch"] <= bucket["batch"]
            )
            for shape, weight in shapes.items()
        )

    fitting = Fitting(shapes, cost, limit, ["length", "batch"])
    assert fitting.costs[limit] == pytest.approx(min(map(in_own_class, class_grids(shapes, limit))))
    found = fitting.buckets(limit)
    assert len(found) <= limit
    assert expected(shapes, found, cost) <= fitting.costs[limit] * (1 + 1e-12)  # free to take any bucket


@settings(deadline=None, database=None, max_examples=30)
@given(st.dictionaries(st.tuples(*[st.integers(1, 3)] * 3), weights, min_size=1, max_size=5))
def test_as_many_buckets_as_shapes_cost_what_the_shapes_do(by_size: dict[tuple[int, int, int], float]) -> None:
    shapes = {Bucket.of(batch=a, height=b, width=c): weight for (a, b, c), weight in by_size.items()}
    fitting = Fitting(shapes, volume, len(shapes), ["height", "width", "batch"])
    assert fitting.costs[-1] == pytest.approx(sum(weight * volume(shape) for shape, weight in shapes.items()))
    assert all(any(bucket.fits(shape.mapping()) for bucket in fitting.buckets(1)) for shape in shapes)


def test_buckets_are_shared_where_they_save_most() -> None:
    costs = {"a": np.array([np.inf, 100, 10, 9, 8]), "b": np.array([np.inf, 50, 40, 35, 34])}
    assert share(costs, 2) == {"a": 1, "b": 1}
    assert share(costs, 3) == {"a": 2, "b": 1}
    assert share(costs, 5) == {"a": 2, "b": 3}
    with pytest.raises(UsageError, match="each function needs a bucket"):
        share(costs, 1)


def test_thinned_shapes_keep_the_largest_and_their_number() -> None:
    shapes = {Bucket.of(length=length): 1.0 for length in range(1, 101)}
    thinned = thin(shapes, 10)
    assert sorted(bucket["length"] for bucket in thinned) == list(range(10, 101, 10))
    assert set(thinned.values()) == {10.0}
    assert thin(shapes, 100) == shapes
    assert thin({}, 3) == {}


def test_a_shape_that_fits_nowhere_has_no_price() -> None:
    assert expected(batches({9: 1}), [Bucket.of(batch=8)], volume) == np.inf
