"""Flax Linen modules: collections, evaluation mode, bound modules; numbers against NumPy by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from servax.core.errors import ModelError
from servax.core.trees import flatten, path_text
from servax.model import Model


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="dense")(x)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class Two(nn.Module):
    """Two methods with layers of their own, and a table that the definition computes."""

    def setup(self) -> None:
        self.left = nn.Dense(2)
        self.right = nn.Dense(3)
        self.table = self.variable("constants", "table", lambda: jnp.arange(2.0) + 1)

    def __call__(self, x):
        return self.left(x) * self.table.value

    def other(self, x):
        return self.right(x)


def paths(tree) -> set[str]:
    return {path_text(path) for path in flatten(tree)}


def arrays_like(shapes, seed: int = 0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: generator.normal(size=leaf.shape).astype(leaf.dtype), shapes)


X = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)


def test_a_module_with_params_alone_has_their_content_as_parameters():
    model = Model(Plain(), inputs={"x": "float32[batch, 3]"})
    params = arrays_like(model.abstract_params())
    assert paths(params) == {"dense/bias", "dense/kernel"}
    got = model.functions["predict"].call(params, None, {"x": X})[1]["output"]
    np.testing.assert_allclose(got, X @ params["dense"]["kernel"] + params["dense"]["bias"], rtol=1e-5)


def test_batch_normalisation_runs_on_its_statistics_by_the_formula():
    model = Model(Normed(), inputs={"x": "float32[batch, 3]"})
    params = arrays_like(model.abstract_params())
    assert paths(params) == {
        "batch_stats/norm/mean",
        "batch_stats/norm/var",
        "params/norm/bias",
        "params/norm/scale",
    }
    mean, var = params["batch_stats"]["norm"]["mean"], np.abs(params["batch_stats"]["norm"]["var"]) + 1
    params["batch_stats"]["norm"]["var"] = var
    call = model.functions["predict"].call
    expected = (X - mean) / np.sqrt(var + 1e-5) * params["params"]["norm"]["scale"] + params["params"]["norm"]["bias"]
    np.testing.assert_allclose(call(params, None, {"x": X})[1]["output"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(call(params, None, {"x": X[:1]})[1]["output"], expected[:1], rtol=1e-4, atol=1e-5)


def test_a_flag_that_the_user_gives_is_left_alone_and_its_failure_explained():
    model = Model(Normed(), inputs={"x": "float32[batch, 3]"}, static={"train": True})
    params = arrays_like(model.abstract_params())
    with pytest.raises(ModelError) as raised:
        model.functions["predict"].call(params, None, {"x": X})
    text = str(raised.value)
    assert "function 'predict' raised ModifyScopeVariableError at batch=4" in text
    assert "Switch it to evaluation" in text
    assert "test_linen.py" in raised.value.where
    assert raised.value.__cause__ is not None


def test_functions_get_a_bound_module_and_add_the_variables_they_need():
    model = Model(Two(), inputs={"x": "float32[batch, 3]"})
    assert "params/right/kernel" not in paths(model.abstract_params())

    @model.function(inputs={"x": "float32[batch, 3]"})
    def other(net, x):
        return {"sum": net(x).sum(1) + net.table.value[0], "other": net.other(x)}

    shapes = model.abstract_params()
    assert "params/right/kernel" in paths(shapes)
    params = arrays_like(shapes)
    got = model.functions["other"].call(params, None, {"x": X})[1]
    own = params["params"]
    left = (X @ own["left"]["kernel"] + own["left"]["bias"]) * params["constants"]["table"]
    np.testing.assert_allclose(got["sum"], left.sum(1) + params["constants"]["table"][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["other"], X @ own["right"]["kernel"] + own["right"]["bias"], rtol=1e-5)


def test_collections_that_are_not_trained_have_defaults():
    model = Model(Two(), inputs={"x": "float32[batch, 3]"})
    defaults = model.defaults()
    assert {path_text(path) for path in defaults} == {"constants/table"}
    np.testing.assert_array_equal(defaults["constants", "table"], [1, 2])
    assert Model(Normed(), inputs={"x": "float32[batch, 3]"}).defaults() == {}


def test_functions_that_need_one_variable_in_two_shapes_are_refused():
    model = Model(Plain(), inputs={"x": "float32[batch, 3]"})

    @model.function(inputs={"y": "float32[batch, 5]"})
    def wide(net, y):
        return net(y)

    with pytest.raises(ModelError, match=r"params/dense/kernel: \(3, 2\) and, in wide, \(5, 2\)"):
        model.abstract_params()


@pytest.mark.parametrize("wrapped", [True, False], ids=["variables", "params alone"])
def test_live_variables(wrapped: bool):
    variables = Plain().init(jax.random.key(0), X)
    model = Model(Plain, inputs={"x": "float32[batch, 3]"})
    params = model.params_of(variables if wrapped else variables["params"])
    np.testing.assert_array_equal(params["dense"]["kernel"], variables["params"]["dense"]["kernel"])


def test_annotations_of_partitioning_are_taken_off():
    init = nn.with_partitioning(nn.initializers.ones_init(), (None, "model"))

    class Annotated(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, kernel_init=init, name="dense")(x)

    model = Model(Annotated(), inputs={"x": "float32[batch, 3]"})
    assert paths(model.abstract_params()) == {"dense/bias", "dense/kernel"}
    live = model.params_of(Annotated().init(jax.random.key(0), X))
    np.testing.assert_array_equal(live["dense"]["kernel"], np.ones((3, 2)))


def test_vmap_maps_over_the_batch():
    class One(nn.Module):
        @nn.compact
        def __call__(self, x):
            assert x.shape == (3,)
            return nn.Dense(2, name="dense")(x)

    model = Model(One(), inputs={"x": "float32[3]"}, vmap=True)
    params = arrays_like(model.abstract_params())
    got = model.functions["predict"].call(params, None, {"x": X})[1]["output"]
    np.testing.assert_allclose(got, X @ params["dense"]["kernel"] + params["dense"]["bias"], rtol=1e-5)


def test_abstract_evaluation_of_a_tebibyte_allocates_nothing():
    class Big(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = self.variable("constants", "table", lambda: jnp.ones(3)).value
            return nn.Dense(2**19)(x)[:, :3] * table

    before = {id(array) for array in jax.live_arrays()}
    model = Model(Big(), inputs={"x": "float32[batch, 524288]"}, buckets={"batch": [1]})
    kernel = model.abstract_params()["params"]["Dense_0"]["kernel"]
    assert kernel.size * kernel.dtype.itemsize == 2**40
    np.testing.assert_array_equal(model.defaults()["constants", "table"], [1, 1, 1])
    assert {id(array) for array in jax.live_arrays()} <= before


def test_a_linen_model_without_functions_has_no_parameters_yet():
    with pytest.raises(ModelError, match=r"no parameters until a function calls it"):
        Model(Plain()).abstract_params()


def test_a_module_that_draws_in_its_call_is_refused_with_the_remedy():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), x.shape)

    model = Model(Noisy(), inputs={"x": "float32[batch, 3]"}, buckets={"batch": [1]})
    params = arrays_like(model.abstract_params())
    with pytest.raises(ModelError) as raised:
        model.functions["predict"].call(params, None, {"x": X})
    assert "noise" in str(raised.value.seen)
    assert "seed: uint32[batch]" in str(raised.value.remedy)
