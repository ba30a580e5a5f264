"""Flax NNX modules: parameters, plain arrays, evaluation mode, RNG state; numbers against NumPy by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from servax.core.errors import ModelError
from servax.core.trees import flatten, path_text, unflatten
from servax.model import Model


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)])

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x


class Causal(nnx.Module):
    """A mask that JAX computes, and a position table that NumPy does, as plain attributes."""

    def __init__(self, rngs: nnx.Rngs, length: int = 6) -> None:
        self.embedding = nnx.Embed(7, 4, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((length, length)))
        self.positions = np.arange(length * 4, dtype=np.float32).reshape(length, 4) / 10
        self.inner = nnx.List([jnp.full(4, 2.0)])

    def __call__(self, tokens):
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions[:length]
        return self.mask[:length, :length] @ x * self.inner[0]


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.key = jax.random.key(7)

    def __call__(self, x):
        return self.dropout(self.norm(x))


TOKENS = {"tokens": "int32[batch, length]"}


def paths(tree) -> set[str]:
    return {path_text(path) for path in flatten(tree)}


def arrays_like(shapes, seed: int = 0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: generator.normal(size=leaf.shape).astype(leaf.dtype), shapes)


def test_numbers_are_those_of_numpy():
    model = Model(lambda: MLP(nnx.Rngs(0)), inputs={"x": "float32[batch, 3]"})
    params = arrays_like(model.abstract_params())
    x = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    state, outputs = model.functions["predict"].call(params, None, {"x": x})
    hidden = np.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    for index in "01":
        hidden = hidden @ params["layers"][index]["kernel"] + params["layers"][index]["bias"]
    assert state is None
    np.testing.assert_allclose(outputs["output"], hidden, rtol=1e-5)


def test_parameters_are_a_nested_dictionary_with_string_keys_in_the_order_of_jax():
    shapes = Model(lambda: MLP(nnx.Rngs(0)), inputs={"x": "float32[batch, 3]"}).abstract_params()
    assert paths(shapes) == {
        f"{layer}/{leaf}" for layer in ("first", "layers/0", "layers/1") for leaf in ("bias", "kernel")
    }
    assert shapes["layers"]["1"]["kernel"] == jax.ShapeDtypeStruct((5, 2), jnp.float32)
    assert list(flatten(shapes).values()) == jax.tree.leaves(shapes)


def test_plain_arrays_are_parameters_with_defaults():
    model = Model(lambda: Causal(nnx.Rngs(0)), inputs=TOKENS)
    assert paths(model.abstract_params()) == {"embedding/embedding", "inner/0", "mask", "positions"}
    defaults = model.defaults()
    assert {path_text(path) for path in defaults} == {"inner/0", "mask", "positions"}
    np.testing.assert_array_equal(defaults["mask",], np.tril(np.ones((6, 6))))
    np.testing.assert_array_equal(defaults["positions",], np.arange(24, dtype=np.float32).reshape(6, 4) / 10)
    np.testing.assert_array_equal(defaults["inner", "0"], [2, 2, 2, 2])


def test_plain_arrays_are_arguments_not_constants():
    model = Model(lambda: Causal(nnx.Rngs(0)), inputs=TOKENS)
    call = model.functions["predict"].call
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda params, tokens: call(params, None, {"tokens": tokens}))(
        model.abstract_params(), tokens
    )
    assert jaxpr.consts == []
    assert len(jaxpr.jaxpr.invars) == 5
    params = arrays_like(model.abstract_params())
    given = np.array([[1, 2, 3]], np.int32)
    got = call(params, None, {"tokens": given})[1]["output"]
    x = params["embedding"]["embedding"][given] + params["positions"][:3]
    np.testing.assert_allclose(got, params["mask"][:3, :3] @ x * params["inner"]["0"], rtol=1e-5)


@pytest.mark.parametrize(
    "saved",
    [
        nnx.state,
        lambda net: nnx.to_pure_dict(nnx.state(net)),
        lambda net: nnx.split(net)[1],
        lambda net: nnx.state(net, nnx.Param),
        lambda net: net,
    ],
    ids=["state", "pure dict", "split", "Param only", "module"],
)
def test_live_parameters_however_they_were_taken(saved):
    net = Causal(nnx.Rngs(3))
    model = Model(lambda: Causal(nnx.Rngs(0)), inputs=TOKENS)
    params = model.params_of(saved(net))
    tokens = np.array([[1, 2, 3, 4], [6, 5, 0, 0]], np.int32)
    got = model.functions["predict"].call(params, None, {"tokens": tokens})[1]["output"]
    table = np.asarray(net.embedding.embedding[...])
    x = table[tokens] + np.arange(16, dtype=np.float32).reshape(4, 4) / 10
    np.testing.assert_allclose(got, np.tril(np.ones((4, 4))) @ x * 2, rtol=1e-5)
    assert set(flatten(params)) == set(flatten(model.abstract_params()))


def test_evaluation_mode_by_the_formula_of_batch_normalisation():
    model = Model(lambda: Noisy(nnx.Rngs(0)), inputs={"x": "float32[batch, 3]"})
    params = arrays_like(model.abstract_params())
    norm = params["norm"]
    norm["var"] = np.abs(norm["var"]) + 1
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    call = model.functions["predict"].call
    got = call(params, None, {"x": x})[1]["output"]
    expected = (x - norm["mean"]) / np.sqrt(norm["var"] + 1e-5) * norm["scale"] + norm["bias"]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got, call(params, None, {"x": x})[1]["output"])
    np.testing.assert_allclose(call(params, None, {"x": x[:1]})[1]["output"], expected[:1], rtol=1e-5, atol=1e-6)


def test_random_state_is_no_parameter_and_is_named():
    model = Model(lambda: Noisy(nnx.Rngs(0)), inputs={"x": "float32[batch, 3]"})
    assert paths(model.abstract_params()) == {"norm/bias", "norm/mean", "norm/scale", "norm/var"}
    assert {path_text(path) for path in model.random_state()} == {"dropout/rngs/count", "dropout/rngs/key", "key"}
    live = model.params_of(nnx.state(Noisy(nnx.Rngs(1))))
    assert paths(live) == paths(model.abstract_params())


class Diffused(nnx.Module):
    """Draws from a stream of its own in its call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.rngs = nnx.Rngs(noise=0)

    def __call__(self, x):
        return self.linear(x) + jax.random.normal(self.rngs.noise(), x.shape)


@pytest.mark.parametrize("vmap", [False, True])
def test_a_module_that_draws_in_its_call_is_refused_with_the_remedy(vmap):
    model = Model(lambda: Diffused(nnx.Rngs(0)), inputs={"x": "float32[batch, 3]"}, vmap=vmap)
    params = arrays_like(model.abstract_params())
    call = model.functions["predict"].call
    with pytest.raises(ModelError) as raised:
        jax.eval_shape(lambda x: call(params, None, {"x": x}), jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert "the same for every request" in raised.value.what
    assert raised.value.where == "RNG stream rngs/noise"
    assert "rngs/noise/count" in str(raised.value.seen)
    assert "seed: uint32[batch]" in str(raised.value.remedy)
    assert "evaluation mode" in str(raised.value.remedy)
    with pytest.raises(ModelError, match="RNG stream rngs/noise"):
        call(params, None, {"x": np.ones((2, 3), np.float32)})


def test_dropout_that_a_function_switches_on_is_refused():
    model = Model(lambda: Noisy(nnx.Rngs(0)))

    @model.function(inputs={"x": "float32[batch, 3]"})
    def drop(net, x):
        net.dropout.set_attributes(deterministic=False)
        return net.dropout(x)

    with pytest.raises(ModelError, match="RNG stream dropout"):
        model.functions["drop"].call(arrays_like(model.abstract_params()), None, {"x": np.ones((2, 3), np.float32)})


def test_keys_that_are_split_for_layers_in_evaluation_mode_are_no_draw():
    class Stacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.rngs = rngs

        def __call__(self, x):
            keys = jax.random.split(self.rngs.dropout(), 2)

            def layer(x, key):
                return self.dropout(x + 1, rngs=key), None

            return jax.lax.scan(layer, x, keys)[0]

    model = Model(lambda: Stacked(nnx.Rngs(dropout=0)), inputs={"x": "float32[batch, 3]"})
    got = model.functions["predict"].call({}, None, {"x": np.ones((2, 3), np.float32)})[1]["output"]
    np.testing.assert_array_equal(got, np.full((2, 3), 3.0))


def test_noise_from_a_seed_is_drawn():
    model = Model(lambda: Diffused(nnx.Rngs(0)))

    @model.function(inputs={"seed": "uint32[batch]"})
    def noise(net, seed):
        return jax.vmap(lambda each: jax.random.normal(jax.random.key(each), (3,)))(seed)

    got = model.functions["noise"].call(
        arrays_like(model.abstract_params()), None, {"seed": np.array([1, 2], np.uint32)}
    )[1]["output"]
    np.testing.assert_array_equal(got[1], jax.random.normal(jax.random.key(2), (3,)))


def test_a_live_module_stays_in_training_mode():
    net = Noisy(nnx.Rngs(0))
    model = Model(net, inputs={"x": "float32[batch, 3]"})
    assert model.functions["predict"].call(model.params_of(net), None, {"x": np.ones((1, 3), np.float32)})
    assert net.dropout.deterministic is False
    assert net.norm.use_running_average is False


def test_a_function_that_changes_the_module_under_vmap_changes_a_copy():
    model = Model(lambda: Noisy(nnx.Rngs(0)))

    @model.function(inputs={"x": "float32[3]"}, vmap=True)
    def trained(net, x):
        net.train()
        return net.norm(x[None])[0]

    params = arrays_like(model.abstract_params())
    got = model.functions["trained"].call(params, None, {"x": np.ones((2, 3), np.float32)})[1]["output"]
    # One row normalised by itself is zero before the bias.
    np.testing.assert_allclose(got, np.stack([params["norm"]["bias"]] * 2), atol=1e-5)


def test_abstract_evaluation_of_a_tebibyte_allocates_nothing():
    class Big(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(2**19, 2**19, rngs=rngs)
            self.mask = jnp.tril(jnp.ones((4, 4)))

        def __call__(self, x):
            return self.layer(x)

    before = {id(array) for array in jax.live_arrays()}
    model = Model(lambda: Big(nnx.Rngs(0)), inputs={"x": "float32[batch, 524288]"})
    kernel = model.abstract_params()["layer"]["kernel"]
    assert kernel.size * kernel.dtype.itemsize == 2**40
    np.testing.assert_array_equal(model.defaults()["mask",], np.tril(np.ones((4, 4))))
    assert {id(array) for array in jax.live_arrays()} <= before


def test_shared_modules_are_one_set_of_parameters():
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
            self.second = self.first

        def __call__(self, x):
            return self.second(self.first(x))

    model = Model(lambda: Tied(nnx.Rngs(0)), inputs={"x": "float32[batch, 2]"})
    kernel = np.array([[0, 1], [2, 0]], np.float32)
    assert paths(model.abstract_params()) == {"first/kernel"}
    got = model.functions["predict"].call(unflatten({("first", "kernel"): kernel}), None, {"x": np.eye(2, dtype="f")})
    np.testing.assert_array_equal(got[1]["output"], [[2, 0], [0, 2]])


def test_modules_that_are_no_pytrees_and_hold_lists():
    class Listed(nnx.Module, pytree=False):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = [nnx.Linear(2, 2, use_bias=False, rngs=rngs), jnp.ones(2)]

        def __call__(self, x):
            return self.layers[0](x) + self.layers[1]

    model = Model(lambda: Listed(nnx.Rngs(0)), inputs={"x": "float32[batch, 2]"})
    assert paths(model.abstract_params()) == {"layers/0/kernel", "layers/1"}
    params = {"layers": {"0": {"kernel": np.eye(2, dtype="f") * 3}, "1": np.array([1, 2], "f")}}
    got = model.functions["predict"].call(params, None, {"x": np.ones((1, 2), np.float32)})[1]["output"]
    np.testing.assert_array_equal(got, [[4, 5]])


def test_annotations_of_sharding_need_no_mesh():
    class Annotated(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
            self.layer = nnx.Linear(2, 2, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    model = Model(lambda: Annotated(nnx.Rngs(0)), inputs={"x": "float32[batch, 2]"})
    params = {"layer": {"kernel": np.eye(2, dtype="f") * 3, "bias": np.zeros(2, "f")}}
    got = model.functions["predict"].call(params, None, {"x": np.ones((1, 2), np.float32)})[1]["output"]
    np.testing.assert_array_equal(got, [[3, 3]])


def test_numpy_scalars_and_variables_that_hold_trees():
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.heads = np.int64(2)
            self.pair = nnx.Variable({"scale": jnp.ones(2), "steps": [3]})
            self.label = nnx.Variable("name")

        def __call__(self, x):
            return x.reshape(x.shape[0], int(self.heads), -1) * self.pair.get_value()["scale"]

    model = Model(Odd, inputs={"x": "float32[batch, 4]"})
    assert paths(model.abstract_params()) == {"pair/scale", "pair/steps/0"}
    params = model.params_of(Odd())
    assert params["pair"]["steps"]["0"].dtype == np.int32
    got = model.functions["predict"].call(params, None, {"x": np.ones((1, 4), np.float32)})[1]["output"]
    np.testing.assert_array_equal(got, np.ones((1, 2, 2)))


def test_live_parameters_of_another_model_are_refused_with_every_difference():
    model = Model(lambda: MLP(nnx.Rngs(0)), inputs={"x": "float32[batch, 3]"})
    other = MLP(nnx.Rngs(0))
    other.first = nnx.Linear(3, 6, rngs=nnx.Rngs(0))
    other.extra = nnx.Param(jnp.ones(1))
    del other.layers
    with pytest.raises(ModelError) as raised:
        model.params_of(other)
    text = str(raised.value)
    assert "7 differences" in text
    assert "layers/0/bias is missing" in text
    assert "extra is not expected" in text
    assert "first/kernel has shape (3, 6), expected (3, 5)" in text
