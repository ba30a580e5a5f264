import ml_dtypes
import numpy as np
import pytest

from servax.targets.samples import Expected, Rounding
from servax.targets.tolerance import difference, relative_tolerance, rounding_of, scale_of

F32 = 2.0**-24
BF16 = 2.0**-8


def dot_rounding(terms):
    return Rounding(F32, F32 * terms**0.5)


@pytest.mark.parametrize("terms", [1, 32, 1024, 10**5, 10**8])
def test_float32_catches_a_thousandth_and_passes_fusion(terms):
    assert 1e-4 < relative_tolerance(dot_rounding(terms)) < 5e-4


@pytest.mark.parametrize("terms", [1, 1024, 10**6])
def test_narrow_types_get_a_few_of_their_own_units(terms):
    relative = relative_tolerance(Rounding(BF16, BF16 * terms**0.5))
    assert 4 * BF16 <= relative <= 16 * BF16


def test_deeper_functions_get_more():
    shallow, deep = (relative_tolerance(dot_rounding(terms)) for terms in (64, 10**6))
    assert deep > shallow


def test_integers_are_exact():
    assert relative_tolerance(Rounding(0.0, 0.0)) == 0


def test_a_summation_in_another_order_passes_at_1024_terms():
    stream = np.random.RandomState(0)
    a, b = stream.randn(64, 1024).astype(np.float32), stream.randn(1024, 64).astype(np.float32)
    forward = a @ b
    backward = np.zeros_like(forward)
    for k in reversed(range(1024)):
        backward += a[:, k, None] * b[None, k]
    assert np.abs(forward - backward).max() > 1e-5
    found = difference(Expected.of(forward), backward, relative_tolerance(dot_rounding(1024)))
    assert found.within
    assert not difference(Expected.of(forward), forward * np.float32(1.001), found.tolerance / found.scale).within


def test_the_worst_element_is_named():
    expected = np.array([[1.0, 2.0], [4.0, 0.0]], np.float32)
    seen = expected.copy()
    seen[1, 0] += 0.5
    seen[0, 1] += 0.25
    found = difference(Expected.of(expected), seen, 1e-4)
    assert not found.within
    assert found.error == 0.5
    assert found.tolerance == pytest.approx(4e-4)
    assert found.over == 2
    assert found.detail == "[1, 0] is 4.5, expected 4.0; 2 of 4 elements"


def test_differences_are_relative_to_the_scale_not_to_each_element():
    expected = np.array([100.0, 1e-3], np.float32)
    seen = np.array([100.0, 2e-3], np.float32)
    assert difference(Expected.of(expected), seen, 1e-4).within


def test_a_masks_filler_is_no_scale():
    logits = np.random.RandomState(0).randn(4, 8).astype(np.float32)
    scale = float(np.abs(logits).max())
    logits[:, 5:] = -1e9
    assert scale_of(logits) <= scale
    seen = logits.copy()
    seen[0, 0] += 0.1
    assert not difference(Expected.of(logits), seen, 1e-4).within


def test_large_values_without_a_gap_are_the_scale():
    assert scale_of(np.array([3.0, 300.0, 20_000.0])) == 20_000


def test_zeros_have_the_scale_1():
    assert scale_of(np.zeros(3, np.float32)) == 1
    assert difference(Expected.of(np.zeros(3, np.float32)), np.full(3, 1e-6, np.float32), 1e-4).within


def test_nan_and_infinities_must_stand_in_the_same_places():
    expected = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert difference(Expected.of(expected), expected.copy(), 1e-4).within
    for place, value in ((0, 1.0), (1, -np.inf), (1, np.nan), (3, np.nan), (3, np.inf)):
        seen = expected.copy()
        seen[place] = value
        found = difference(Expected.of(expected), seen, 1e-4)
        assert found.over == 1
        assert found.error == np.inf
        assert f"[{place}] is {value}" in found.detail


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.bool_, ml_dtypes.int4])
def test_one_integer_off_by_one_is_found(dtype):
    expected = np.array([0, 1, 0], dtype)
    seen = np.array([0, 1, 1], dtype)
    assert difference(Expected.of(expected), expected, 0.0).within
    found = difference(Expected.of(expected), seen, 0.0)
    assert found.over == 1
    assert found.error == 1


def test_an_integer_difference_beyond_int64():
    found = difference(Expected.of(np.array([0], np.uint64)), np.array([2**64 - 1], np.uint64), 0.0)
    assert found.error == float(2**64 - 1)


def test_shape_and_dtype_must_agree():
    expected = Expected.of(np.zeros((2, 3), np.float32))
    assert difference(expected, np.zeros((3, 2), np.float32), 1.0).detail == "shape [3, 2], expected [2, 3]"
    assert difference(expected, np.zeros((2, 3), np.float16), 1.0).detail == "dtype float16, expected float32"


def test_empty_outputs_agree():
    assert difference(Expected.of(np.zeros((0, 3), np.float32)), np.zeros((0, 3), np.float32), 0.1).within


def test_complex_and_bfloat16_values_are_compared():
    values = np.array([1 + 2j, -1j], np.complex64)
    assert difference(Expected.of(values), values, 1e-4).within
    assert not difference(Expected.of(values), values * np.complex64(1j), 1e-4).within
    low = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert difference(Expected.of(low), np.array([1.0, 2.015625], ml_dtypes.bfloat16), 4 * BF16).within
    assert not difference(Expected.of(low), np.array([1.0, 2.25], ml_dtypes.bfloat16), 4 * BF16).within


def test_sampled_outputs_are_judged_by_elements_and_norm():
    whole = np.random.RandomState(0).randn(100_000).astype(np.float32)
    kept = Expected.of(whole).reduced(0)
    assert difference(kept, whole, 1e-4).within
    assert kept.indices is not None
    touched = whole.copy()
    touched[kept.indices[5]] += 1
    assert not difference(kept, touched, 1e-4).within
    elsewhere = whole.copy()
    elsewhere[np.setdiff1d(np.arange(whole.size), kept.indices)] *= 1.01
    found = difference(kept, elsewhere, 1e-4)
    assert not found.within
    assert "norm of the whole" in found.detail


def test_an_output_without_an_estimate_is_judged_by_its_dtype():
    assert rounding_of("y", np.dtype(np.float32), "cpu", {}) == Rounding(F32, F32)
    assert rounding_of("y", np.dtype(np.int32), "cpu", {}) == Rounding(0.0, 0.0)
    known = {"y": {"cpu": Rounding(F32, 1.0), "cuda": Rounding(F32, 2.0)}}
    assert rounding_of("y", np.dtype(np.float32), "cuda", known).error == 2
    assert rounding_of("y", np.dtype(np.float32), "rocm", known).error == 1
