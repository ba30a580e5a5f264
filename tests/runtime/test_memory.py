from types import SimpleNamespace

import jax
import pytest

from servax.core.errors import MemoryShortage
from servax.runtime import memory


def device(**fields):
    return SimpleNamespace(platform="gpu", id=3, memory_stats=lambda: fields or None)


def test_an_accelerator_s_free_memory_is_its_limit_less_its_use():
    assert memory.free_bytes(device(bytes_limit=1000, bytes_in_use=400)) == 600
    assert memory.free_bytes(device()) is None


def test_a_cpu_s_free_memory_is_the_machine_s():
    free = memory.free_bytes(jax.devices("cpu")[0])
    assert free is not None
    assert 1 << 20 < free < 1 << 50


def test_a_shortage_says_both_numbers():
    with pytest.raises(MemoryShortage) as caught:
        memory.require_room(device(bytes_limit=4096, bytes_in_use=1024), 3073)
    assert (caught.value.where, caught.value.seen) == ("gpu:3", "3.0 KiB free (3072 bytes)")
    assert caught.value.expected == "3.0 KiB (3073 bytes)"
    memory.require_room(device(bytes_limit=4096, bytes_in_use=1024), 3072)
    memory.require_room(device(), 1 << 60)
