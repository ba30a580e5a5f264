"""Properties of padding: what is padded and cut again is what came, whatever the bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad

DTYPES = ("int32", "uint8", "int64", "float32", "float64", "bool")


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Signature, dict[str, Any], Bucket]:
    """A signature of up to three tensors over shared dimensions, values for them, and a bucket that holds these."""
    sizes = {dim: draw(st.integers(1, 5)) for dim in ("batch", "length", "width")}
    specs: list[TensorSpec] = []
    values: dict[str, Any] = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        shape = draw(st.lists(st.sampled_from(["batch", "length", "width", 3]), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        specs.append(TensorSpec(name, dtype, tuple(shape), pad=True if dtype == "bool" else draw(st.integers(0, 9))))
        values[name] = draw(hnp.arrays(dtype, tuple(dim if isinstance(dim, int) else sizes[dim] for dim in shape)))
    named = sorted({dim for spec in specs for dim in spec.dims})
    bucket = Bucket(tuple((dim, sizes[dim] + draw(st.integers(0, 3))) for dim in named))
    return Signature(tuple(specs), tuple(specs)), values, bucket


@given(tensors(), st.booleans())
def test_pad_then_cut_is_the_identity(case: tuple[Signature, dict[str, Any], Bucket], owned: bool) -> None:
    signature, values, bucket = case
    checked = check(signature, values, owned=owned)
    padded = pad(signature, bucket, checked)
    for spec, array in zip(signature.inputs, padded, strict=True):
        assert array.shape == spec.concrete(bucket.mapping())
        assert array.dtype == spec.dtype
        assert array.flags.c_contiguous
        outside = np.ones(array.shape, bool)
        outside[tuple(map(slice, values[spec.name].shape))] = False
        assert (array[outside] == spec.pad).all()
    result = cut(signature, checked.sizes, padded)
    for name, value in values.items():
        np.testing.assert_array_equal(result[name], value)
        assert not np.shares_memory(result[name], value)


@given(tensors())
def test_lists_and_arrays_mean_the_same(case: tuple[Signature, dict[str, Any], Bucket]) -> None:
    signature, values, bucket = case
    from_lists = check(signature, {name: value.tolist() for name, value in values.items()})
    for one, other in zip(
        pad(signature, bucket, from_lists), pad(signature, bucket, check(signature, values)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@st.composite
def rows(draw: st.DrawFn) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), min_size=1, max_size=6))


@given(rows(), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_ragged_rows_keep_their_elements_and_their_lengths(
    rows: list[list[int]], more_rows: int, more_length: int, arrays: bool
) -> None:
    signature = Signature(
        (TensorSpec("n", "int32", ("batch",)), TensorSpec("tokens", "int32", ("batch", "length"), pad=-7)),
        lengths={"n": "length"},
    )
    value = [np.array(row) for row in rows] if arrays else rows
    checked = check(signature, {"tokens": value})
    longest = max(map(len, rows))
    assert checked.sizes == {"batch": len(rows), "length": longest}
    bucket = Bucket.of(batch=len(rows) + more_rows, length=longest + more_length)
    n, tokens = pad(signature, bucket, checked)
    assert n.tolist() == [len(row) for row in rows] + [1] * more_rows
    expected = [row + [-7] * (bucket["length"] - len(row)) for row in rows]
    assert tokens.tolist() == expected + [[-7] * bucket["length"]] * more_rows
