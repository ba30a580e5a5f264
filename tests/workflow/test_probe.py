"""A model loaded in process: answers that depend on padding or on other rows are refused before the first request."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import servax
from servax.core.errors import ModelError

W = {"w": np.full(4, 2.0, np.float32)}
SEQUENCE = {"inputs": {"x": "float32[batch, length]"}, "buckets": {"batch": [4], "length": [8]}}


def model(function: Any, **options: Any) -> servax.Model:
    return servax.Model(function, name="probed", **{**SEQUENCE, **options})


@pytest.mark.parametrize(
    "function",
    [
        lambda params, x: x.mean(axis=1) * params["w"][0],
        lambda params, x: x.max(axis=1) * params["w"][0],
        lambda params, x: jnp.argmax(x, axis=1) + 0 * params["w"][0].astype(jnp.int32),
        lambda params, x: jnp.sort(x * params["w"][0], axis=0),
        lambda params, x: x - x.mean(axis=0) * params["w"][0],
        lambda params, x: x[:, ::-1] * params["w"][0],
        lambda params, x: {"rows": x * params["w"][0], "all": x.max()},
    ],
    ids=["mean", "max", "argmax", "sort", "centre", "flip", "no batch axis"],
)
def test_dependence_on_padding_or_rows_is_refused(function: Any) -> None:
    with pytest.raises(ModelError) as caught:
        servax.load(model(function), params=W)
    assert "padding" in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith("predict@batch=4,length=8")
    assert caught.value.remedy is not None


def test_a_mean_by_mask_is_served() -> None:
    def mean(params: Any, x: jax.Array, n: jax.Array) -> jax.Array:
        mask = jnp.arange(x.shape[1]) < n[:, None]
        return jnp.where(mask, x, 0).sum(axis=1) / n * params["w"][0]

    with servax.load(model(mean, lengths={"n": "length"}), params=W) as servable:
        x = np.array([[-1.0, -3.0, -5.0]], np.float32)
        assert servable.predict(x=x)["output"].tolist() == [-6.0]


def test_a_function_that_runs_at_its_buckets_only_is_served() -> None:
    def in_fours(params: Any, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], x.shape[1] // 4, 4).sum(axis=(1, 2)) * params["w"][0]

    with servax.load(model(in_fours, buckets={"batch": [4], "length": [4, 8]}), params=W) as servable:
        assert servable.predict(x=np.ones((2, 8), np.float32))["output"].tolist() == [16.0, 16.0]


def test_a_function_without_dimensions_is_served() -> None:
    fixed = servax.Model(lambda params, x: x * params["w"], inputs={"x": "float32[4]"}, batch=None, name="fixed")
    with servax.load(fixed, params=W) as servable:
        assert servable.predict(x=np.ones(4, np.float32))["output"].tolist() == [2.0] * 4
