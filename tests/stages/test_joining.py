from __future__ import annotations

import numpy as np
import pytest

from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.stages.joining import Joiner, nbytes
from servax.stages.padding import check


def spec(name: str, dtype: str, *shape: int | str, pad: int = 0, default: float | None = None) -> TensorSpec:
    return TensorSpec(name, dtype, tuple(shape), pad, default)


def filled(joiner: Joiner, bucket: Bucket, signature: Signature, *requests, owned=False):
    checked = [check(signature, tensors, owned=owned) for tensors in requests]
    buffers = joiner.buffers(bucket)
    for buffer in buffers:
        buffer[...] = 77  # what an earlier batch has left
    return joiner.fill(buffers, checked), checked, buffers


def test_rows_of_different_lengths_stand_below_one_another_with_padding_around_them():
    signature = Signature(
        (spec("n", "int32", "batch"), spec("w", "float32", "batch", "length", default=0.5),
         spec("x", "int32", "batch", "length", pad=9)),
        lengths={"n": "length"},
    )  # fmt: skip
    joiner = Joiner(signature)
    bucket = Bucket.of(batch=5, length=3)
    (n, w, x), checked, _ = filled(joiner, bucket, signature, {"x": [[1, 2]]}, {"x": [[3], [4, 5, 6]]})
    assert x.tolist() == [[1, 2, 9], [3, 9, 9], [4, 5, 6], [9, 9, 9], [9, 9, 9]]
    assert n.tolist() == [2, 1, 3, 1, 1]
    assert w.tolist() == [[0.5, 0.5, 0], [0.5, 0, 0], [0.5, 0.5, 0.5], [0, 0, 0], [0, 0, 0]]
    assert [joiner.rows(each) for each in checked] == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "bfloat16", "uint8"])
def test_rows_of_fixed_shape_are_joined_whatever_their_dtype(dtype):
    signature = Signature((spec("x", dtype, "batch", 2),))
    values = [np.arange(2 * rows).reshape(rows, 2).astype(signature.inputs[0].numpy_dtype) for rows in (1, 2)]
    (x,), _, _ = filled(Joiner(signature), Bucket.of(batch=4), signature, *({"x": value} for value in values))
    np.testing.assert_array_equal(x[:3], np.concatenate(values))
    assert not x[3:].any()
    assert x.dtype == values[0].dtype


def test_an_owned_array_of_the_bucket_s_shape_goes_as_it_is_and_no_other_does():
    signature = Signature((spec("x", "float32", "batch", 2),))
    x = np.ones((1, 2), np.float32)
    joiner, bucket = Joiner(signature), Bucket.of(batch=1)
    assert filled(joiner, bucket, signature, {"x": x}, owned=True)[0][0] is x
    assert not np.shares_memory(filled(joiner, bucket, signature, {"x": x})[0][0], x)
    assert not np.shares_memory(filled(joiner, Bucket.of(batch=2), signature, {"x": x}, owned=True)[0][0], x)


def test_rows_along_another_axis_than_the_first_are_joined_along_it():
    signature = Signature((spec("x", "float32", "length", "batch"),), (spec("y", "float32", "length", "batch"),))
    joiner = Joiner(signature)
    one, two = np.array([[1.0], [2.0]], np.float32), np.array([[3.0, 4.0]], np.float32)
    (x,), checked, _ = filled(joiner, Bucket.of(batch=4, length=2), signature, {"x": one}, {"x": two})
    assert x.tolist() == [[1, 3, 4, 0], [2, 0, 0, 0]]
    cut = joiner.cut(checked, [x])
    np.testing.assert_array_equal(cut[0]["y"], one)
    np.testing.assert_array_equal(cut[1]["y"], two)


def test_outputs_are_cut_to_each_request_s_own_sizes_and_are_no_views():
    signature = Signature(
        (spec("x", "float32", "batch", "length"),),
        (spec("a", "float32", "batch", "length"), spec("b", "float32", "batch", 2), spec("c", "float32", "length")),
    )
    joiner = Joiner(signature)
    checked = [check(signature, {"x": np.ones(shape, np.float32)}) for shape in ((1, 3), (2, 1))]
    outputs = [np.arange(16.0).reshape(4, 4), np.arange(8.0).reshape(4, 2), np.arange(4.0)]
    one, two = joiner.cut(checked, outputs)
    assert (one["a"].tolist(), two["a"].tolist()) == ([[0, 1, 2]], [[4], [8]])
    assert (one["b"].tolist(), two["b"].tolist()) == ([[0, 1]], [[2, 3], [4, 5]])
    assert (one["c"].tolist(), two["c"].tolist()) == ([0, 1, 2], [0])
    for result in (one, two):
        for array in result.values():
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert not any(np.shares_memory(array, output) for output in outputs)


def test_who_keeps_a_row_of_a_large_output_does_not_keep_them_all():
    signature = Signature((spec("x", "int32", "batch"),), (spec("y", "float32", "batch", 1 << 20),))
    checked = [check(signature, {"x": [1]}), check(signature, {"x": [2]})]
    one, _ = Joiner(signature).cut(checked, [np.zeros((2, 1 << 20), np.float32)])
    assert one["y"].base is None


def test_only_what_tells_rows_apart_is_joined_or_split():
    x = spec("x", "float32", "batch", "length")
    rows = Signature((x,), (spec("y", "float32", "batch"),))
    constant = Signature((x,), (spec("y", "float32", "batch"), spec("positions", "float32", "length")))
    twice = Signature((x,), (spec("y", "float32", "2*batch"),))
    gram = Signature((x,), (spec("y", "float32", "batch", "batch"),))
    none = Signature((spec("x", "float32", 4),), (), batch=None)
    assert [(j.joins, j.splits) for j in map(Joiner, (rows, constant, twice, gram, none))] == [
        (True, True), (True, False), (False, False), (False, False), (False, False),
    ]  # fmt: skip


def test_inputs_without_rows_must_be_equal_and_large_ones_are_not_compared():
    signature = Signature((spec("big", "float32", 2000, default=0), spec("t", "float32"), spec("x", "int32", "batch")))
    joiner = Joiner(signature)

    def key(**tensors):
        return joiner.key(check(signature, {"x": [1], **tensors}))

    assert key(t=1.0) == key(t=1.0)
    assert key(t=1.0) != key(t=2.0)
    big = np.zeros(2000, np.float32)
    assert key(t=1.0, big=big) != key(t=1.0, big=big)
    assert Joiner(Signature((spec("x", "int32", "batch"),))).key(check(signature, {"x": [1], "t": 1.0})) is None


def test_a_request_in_parts_gives_back_the_whole():
    signature = Signature(
        (spec("n", "int32", "batch"), spec("t", "float32"), spec("x", "int32", "batch", "length")),
        (spec("y", "int32", "batch", "length"), spec("z", "int32", "batch")),
        lengths={"n": "length"},
    )
    joiner = Joiner(signature)
    rows = [[1], [2, 3, 4], [5, 6], [7], [8, 9]]
    checked = check(signature, {"x": rows, "t": 1.0})
    parts = joiner.split(checked, 2)
    assert [joiner.rows(part) for part in parts] == [2, 2, 1]
    assert [part.sizes["length"] for part in parts] == [3, 3, 3]
    outputs = []
    for part in parts:
        n, _, x = joiner.fill(joiner.buffers(Bucket.of(batch=2, length=4)), [part])
        (cut,) = joiner.cut([part], [x, n])
        outputs.append(cut)
    whole = joiner.rejoin(outputs)
    assert whole["y"].tolist() == [row + [0] * (3 - len(row)) for row in rows]
    assert whole["z"].tolist() == [1, 3, 2, 1, 2]
    assert sum(map(nbytes, parts)) == nbytes(checked) + 2 * 4  # the shared input is counted with each part
