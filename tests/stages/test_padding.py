from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core.errors import InvalidInput
from servax.core.tensors import Scalar, Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad


def signature(
    lengths: dict[str, str] | None = None,
    pads: dict[str, Scalar] | None = None,
    outputs: dict[str, str] | None = None,
    **inputs: str,
) -> Signature:
    pads = pads or {}
    specs = [TensorSpec.parse(name, text, pad=pads.get(name, 0)) for name, text in sorted(inputs.items())]
    outs = [TensorSpec(name, "float32", tuple(_dim(d) for d in t.split(","))) for name, t in (outputs or {}).items()]
    return Signature(tuple(specs), tuple(outs), lengths=lengths or {})


def _dim(text: str) -> int | str:
    return int(text) if text.isdigit() else text


TOKENS = signature(tokens="int32[batch, length]")
MASKED = signature(tokens="int32[batch, length]", mask="int32[batch, length]", pads={"tokens": 9})


def refused(sig: Signature, **tensors: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        check(sig, tensors)
    assert caught.value.status == 400
    return caught.value


def test_sizes_come_from_the_tensors() -> None:
    checked = check(TOKENS, {"tokens": np.zeros((2, 5), np.int32)})
    assert checked.sizes == {"batch": 2, "length": 5}
    assert checked.row_lengths == {}


def test_padding_holds_the_pad_value() -> None:
    checked = check(MASKED, {"tokens": [[1, 2, 3]], "mask": [[1, 1, 1]]})
    mask, tokens = pad(MASKED, Bucket.of(batch=2, length=4), checked)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [[1, 2, 3, 9], [9, 9, 9, 9]]
    assert mask.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]


def test_inputs_come_in_order_of_name_whatever_the_signature_has() -> None:
    unordered = Signature(tuple(reversed(MASKED.inputs)))
    checked = check(unordered, {"tokens": [[1]], "mask": [[0]]})
    mask, tokens = pad(unordered, Bucket.of(batch=1, length=1), checked)
    assert (mask.tolist(), tokens.tolist()) == ([[0]], [[1]])


def test_ragged_rows_are_padded_one_by_one_and_cut_to_the_longest() -> None:
    sig = signature(tokens="int32[batch, length]", pads={"tokens": -1}, outputs={"output": "batch,length"})
    checked = check(sig, {"tokens": [[1, 2, 3], [4]]})
    assert checked.sizes == {"batch": 2, "length": 3}
    assert checked.row_lengths["length"].tolist() == [3, 1]
    (tokens,) = pad(sig, Bucket.of(batch=3, length=4), checked)
    assert tokens.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [-1, -1, -1, -1]]
    assert cut(sig, checked.sizes, [tokens.astype(np.float32)])["output"].tolist() == [[1, 2, 3], [4, -1, -1]]


def test_ragged_rows_with_axes_before_and_after() -> None:
    sig = signature(x="float32[batch, 2, length, width]")
    first, second = np.ones((2, 3, 2), np.float32), np.full((2, 1, 2), 2, np.float32)
    checked = check(sig, {"x": [first, second]})
    (x,) = pad(sig, Bucket.of(batch=2, length=4, width=3), checked)
    expected = np.zeros((2, 2, 4, 3), np.float32)
    expected[0, :, :3, :2] = 1
    expected[1, :, :1, :2] = 2
    np.testing.assert_array_equal(x, expected)


LENGTHS = signature(tokens="int32[batch, length]", n="int32[batch]", lengths={"n": "length"})


def test_lengths_are_filled_in_and_are_one_in_padding_rows() -> None:
    bucket = Bucket.of(batch=3, length=4)
    n, _ = pad(LENGTHS, bucket, check(LENGTHS, {"tokens": [[1, 2, 3], [4]]}))
    assert n.dtype == np.int32
    assert n.tolist() == [3, 1, 1]
    n, _ = pad(LENGTHS, bucket, check(LENGTHS, {"tokens": [[1, 2, 3], [4, 5, 6]]}))
    assert n.tolist() == [3, 3, 1]


def test_a_function_without_batch_has_one_length() -> None:
    sig = Signature(
        (TensorSpec.parse("n", "int32[]"), TensorSpec.parse("x", "float32[length]")),
        batch=None,
        lengths={"n": "length"},
    )
    n, x = pad(sig, Bucket.of(length=4), check(sig, {"x": [1.0, 2.0]}))
    assert n.tolist() == 2
    assert x.tolist() == [1, 2, 0, 0]
    n, _ = pad(sig, Bucket.of(length=4), check(sig, {"x": [1.0, 2.0], "n": 1}))
    assert n.tolist() == 1


def test_only_rows_of_the_batch_may_be_ragged() -> None:
    error = refused(signature(x="int32[height, width]"), x=[[1, 2], [3]])
    assert error.where == "x"
    assert error.seen == "rows of different length"
    assert "int32[height, width]" in str(error.expected)


def test_lengths_may_be_given() -> None:
    checked = check(LENGTHS, {"tokens": [[1, 2, 0], [4, 0, 0]], "n": [2, 1]})
    assert checked.row_lengths["length"].tolist() == [2, 1]
    n, _ = pad(LENGTHS, Bucket.of(batch=4, length=4), checked)
    assert n.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("n", [[0, 1], [1, 4]])
def test_lengths_beyond_the_tensor(n: list[int]) -> None:
    error = refused(LENGTHS, tokens=[[1, 2, 3], [4, 5, 6]], n=n)
    assert error.where == "n"
    assert error.seen == f"values from {n[0]} to {n[1]}"
    assert error.expected == "1 to length=3"


def test_lengths_that_contradict_ragged_rows() -> None:
    error = refused(LENGTHS, tokens=[[1, 2, 3], [4]], n=[3, 2])
    assert error.where == "tokens"
    assert error.seen == "rows of length 3, 1"
    assert error.expected == "as in n: 3, 2"


def test_two_ragged_tensors_agree_row_by_row() -> None:
    checked = check(MASKED, {"tokens": [[1, 2], [3]], "mask": [[1, 1], [1]]})
    assert checked.row_lengths["length"].tolist() == [2, 1]
    assert refused(MASKED, tokens=[[1, 2], [3]], mask=[[1], [1, 1]]).where == "tokens"


DEFAULT = signature(tokens="int32[batch, length]", weight="float32[batch, length] = 1.5", pads={"weight": -1})


def test_a_tensor_left_out_holds_its_default_where_the_request_has_elements() -> None:
    _, weight = pad(DEFAULT, Bucket.of(batch=3, length=4), check(DEFAULT, {"tokens": [[1, 2, 3], [4]]}))
    assert weight.tolist() == [[1.5, 1.5, 1.5, -1], [1.5, -1, -1, -1], [-1, -1, -1, -1]]


def test_a_default_without_the_batch_knows_no_rows() -> None:
    sig = signature(tokens="int32[batch, length]", bias="float32[3, length] = 1.0")
    bias, _ = pad(sig, Bucket.of(batch=2, length=3), check(sig, {"tokens": [[1, 2], [3]]}))
    assert bias.tolist() == [[1, 1, 0]] * 3


def test_a_tensor_with_a_default_may_be_given() -> None:
    _, weight = pad(DEFAULT, Bucket.of(batch=1, length=2), check(DEFAULT, {"tokens": [[1]], "weight": [[2.0]]}))
    assert weight.tolist() == [[2.0, -1]]


def test_a_tensor_whose_dimension_nothing_tells_cannot_be_left_out() -> None:
    sig = signature(tokens="int32[batch]", bias="float32[heads] = 0.0")
    error = refused(sig, tokens=[1])
    assert error.where == "bias"
    assert "no other tensor has its dimension 'heads'" in str(error.seen)


SEEDED = signature(tokens="int32[batch]", seed="uint32[batch]")


def test_a_seed_left_out_comes_from_the_operating_system() -> None:
    bucket = Bucket.of(batch=4)
    draws = [pad(SEEDED, bucket, check(SEEDED, {"tokens": [1, 2]}))[0] for _ in range(4)]
    assert all(draw.dtype == np.uint32 and draw.shape == (4,) for draw in draws)
    assert len({int(value) for draw in draws for value in draw[:2]}) > 4


def test_a_seed_may_be_given() -> None:
    assert pad(SEEDED, Bucket.of(batch=2), check(SEEDED, {"tokens": [1], "seed": [7]}))[0].tolist() == [7, 0]


def test_a_seed_of_another_dtype_is_an_ordinary_input() -> None:
    assert refused(signature(tokens="int32[batch]", seed="int32[batch]"), tokens=[1]).seen == "missing"


def test_nothing_of_the_callers_memory_is_shared() -> None:
    for shape in ((2, 4), (1, 3)):
        array = np.ones(shape, np.int32)
        (tokens,) = pad(TOKENS, Bucket.of(batch=2, length=4), check(TOKENS, {"tokens": array}))
        assert not np.shares_memory(array, tokens)


def test_what_needs_no_padding_and_is_owned_is_not_copied_again() -> None:
    bucket = Bucket.of(batch=2, length=4)
    array = np.ones((2, 4), np.int32)
    assert pad(TOKENS, bucket, check(TOKENS, {"tokens": array}, owned=True))[0] is array
    for value in ([[1, 2, 3, 4]] * 2, np.ones((2, 4), np.int64)):
        checked = check(TOKENS, {"tokens": value})
        assert pad(TOKENS, bucket, checked)[0] is checked.tensors["tokens"]
    turned = np.ones((4, 2), np.int32).T
    assert pad(TOKENS, bucket, check(TOKENS, {"tokens": turned}, owned=True))[0].flags.c_contiguous


def test_large_buffers_are_aligned_for_a_transfer_without_copy() -> None:
    bucket = Bucket.of(batch=8, length=4096)
    for length in (4096, 4000):
        (tokens,) = pad(TOKENS, bucket, check(TOKENS, {"tokens": np.ones((8, length), np.int32)}))
        assert tokens.ctypes.data % 64 == 0
        assert tokens.sum() == 8 * length


def test_nan_passes() -> None:
    sig = signature(x="float32[batch]")
    assert np.isnan(pad(sig, Bucket.of(batch=1), check(sig, {"x": [float("nan")]}))[0]).all()


def test_one_fault() -> None:
    error = refused(TOKENS, tokens=np.zeros((1, 2)))
    assert error.what == "the tensor 'tokens' does not fit the signature"
    assert error.where == "tokens"
    assert error.seen == "float64[1, 2]"
    assert error.expected == "int32[batch, length]"
    assert error.remedy == "convert it: tokens.astype('int32')"


def test_every_fault_is_listed() -> None:
    sig = signature(a="int32[batch, 3]", b="int32[batch]", c="int32[batch]", d="int32[batch]", e="float32[2, 2]")
    error = refused(sig, a=np.zeros((2, 4), np.int32), b=[1, 2, 3], c=["x", "y"], e=[[1.0]], f=1)
    assert error.what == "6 tensors do not fit the signature"
    assert error.where == "a, b, c, e, d, f"
    assert str(error.seen).split("; ") == [
        "a: int32[2, 4]: size 4",
        "b: int32[3]: batch=3",
        "c: string[2]",
        "e: float32[1, 1]: size 1, size 1",
        "d: missing",
        "f: unknown",
    ]
    assert str(error.expected).split("; ") == [
        "a: int32[batch, 3]: 3",
        "b: int32[batch]: batch=2, as in a",
        "c: int32[batch]",
        "e: float32[2, 2]: 2, 2",
        "d: int32[batch]",
        "f: one of a, b, c, d, e",
    ]


@pytest.mark.parametrize("tokens", [[], [[]], np.zeros((0, 4), np.int32), np.zeros((2, 0), np.int32)])
def test_no_rows_and_no_elements(tokens: Any) -> None:
    error = refused(TOKENS, tokens=tokens)
    assert "no rows" in str(error.seen) or "=0" in str(error.seen)


def test_cut_takes_affine_dimensions() -> None:
    sig = signature(tokens="int32[batch, length]", outputs={"a": "batch,2*length+1", "b": "batch,4", "c": "batch"})
    outputs = [np.arange(3 * 9.0).reshape(3, 9), np.zeros((3, 4)), np.arange(3.0)]
    result = cut(sig, {"batch": 2, "length": 3}, outputs)
    assert list(result) == ["a", "b", "c"]
    assert result["a"].tolist() == [[0, 1, 2, 3, 4, 5, 6], [9, 10, 11, 12, 13, 14, 15]]
    assert result["b"].shape == (2, 4)
    assert result["c"].tolist() == [0, 1]


def test_cut_gives_memory_of_its_own() -> None:
    sig = signature(x="float32[batch]", outputs={"y": "batch"})
    for output in (np.zeros(4, np.float32), jnp.zeros(4)):
        result = cut(sig, {"batch": 4}, [output])["y"]
        assert result.flags.owndata
        assert result.flags.writeable
        result[:] = 1
        assert np.asarray(output).tolist() == [0, 0, 0, 0]


def test_cut_copies_from_the_device_under_the_transfer_guard() -> None:
    sig = signature(x="float32[batch]", outputs={"y": "batch"})
    output = jnp.arange(4.0)
    with jax.transfer_guard("disallow"), jax.no_tracing(True):
        assert cut(sig, {"batch": 3}, [output])["y"].tolist() == [0, 1, 2]


def test_a_function_of_scalars_and_fixed_shapes() -> None:
    sig = signature(t="float32[]", x="float32[2]", outputs={"y": "2"})
    checked = check(sig, {"t": 0.5, "x": [1.0, 2.0]})
    t, x = pad(sig, Bucket(()), checked)
    assert (float(t), x.tolist()) == (0.5, [1.0, 2.0])
    assert cut(sig, checked.sizes, [x])["y"].tolist() == [1.0, 2.0]
