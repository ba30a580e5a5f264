import jax
import ml_dtypes
import numpy as np

from servax.checkpoint.placement import cast_into, put, put_copy, sharding_of
from servax.core.buffers import aligned


def test_placements_become_shardings():
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert sharding_of(None) == sharding_of(device) == jax.sharding.SingleDeviceSharding(device)
    assert sharding_of(named) is named


def test_an_aligned_array_goes_to_a_cpu_device_without_a_copy():
    for shape, dtype in (((3, 5), np.float32), ((), np.float32), ((7,), ml_dtypes.bfloat16), ((2,), np.bool_)):
        array = aligned(shape, np.dtype(dtype))
        array[...] = 1
        placed = put(array, sharding_of(None))
        assert placed.shape == shape
        assert placed.dtype == dtype
        assert placed.unsafe_buffer_pointer() == array.ctypes.data


def test_a_copy_is_apart_from_its_source():
    source = np.arange(6, dtype=np.int32).reshape(2, 3)
    placed = put_copy(source, np.dtype(np.float32), sharding_of(None))
    source[...] = 0
    np.testing.assert_array_equal(placed, [[0, 1, 2], [3, 4, 5]])
    assert placed.committed


def test_casts_go_block_by_block():
    source = np.linspace(-3, 3, (1 << 20) + 5, dtype=np.float32)
    target = aligned(source.shape, np.dtype(ml_dtypes.bfloat16))
    cast_into(target, source)
    np.testing.assert_array_equal(target, source.astype(ml_dtypes.bfloat16))
