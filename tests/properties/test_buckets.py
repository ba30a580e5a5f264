"""Properties of buckets: labels, the choice of one, the grid."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servax.core.errors import TooLarge
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import STATIC, Bucket, choose, make_grid

names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=8).filter(str.isidentifier)
sizes = st.integers(1, 10**6)
any_bucket = st.dictionaries(names, sizes, max_size=4).map(lambda mapping: Bucket(tuple(sorted(mapping.items()))))
dims = ("batch", "length")
buckets = st.lists(
    st.tuples(*(st.integers(1, 40) for _ in dims)).map(lambda pair: Bucket.of(batch=pair[0], length=pair[1])),
    min_size=1,
    max_size=8,
)


@given(any_bucket)
def test_a_label_reads_back(bucket: Bucket) -> None:
    assert Bucket.parse(bucket.label) == bucket
    assert (bucket.label == STATIC) == (not bucket.sizes)
    assert "/" not in bucket.label


@given(any_bucket)
def test_a_bucket_fits_itself_and_nothing_larger(bucket: Bucket) -> None:
    assert bucket.fits(bucket.mapping())
    for dim, size in bucket.sizes:
        assert not bucket.fits({**bucket.mapping(), dim: size + 1})


@given(buckets, st.integers(1, 50), st.integers(1, 50))
def test_choose_returns_the_smallest_that_fits(grid: list[Bucket], batch: int, length: int) -> None:
    request = {"batch": batch, "length": length}
    fitting = [each["batch"] * each["length"] for each in grid if batch <= each["batch"] and length <= each["length"]]
    if not fitting:
        with pytest.raises(TooLarge):
            choose(grid, request)
        return
    chosen = choose(grid, request)
    assert chosen in grid
    assert chosen.fits(request)
    assert chosen["batch"] * chosen["length"] == min(fitting)


@given(st.dictionaries(names, st.lists(sizes, min_size=1, max_size=4), max_size=3))
def test_a_grid_is_the_product_of_its_sizes(by_dim: dict[str, list[int]]) -> None:
    spec = TensorSpec("x", "int32", tuple(by_dim))
    function = Function("predict", Signature((spec,)), lambda params, state, inputs: (None, inputs))
    options = [f"{dim}={','.join(map(str, values))}" for dim, values in by_dim.items()]
    grid = make_grid({"predict": function}, options)["predict"]
    count = 1
    for values in by_dim.values():
        count *= len(set(values))
    assert len(set(grid)) == len(grid) == count
    assert all(bucket[dim] in values for bucket in grid for dim, values in by_dim.items())
    volumes = [bucket.volume() for bucket in grid]
    assert volumes == sorted(volumes)
    largest = {dim: max(values) for dim, values in by_dim.items()}
    assert choose(grid, largest).mapping() == largest
