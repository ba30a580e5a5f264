from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1

from servax.checkpoint.quantized import quantize, restore_quantized
from servax.core.errors import CheckpointError
from servax.core.trees import path_of

LIKE = {
    "head": {
        "weight": jax.ShapeDtypeStruct((2, 3), np.int8),
        "scale": jax.ShapeDtypeStruct((2,), np.float32),
        "bias": jax.ShapeDtypeStruct((2,), np.float32),
    },
    "norm": {"scale": jax.ShapeDtypeStruct((3,), np.float32)},
}
FLOATING = {
    "head": {"weight": np.array([[1, -2, 0.25], [254, 127, 2]], np.float32), "bias": np.array([3, 4], np.float32)},
    "norm": {"scale": np.ones(3, np.float32)},
}


def saved(path: Path, tree: Any) -> Path:
    v1.save(path, tree)
    return path


def test_the_largest_of_a_row_becomes_127() -> None:
    whole, scale = quantize(np.array([[1, -2, 0.25], [254, 127, 2]], np.float32))
    np.testing.assert_allclose(scale, [2 / 127, 2], rtol=1e-6)
    # 1 / (2 / 127) = 63.5, which rounds to even; 0.25 / (2 / 127) = 15.875; 127 / 2 = 63.5.
    np.testing.assert_array_equal(whole, [[64, -127, 16], [127, 64, 1]])
    assert whole.dtype == np.int8


def test_a_row_of_zeros_stays_zero() -> None:
    whole, scale = quantize(np.zeros((1, 4), np.float32))
    assert not whole.any()
    assert np.isfinite(scale).all()


def test_floating_matrices_are_quantized_and_the_rest_is_kept(tmp_path: Path) -> None:
    restored = restore_quantized(saved(tmp_path / "floating", FLOATING), like=LIKE)
    np.testing.assert_array_equal(restored.params["head"]["weight"], [[64, -127, 16], [127, 64, 1]])
    np.testing.assert_allclose(restored.params["head"]["scale"], [2 / 127, 2], rtol=1e-6)
    np.testing.assert_array_equal(restored.params["head"]["bias"], [3, 4])
    np.testing.assert_array_equal(restored.params["norm"]["scale"], [1, 1, 1])
    assert restored.origins[path_of("head/scale")] == "checkpoint"


def test_matrices_that_are_quantized_already_are_taken_as_they_are(tmp_path: Path) -> None:
    tree = {
        "head": {
            "weight": np.arange(6, dtype=np.int8).reshape(2, 3),
            "scale": np.array([0.5, 0.25], np.float32),
            "bias": np.zeros(2, np.float32),
        },
        "norm": {"scale": np.ones(3, np.float32)},
    }
    restored = restore_quantized(saved(tmp_path / "whole", tree), like=LIKE)
    np.testing.assert_array_equal(restored.params["head"]["weight"], tree["head"]["weight"])
    np.testing.assert_array_equal(restored.params["head"]["scale"], [0.5, 0.25])


def test_what_does_not_fit_is_named_as_the_checkpoint_has_it(tmp_path: Path) -> None:
    tree = {**FLOATING, "head": {**FLOATING["head"], "weight": np.zeros((2, 4), np.float32)}}
    with pytest.raises(CheckpointError, match="head/weight"):
        restore_quantized(saved(tmp_path / "other", tree), like=LIKE)
