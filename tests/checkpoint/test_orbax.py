import numpy as np
import pytest

from servax.checkpoint.orbax import read_groups
from servax.checkpoint.placement import sharding_of
from servax.checkpoint.stored import StoredLeaf, Wanted

MIB = 1 << 20


def groups_of(sizes_mib, dtype="float32"):
    leaves = {(f"w{i}",): StoredLeaf((size, MIB // 4), np.dtype(np.float32)) for i, size in enumerate(sizes_mib)}
    target = Wanted(np.dtype(np.float16 if dtype == "float16" else np.float32), sharding_of(None))
    return [
        [sizes_mib[int(path[0][1:])] for path in group] for group in read_groups(leaves, dict.fromkeys(leaves, target))
    ]


def test_a_small_checkpoint_is_read_at_once():
    assert groups_of([1, 5, 3]) == [[1, 5, 3]]


@pytest.mark.parametrize("sizes", [[64] * 4, [16] * 40, [200, *[8] * 30], [1] * 300, [500]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_groups_hold_every_leaf_once_largest_first_within_the_room_left(sizes, dtype):
    groups = groups_of(sizes, dtype)
    read = [size for group in groups for size in group]
    assert read == sorted(sizes, reverse=True)
    kept = 0.5 if dtype == "float16" else 1.0
    total, held = kept * sum(sizes), 0.0
    for group in groups:
        needs = sum(size * (kept + 2) for size in group)
        assert len(group) == 1 or needs <= max(total - held, total / 3) + 1
        held += kept * sum(group)
