import numpy as np
import pytest

from servax.core.tensors import Signature, TensorSpec
from servax.stages.padding import check
from servax.stages.quick import QuickCheck

SIGNATURE = Signature(
    (
        TensorSpec.parse("mask", "bool[batch, length]"),
        TensorSpec.parse("n", "int32[batch]"),
        TensorSpec.parse("weight", "float32[batch] = 1.0"),
        TensorSpec.parse("x", "float32[batch, length, 3]"),
    ),
    lengths={"n": "length"},
)


def tensors(**changes):
    given = {"x": np.ones((2, 5, 3), np.float32), "mask": np.ones((2, 5), bool)} | changes
    return {name: value for name, value in given.items() if value is not None}


def test_what_it_recognises_is_what_the_check_gives():
    quick, slow = QuickCheck(SIGNATURE)(tensors(), owned=True), check(SIGNATURE, tensors(), owned=True)
    assert quick is not None
    assert dict(quick.sizes) == dict(slow.sizes) == {"batch": 2, "length": 5}
    assert quick.owned == slow.owned
    assert dict(quick.row_lengths) == dict(slow.row_lengths) == {}
    assert QuickCheck(SIGNATURE)(tensors(), owned=False).owned == frozenset()


@pytest.mark.parametrize(
    "changes",
    [
        {"x": np.ones((2, 5, 3), np.float64)},
        {"x": np.ones((2, 5, 4), np.float32)},
        {"x": np.ones((2, 6, 3), np.float32)},
        {"x": np.ones((0, 5, 3), np.float32), "mask": np.ones((0, 5), bool)},
        {"x": np.ones((2, 5), np.float32)},
        {"x": [[[1.0] * 3] * 5] * 2},
        {"mask": None},
        {"n": np.array([5, 2], np.int32)},
        {"weight": np.ones(2, np.float32)},
        {"other": np.ones(2, np.float32), "mask": None},
    ],
)
def test_everything_else_is_left_to_the_check(changes):
    assert QuickCheck(SIGNATURE)(tensors(**changes), owned=True) is None


def test_seeds_and_texts_are_left_to_the_check():
    seeded = Signature((TensorSpec.parse("seed", "uint32[batch]"), TensorSpec.parse("x", "float32[batch]")))
    assert QuickCheck(seeded)({"x": np.ones(1, np.float32)}, owned=True) is None
    text = Signature((TensorSpec("text", "string", ("batch",)),))
    assert QuickCheck(text)({"text": np.array(["a"], object)}, owned=True) is None
