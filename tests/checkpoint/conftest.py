"""Checkpoints as people write them, saved by Orbax's own APIs from NumPy values that the tests know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

logging.getLogger("absl").setLevel(logging.ERROR)

Leaves = dict[str, Any]


def network(seed: int = 0) -> Leaves:
    """Parameters of a small net: nested, with a list of layers under string keys and a leaf that is called `value`."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731 (one line beats five)
    return {
        "embed": {"table": draw(7, 4)},
        "layers": {"0": {"kernel": draw(4, 4), "bias": draw(4)}, "1": {"kernel": draw(4, 4), "bias": draw(4)}},
        "value": draw(3),
    }


@pytest.fixture
def net() -> Leaves:
    return network(0)


@pytest.fixture
def other_net() -> Leaves:
    """The same tree and shapes, other values."""
    return network(1)


@pytest.fixture
def abstract() -> Callable[[Leaves], Leaves]:
    """The tree as a model gives it: `jax.ShapeDtypeStruct` leaves."""
    import jax

    def of(tree: Leaves, dtype: str | None = None) -> Leaves:
        return {
            key: of(value, dtype)
            if isinstance(value, dict)
            else jax.ShapeDtypeStruct(value.shape, dtype or value.dtype)
            for key, value in tree.items()
        }

    return of


@pytest.fixture
def same() -> Callable[[Any, Leaves], None]:
    """Asserts that two trees have the same keys and the same values, to the bit."""
    import jax

    def check(restored: Any, expected: Leaves) -> None:
        assert sorted(restored) == sorted(expected)
        for key, value in expected.items():
            if isinstance(value, dict):
                check(restored[key], value)
            else:
                assert isinstance(restored[key], jax.Array)
                assert restored[key].committed
                np.testing.assert_array_equal(np.asarray(restored[key], value.dtype), value)

    return check


@pytest.fixture
def train_state(net: Leaves) -> Leaves:
    """What a training loop saves: parameters, Adam's state, a step, an RNG key."""
    import jax
    import optax

    return {
        "params": net,
        "opt_state": optax.adam(1e-3).init(jax.tree.map(np.asarray, net)),
        "step": 3,
        "rng": jax.random.key(0),
    }


@pytest.fixture
def save_v0() -> Callable[[Path, Any], Path]:
    """Saves by Orbax v0's StandardCheckpointer; 64-bit and Python scalars stay what they are."""
    import jax
    import orbax.checkpoint as ocp

    def save(path: Path, tree: Any) -> Path:
        arrays = jax.tree.map(lambda leaf: jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, arrays)
        return path

    return save


@pytest.fixture
def run(tmp_path: Path, net: Leaves, other_net: Leaves) -> Path:
    """A run of a v0 CheckpointManager: steps 10, 20 and 30 with losses, an item `state` and one of JSON.

    Step 20 has the lowest loss, and the only one whose parameters are `net`.
    """
    import orbax.checkpoint as ocp

    path = tmp_path / "run"
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(path, options=options) as manager:
        for step, loss, tree in ((10, 0.5, other_net), (20, 0.1, net), (30, 0.3, other_net)):
            items = ocp.args.Composite(state=ocp.args.StandardSave({"model": tree}), config=ocp.args.JsonSave({"a": 1}))
            manager.save(step, args=items, metrics={"loss": loss})
    return path
