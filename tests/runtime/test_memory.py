from pathlib import Path
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
    assert caught.value.expected == "3.0 KiB (3073 bytes); 1 B lacking"
    memory.require_room(device(bytes_limit=4096, bytes_in_use=1024), 3072)
    memory.require_room(device(), 1 << 60)


def test_parameters_and_programs_are_told_apart_and_what_is_freed_counts():
    """By hand: 3072 bytes free and 1024 to come make room for 4096."""
    place = device(bytes_limit=4096, bytes_in_use=1024)
    memory.require_room(place, 3000, 1096, freed=1024)
    with pytest.raises(MemoryShortage) as caught:
        memory.require_room(place, 3000, 1097, freed=1024, what="no room", remedy="more")
    assert (caught.value.what, caught.value.remedy) == ("no room", "more")
    assert caught.value.seen == "3.0 KiB free (3072 bytes), and 1.0 KiB once the old version is unloaded"
    assert caught.value.expected == "4.0 KiB (4097 bytes): parameters 2.9 KiB, programs 1.1 KiB; 1 B lacking"


def test_giving_back_returns_freed_memory_to_the_system():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    blocks = [bytes(60_000) for _ in range(2000)]  # below malloc's threshold for mapping: they come from the heap
    pin = bytes(60_000)
    del blocks
    before = resident()
    memory.give_back()
    assert resident() <= before
    del pin
