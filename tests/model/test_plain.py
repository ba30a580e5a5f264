"""Plain functions: parameters of any structure, once the model knows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import servax
from servax.core.errors import ModelError


class Affine(NamedTuple):
    scale: np.ndarray
    shift: np.ndarray


W = np.full(4, 2.0, np.float32)
INPUTS = {"inputs": {"x": "float32[batch, 4]"}, "buckets": {"batch": [1]}}


@pytest.mark.parametrize(
    ("live", "where"),
    [
        ([W], "params"),
        (W, "params"),
        (Affine(W, W), "params"),
        ({"layers": [W]}, "params['layers']"),
        ({0: W}, "params"),
    ],
)
def test_a_structure_that_the_model_does_not_know_is_refused_with_the_remedy(live: Any, where: str) -> None:
    model = servax.Model(lambda params, x: x, name="plain", **INPUTS)
    with pytest.raises(ModelError) as caught:
        model.params_of(live)
    assert caught.value.where == where
    assert caught.value.remedy is not None
    assert "params=" in caught.value.remedy


def test_a_structure_that_the_model_was_shown_is_what_the_function_gets() -> None:
    live = [Affine(W, W + 1)]
    model = servax.Model(lambda params, x: x * params[0].scale + params[0].shift, params=live, name="plain", **INPUTS)
    with servax.load(model, params=live) as servable:
        assert servable.predict(x=np.ones((1, 4), np.float32))["output"].tolist() == [[5.0] * 4]
