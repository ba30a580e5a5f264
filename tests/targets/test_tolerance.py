import numpy as np
import pytest

from servax.targets.samples import Rounding
from servax.targets.tolerance import EXACT, Tolerance, rounding_of

F32 = 2.0**-24
BF16 = 2.0**-8


def dot_rounding(terms):
    return Rounding(F32, F32 * terms**0.5)


@pytest.mark.parametrize("terms", [1, 32, 1024, 10**5, 10**8])
def test_float32_catches_a_thousandth_and_passes_fusion(terms):
    found = Tolerance.of(dot_rounding(terms))
    assert 1e-4 < found.element < 5e-4
    assert 3e-5 < found.whole < 5e-4


@pytest.mark.parametrize("terms", [1, 10, 10**6])
def test_narrow_types_get_some_of_their_own_units_and_less_for_the_whole(terms):
    found = Tolerance.of(Rounding(BF16, BF16 * terms**0.5))
    assert 5 * BF16 <= found.element <= 64 * BF16
    assert 5 * BF16 <= found.factor <= 16 * BF16
    assert 6 * BF16 <= found.whole <= 40 * BF16


def test_deeper_functions_get_more():
    shallow, deep = (Tolerance.of(dot_rounding(terms)) for terms in (64, 10**6))
    assert deep.element > shallow.element
    assert deep.whole > shallow.whole


def test_integers_of_integers_are_exact():
    assert Tolerance.of(Rounding(0.0, 0.0)) == EXACT
    assert EXACT.ties == 0


def test_integers_that_rounding_decides_may_differ_in_a_few_of_a_hundred():
    assert Tolerance.of(dot_rounding(1024)).ties == 0.02
    assert Tolerance.of(Rounding(BF16, 1.0)).ties == 0.125


def test_an_output_without_an_estimate_is_judged_by_its_dtype():
    assert rounding_of("y", np.dtype(np.float32), "cpu", {}) == Rounding(F32, F32)
    assert rounding_of("y", np.dtype(np.int32), "cpu", {}) == Rounding(0.0, 0.0)
    known = {"y": {"cpu": Rounding(F32, 1.0), "cuda": Rounding(F32, 2.0)}}
    assert rounding_of("y", np.dtype(np.float32), "cuda", known).error == 2
    assert rounding_of("y", np.dtype(np.float32), "rocm", known).error == 1
