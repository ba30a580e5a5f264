import ml_dtypes
import numpy as np
import pytest

from servax.targets.difference import difference, scale_of
from servax.targets.samples import Expected, Rounding
from servax.targets.tolerance import EXACT, Tolerance

F32 = 2.0**-24
BF16 = 2.0**-8
FLOAT32 = Tolerance.of(Rounding(F32, F32))
BFLOAT16 = Tolerance.of(Rounding(BF16, BF16))
DOT = Tolerance.of(Rounding(F32, F32 * 32))


def test_a_summation_in_another_order_passes_at_1024_terms():
    stream = np.random.RandomState(0)
    a, b = stream.randn(64, 1024).astype(np.float32), stream.randn(1024, 64).astype(np.float32)
    forward = a @ b
    backward = np.zeros_like(forward)
    for k in reversed(range(1024)):
        backward += a[:, k, None] * b[None, k]
    assert np.abs(forward - backward).max() > 1e-5
    found = difference(Expected.of(forward), backward, DOT)
    assert found.within
    assert not difference(Expected.of(forward), forward * np.float32(1.001), DOT).within


def test_the_worst_element_is_named():
    expected = np.array([[1.0, 2.0], [4.0, 0.0]], np.float32)
    seen = expected.copy()
    seen[1, 0] += 0.5
    seen[0, 1] += 0.25
    found = difference(Expected.of(expected), seen, FLOAT32)
    assert not found.within
    assert found.error == 0.5
    assert found.tolerance == pytest.approx(4 * 2**11 * F32)
    assert found.over == 2
    assert found.detail == "[1, 0] is 4.5, expected 4.0; 2 of 4 elements"


def test_a_small_element_is_judged_by_the_terms_that_were_summed_into_it():
    """Products of 1 that cancel: their rounding errors are those of 1, whatever is left of them."""
    expected = np.array([1.0, -2.0, 1e-6, 1.0], np.float32)
    seen = expected + np.array([0, 0, 1e-5, 0], np.float32)
    assert difference(Expected.of(expected), seen, FLOAT32).within


NORMAL = np.random.RandomState(7).randn(64, 32).astype(np.float32)


@pytest.mark.parametrize("shape", [(64, 32), (2, 1024), (1, 2048), (16, 4, 32)])
def test_a_dominant_column_hides_no_error_of_the_others(shape):
    expected = NORMAL.reshape(shape).copy()
    expected[..., 3] *= 5000
    rounded = expected * (1 + 1e-6 * np.random.RandomState(1).randn(*shape)).astype(np.float32)
    assert difference(Expected.of(expected), rounded, DOT).within
    wrong = expected * np.float32(1.2)
    wrong[..., 3] = expected[..., 3]
    assert not difference(Expected.of(expected), wrong, DOT).within


def test_a_small_element_of_a_dominant_column_is_judged_by_its_column():
    expected = NORMAL.copy()
    expected[:, 3] *= 5000
    expected[5, 3] = 0.5
    seen = expected.copy()
    seen[5, 3] += 0.01
    assert difference(Expected.of(expected), seen, DOT).within


def test_a_dominant_row_hides_no_error_of_the_others():
    expected = NORMAL.copy()
    expected[3] *= 5000
    wrong = expected * np.float32(1.01)
    wrong[3] = expected[3]
    assert not difference(Expected.of(expected), wrong, DOT).within


def test_sampled_outputs_with_a_dominant_column_are_judged_by_their_columns():
    whole = np.random.RandomState(0).randn(2000, 50).astype(np.float32)
    whole[:, 3] *= 5000
    kept = Expected.of(whole).reduced(0)
    assert difference(kept, whole, DOT).within
    wrong = whole * np.float32(1.2)
    wrong[:, 3] = whole[:, 3]
    assert not difference(kept, wrong, DOT).within


DEEP = Tolerance.of(Rounding(BF16, 6.8 * BF16))
"""Of a transformer of one layer in bfloat16."""


def test_a_systematic_error_of_three_percent_is_found_in_bfloat16():
    expected = Expected.of(NORMAL.astype(ml_dtypes.bfloat16))
    seen = (NORMAL * 1.03).astype(ml_dtypes.bfloat16)
    found = difference(expected, seen, DEEP)
    assert not found.within
    assert found.detail == "all values are scaled by 1.03, where rounding explains 0.02"
    assert difference(expected, (NORMAL * 1.005).astype(ml_dtypes.bfloat16), DEEP).within


def test_an_error_of_the_whole_is_found_where_no_element_is_off():
    noise = np.random.RandomState(8).randn(64, 32)
    expected = Expected.of(NORMAL.astype(ml_dtypes.bfloat16))
    found = difference(expected, (NORMAL + 0.03 * np.sign(noise)).astype(ml_dtypes.bfloat16), BFLOAT16)
    assert not found.within
    assert "relative L2 error of the whole is 0.03" in found.detail
    assert difference(expected, (NORMAL + 0.01 * noise).astype(ml_dtypes.bfloat16), BFLOAT16).within


def test_integers_that_rounding_decides_may_be_unequal_in_few_places():
    expected = np.arange(128)
    seen = expected.copy()
    seen[[5, 9]] = 0
    found = difference(Expected.of(expected), seen, DOT)
    assert found.within
    assert found.unequal == 2
    assert found.detail == "2 of 128 integers unequal"
    seen[20:30] = 0
    found = difference(Expected.of(expected), seen, DOT)
    assert found.over == 12
    assert not difference(Expected.of(expected), expected + 1, DOT).within
    assert not difference(Expected.of(expected[:1]), expected[:1] + 1, DOT).within
    assert difference(Expected.of(expected[:2]), np.array([0, 9]), DOT).within


def test_a_masks_filler_is_no_scale():
    logits = np.random.RandomState(0).randn(4, 8).astype(np.float32)
    scale = float(np.abs(logits).max())
    logits[:, 5:] = -1e9
    assert scale_of(logits) <= scale
    seen = logits.copy()
    seen[0, 0] += 0.1
    assert not difference(Expected.of(logits), seen, FLOAT32).within


def test_large_values_without_a_gap_are_the_scale():
    assert scale_of(np.array([3.0, 300.0, 20_000.0])) == 20_000


def test_zeros_have_the_scale_1():
    assert scale_of(np.zeros(3, np.float32)) == 1
    assert difference(Expected.of(np.zeros(3, np.float32)), np.full(3, 1e-6, np.float32), FLOAT32).within


def test_nan_and_infinities_must_stand_in_the_same_places():
    expected = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert difference(Expected.of(expected), expected.copy(), FLOAT32).within
    for place, value in ((0, 1.0), (1, -np.inf), (1, np.nan), (3, np.nan), (3, np.inf)):
        seen = expected.copy()
        seen[place] = value
        found = difference(Expected.of(expected), seen, FLOAT32)
        assert found.over == 1
        assert found.error == np.inf
        assert f"[{place}] is {value}" in found.detail


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.bool_, ml_dtypes.int4])
def test_one_integer_off_by_one_is_found(dtype):
    expected = np.array([0, 1, 0], dtype)
    seen = np.array([0, 1, 1], dtype)
    assert difference(Expected.of(expected), expected, EXACT).within
    found = difference(Expected.of(expected), seen, EXACT)
    assert found.over == 1
    assert found.error == 1


def test_an_integer_difference_beyond_int64():
    found = difference(Expected.of(np.array([0], np.uint64)), np.array([2**64 - 1], np.uint64), EXACT)
    assert found.error == float(2**64 - 1)


def test_shape_and_dtype_must_agree():
    expected = Expected.of(np.zeros((2, 3), np.float32))
    assert difference(expected, np.zeros((3, 2), np.float32), FLOAT32).detail == "shape [3, 2], expected [2, 3]"
    assert difference(expected, np.zeros((2, 3), np.float16), FLOAT32).detail == "dtype float16, expected float32"


def test_empty_outputs_agree():
    assert difference(Expected.of(np.zeros((0, 3), np.float32)), np.zeros((0, 3), np.float32), FLOAT32).within


def test_complex_and_bfloat16_values_are_compared():
    values = np.array([1 + 2j, -1j], np.complex64)
    assert difference(Expected.of(values), values, FLOAT32).within
    assert not difference(Expected.of(values), values * np.complex64(1j), FLOAT32).within
    low = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert difference(Expected.of(low), np.array([1.0, 2.015625], ml_dtypes.bfloat16), BFLOAT16).within
    assert not difference(Expected.of(low), np.array([1.0, 2.25], ml_dtypes.bfloat16), BFLOAT16).within


def test_sampled_outputs_are_judged_by_elements_and_norm():
    whole = np.random.RandomState(0).randn(100_000).astype(np.float32)
    kept = Expected.of(whole).reduced(0)
    assert difference(kept, whole, FLOAT32).within
    assert kept.indices is not None
    touched = whole.copy()
    touched[kept.indices[5]] += 1
    assert not difference(kept, touched, FLOAT32).within
    elsewhere = whole.copy()
    elsewhere[np.setdiff1d(np.arange(whole.size), kept.indices)] *= 1.01
    found = difference(kept, elsewhere, FLOAT32)
    assert not found.within
    assert "norm of the whole" in found.detail
