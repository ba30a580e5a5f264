import numpy as np

from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.targets import draws

SIGNATURE = Signature(
    (
        TensorSpec.parse("n", "int32[batch]"),
        TensorSpec.parse("tokens", "int32[batch, length]"),
        TensorSpec.parse("x", "float32[batch, length]", pad=7.0),
    ),
    (),
    batch="batch",
    lengths={"n": "length"},
)
BUCKET = Bucket.of(batch=4, length=8)


def test_floats_of_one_sign_keep_their_magnitudes_and_the_pad_values_past_a_rows_length():
    recipe = draws.padded(SIGNATURE, BUCKET, draws.Ranges(), "place")
    ordinary = {name: draw.array() for name, draw in recipe.items()}
    assert ordinary["n"].tolist() == [5, 2]
    inside = np.arange(5) < ordinary["n"][:, None]
    for negative, sign in ((True, -1), (False, 1)):
        inputs = draws.one_sided(recipe, negative=negative)
        assert inputs is not None
        np.testing.assert_array_equal(inputs["n"], ordinary["n"])
        np.testing.assert_array_equal(inputs["tokens"], ordinary["tokens"])
        np.testing.assert_array_equal(inputs["x"], np.where(inside, sign * np.abs(ordinary["x"]), 7.0))
        assert inputs["x"].dtype == np.float32


def test_a_pad_of_zero_stays_a_positive_zero():
    signature = Signature(
        (TensorSpec.parse("n", "int32[batch]"), TensorSpec.parse("x", "float32[batch, length]")),
        (),
        batch="batch",
        lengths={"n": "length"},
    )
    inputs = draws.one_sided(draws.padded(signature, BUCKET, draws.Ranges(), "place"), negative=True)
    assert inputs is not None
    assert not np.signbit(inputs["x"][1, 2:]).any()


def test_inputs_without_floats_have_no_sign():
    signature = Signature((TensorSpec.parse("tokens", "int32[batch, length]"),), (), batch="batch")
    recipe = draws.padded(signature, BUCKET, draws.Ranges(), "place")
    assert draws.one_sided(recipe, negative=True) is None


def test_what_a_function_says_of_its_inputs_is_kept_to() -> None:
    signature = Signature(
        (TensorSpec.parse("live", "bool[batch]"), TensorSpec.parse("steps", "int32[]")), (), batch="batch", lengths={}
    )
    ranges = draws.Ranges(most=1, told={"live": (1, 1), "steps": (2, 3)})
    drawn = draws.full(signature, Bucket.of(batch=9), ranges, "decode")
    assert drawn["live"].array().all()
    assert drawn["live"].array().dtype == np.bool_
    assert drawn["steps"].array() in (2, 3)
