import ml_dtypes
import numpy as np
import pytest

from servax.core.buffers import ALIGNMENT, aligned


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (1001,)])
def test_an_array_of_its_shape_begins_at_a_multiple_of_the_alignment(shape, dtype):
    array = aligned(shape, np.dtype(dtype), np.zeros)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.c_contiguous
    assert array.ctypes.data % ALIGNMENT == 0 or array.size == 0
    assert not array.any()
