"""Models meet Orbax checkpoints in the forms in which people save them."""

from __future__ import annotations

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

from servax.checkpoint import restore
from servax.core.trees import path_text
from servax.model import Model


class Causal(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
        self.mask = jnp.tril(jnp.ones((4, 4)))
        self.positions = np.arange(12, dtype=np.float32).reshape(4, 3)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        length = x.shape[1]
        return self.dropout(self.mask[:length, :length] @ self.layers[0](x + self.positions[:length]))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="dense")(x)


def restored(path: Path, model: Model, saved, select: str | None = None):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", saved)
    return restore(path / "checkpoint", like=model.abstract_params(), defaults=model.defaults(), select=select)


@pytest.mark.parametrize(
    ("save", "origin"),
    [
        (nnx.state, "checkpoint"),
        (lambda net: nnx.to_pure_dict(nnx.state(net)), "checkpoint"),
        (lambda net: nnx.split(net)[1], "checkpoint"),
        (lambda net: nnx.state(net, nnx.Param), "model"),
    ],
    ids=["state", "pure dict", "split", "Param only"],
)
def test_nnx_with_and_without_its_plain_arrays(tmp_path: Path, save, origin: str):
    net = Causal(nnx.Rngs(3))
    model = Model(lambda: Causal(nnx.Rngs(0)), inputs={"x": "float32[batch, length, 3]"})
    found = restored(tmp_path, model, save(net))
    assert {path_text(path): from_ for path, from_ in found.origins.items()} == {
        "layers/0/bias": "checkpoint",
        "layers/0/kernel": "checkpoint",
        "mask": origin,
        "positions": origin,
    }
    x = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
    got = model.functions["predict"].call(found.params, None, {"x": x})[1]["output"]
    kernel = np.asarray(net.layers[0].kernel[...])
    hidden = (x + np.arange(9, dtype=np.float32).reshape(3, 3)) @ kernel
    np.testing.assert_allclose(got, np.tril(np.ones((3, 3))) @ hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrap", "select"),
    [
        (lambda variables: variables, None),
        (lambda variables: variables["params"], None),
        (lambda variables: {"step": 1, **variables, "opt_state": {"mu": variables["params"]}}, None),
        (lambda variables: {"model": variables, "ema": variables}, "ema"),
    ],
    ids=["variables", "params", "train state", "selected"],
)
def test_linen_with_params_alone(tmp_path: Path, wrap, select: str | None):
    variables = Dense().init(jax.random.key(1), jnp.ones((1, 3)))
    model = Model(Dense(), inputs={"x": "float32[batch, 3]"})
    found = restored(tmp_path, model, wrap(variables), select)
    np.testing.assert_array_equal(found.params["dense"]["kernel"], variables["params"]["dense"]["kernel"])


def test_linen_with_batch_statistics_beside_optimizer_state(tmp_path: Path):
    variables = Normed().init(jax.random.key(1), jnp.ones((1, 3)))
    model = Model(Normed(), inputs={"x": "float32[batch, 3]"})
    found = restored(tmp_path, model, {**variables, "opt_state": {"mu": variables["params"]}, "step": 3})
    assert set(found.origins.values()) == {"checkpoint"}
    np.testing.assert_array_equal(found.params["batch_stats"]["BatchNorm_0"]["var"], np.ones(3))


def test_equinox(tmp_path: Path):
    def make(seed: int) -> eqx.nn.MLP:
        return eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(seed))

    net = make(1)
    model = Model(lambda: make(0), inputs={"x": "float32[3]"}, vmap=True)
    found = restored(tmp_path, model, eqx.filter(net, eqx.is_array))
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    got = model.functions["predict"].call(found.params, None, {"x": x})[1]["output"]
    first, second = ((np.asarray(layer.weight), np.asarray(layer.bias)) for layer in net.layers)
    hidden = np.maximum(x @ first[0].T + first[1], 0)
    np.testing.assert_allclose(got, hidden @ second[0].T + second[1], rtol=1e-4, atol=1e-5)
