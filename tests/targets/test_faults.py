import numpy as np
import pytest

from servax.targets import faults
from servax.targets.samples import Rounding

F32 = 2.0**-24
DECIDED = {"t": {"cpu": Rounding(F32, F32 * 8)}}
EXACT = {"t": {"cpu": Rounding(0.0, 0.0)}}
TOKENS = np.arange(100)


def changed(count):
    return TOKENS + (count > TOKENS)


def test_a_tie_is_no_fault_where_rounded_values_decide():
    assert faults.compare([{"t": TOKENS}], [{"t": changed(2)}], DECIDED) == []


@pytest.mark.parametrize(("count", "rounding"), [(100, DECIDED), (20, DECIDED), (1, EXACT)])
def test_integers_that_are_mostly_wrong_or_exact_are_a_fault(count, rounding):
    (fault,) = faults.compare([{"t": TOKENS}], [{"t": changed(count)}], rounding)
    assert fault.output == "t"
    assert fault.found.over == count
