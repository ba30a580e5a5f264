"""Equinox modules, with and without State; numbers against NumPy by hand."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core.errors import ModelError
from servax.core.trees import flatten, path_text
from servax.model import Model, infer_outputs


class Net(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    scale: np.ndarray
    steps: jax.Array
    activation: Callable
    key: jax.Array

    def __init__(self, key) -> None:
        self.linear = eqx.nn.Linear(3, 2, key=key)
        self.dropout = eqx.nn.Dropout(0.5)
        self.scale = np.array([1.0, 3.0], np.float32)
        self.steps = jnp.array([4, 5])
        self.activation = jnp.tanh
        self.key = jax.random.key(1)

    def __call__(self, x, *, key=None):
        return self.activation(self.dropout(self.linear(x), key=key)) * self.scale + self.steps


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self) -> None:
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")

    def __call__(self, x, state):
        return self.norm(x, state)


def paths(tree) -> set[str]:
    return {path_text(path) for path in flatten(tree)}


def arrays_like(shapes, seed: int = 0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (generator.normal(size=leaf.shape) * 3).astype(leaf.dtype), shapes)


X = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)


def test_numbers_are_those_of_numpy_under_vmap_and_in_inference_mode():
    model = Model(lambda: Net(jax.random.key(0)), inputs={"x": "float32[batch, 3]"}, vmap=True)
    params = arrays_like(model.abstract_params())
    got = model.functions["predict"].call(params, None, {"x": X})[1]["output"]
    linear = X @ params["linear"]["weight"].T + params["linear"]["bias"]
    np.testing.assert_allclose(got, np.tanh(linear) * params["scale"] + params["steps"], rtol=1e-5)


def test_arrays_are_parameters_and_keys_functions_and_numbers_are_not():
    model = Model(lambda: Net(jax.random.key(0)), inputs={"x": "float32[batch, 3]"}, vmap=True)
    assert paths(model.abstract_params()) == {"linear/bias", "linear/weight", "scale", "steps"}
    assert model.random_state() == (("key",),)


def test_numpy_arrays_and_integers_have_defaults():
    defaults = Model(lambda: Net(jax.random.key(0)), inputs={"x": "float32[3]"}, vmap=True).defaults()
    assert {path_text(path) for path in defaults} == {"scale", "steps"}
    np.testing.assert_array_equal(defaults["scale",], [1, 3])
    np.testing.assert_array_equal(defaults["steps",], [4, 5])


def test_a_module_with_state_runs_on_its_statistics():
    model = Model(eqx.nn.make_with_state(Stateful), inputs={"x": "float32[3]"}, vmap=True)
    shapes = model.abstract_params()
    assert shapes["0"]["norm"]["weight"].shape == (3,)
    flat = {path: np.ones(leaf.shape, leaf.dtype) for path, leaf in flatten(shapes).items()}
    statistics = [path for path in flat if path[0] == "1" and flat[path].shape == (3,)]
    mean, var = np.array([1, 2, 3], "f"), np.array([4, 9, 16], "f")
    flat[statistics[0]], flat[statistics[1]] = mean, var
    flat["0", "norm", "weight"] = np.array([1, 2, 3], "f")
    flat["0", "norm", "bias"] = np.array([0, 1, 0], "f")
    params = {}
    for path, leaf in flat.items():
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    got = model.functions["predict"].call(params, None, {"x": X})[1]
    expected = (X - mean) / np.sqrt(var + 1e-5) * np.array([1, 2, 3]) + np.array([0, 1, 0])
    assert set(got) == {"output"}
    np.testing.assert_allclose(got["output"], expected, rtol=1e-5, atol=1e-6)


def test_functions_of_a_module_with_state_get_the_pair():
    model = Model(eqx.nn.make_with_state(Stateful))

    @model.function(inputs={"x": "float32[3]"}, vmap=True)
    def normed(net, x):
        module, state = net
        y, _ = module(x, state)
        return {"y": y}

    function = infer_outputs(model.functions["normed"], model.abstract_params(), None, [{"batch": 4}])
    assert function.signature.output("y").text() == "float32[batch, 3]"


def test_live_parameters():
    net = Net(jax.random.key(5))
    model = Model(net, inputs={"x": "float32[3]"}, vmap=True)
    params = model.params_of(net)
    got = model.functions["predict"].call(params, None, {"x": X})[1]["output"]
    expected = np.tanh(X @ np.asarray(net.linear.weight).T + np.asarray(net.linear.bias)) * [1, 3] + [4, 5]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert net.dropout.inference is False


def test_abstract_evaluation_of_a_tebibyte_allocates_nothing():
    class Big(eqx.Module):
        linear: eqx.nn.Linear
        steps: jax.Array

        def __init__(self) -> None:
            self.linear = eqx.nn.Linear(2**19, 2**19, key=jax.random.key(0))
            self.steps = jnp.arange(3)

        def __call__(self, x):
            return self.linear(x)

    before = {id(array) for array in jax.live_arrays()}
    model = Model(Big, inputs={"x": "float32[524288]"}, vmap=True)
    weight = model.abstract_params()["linear"]["weight"]
    assert weight.size * weight.dtype.itemsize == 2**40
    np.testing.assert_array_equal(model.defaults()["steps",], [0, 1, 2])
    assert {id(array) for array in jax.live_arrays()} <= before


def test_a_module_that_draws_from_its_own_key_is_refused_with_the_remedy():
    class Keyed(eqx.Module):
        linear: eqx.nn.Linear
        key: jax.Array

        def __call__(self, x):
            return self.linear(x) + jax.random.normal(self.key, x.shape)

    def make():
        return Keyed(eqx.nn.Linear(3, 3, key=jax.random.key(0)), jax.random.key(1))

    model = Model(make, inputs={"x": "float32[batch, 3]"}, vmap=True)
    with pytest.raises(ModelError) as raised:
        model.functions["predict"].call(model.params_of(make()), None, {"x": np.ones((2, 3), np.float32)})
    assert raised.value.where == "RNG stream key"
    assert "seed: uint32[batch]" in str(raised.value.remedy)
