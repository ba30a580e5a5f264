"""The pure Call: nested inputs and outputs, lengths, seed, vmap and state, against NumPy."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core.errors import ModelError
from servax.model import Model
from servax.model.call import named_outputs

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def run(model: Model, name: str = "predict", params=None, **inputs):
    return model.functions[name].call(params or {}, None, inputs)[1]


def test_a_plain_function_with_nested_inputs_and_outputs():
    def add(params, pair, scale):
        return {"sum": pair["left"] + pair["right"] * params["w"], "more": {"scaled": pair["left"] * scale[:, None]}}

    model = Model(
        add,
        inputs={
            "pair": {"left": "float32[batch, 3]", "right": "float32[batch, 3]"},
            "scale": "float32[batch] = 2.0",
        },
    )
    got = run(
        model, params={"w": np.float32(10)}, **{"pair.left": X, "pair.right": X + 1, "scale": np.array([1, 3], "f")}
    )
    assert set(got) == {"sum", "more.scaled"}
    np.testing.assert_array_equal(got["sum"], X + (X + 1) * 10)
    np.testing.assert_array_equal(got["more.scaled"], X * [[1], [3]])
    assert model.functions["predict"].signature.input("scale").default == 2.0


class Pair(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (X, {"output"}),
        (3.0, {"output"}),
        ((X, X), {"output_0", "output_1"}),
        ([X, {"a": X}], {"output_0", "output_1.a"}),
        ({"a": X, "b": {"c": X, "d": [X, X]}, "none": None}, {"a", "b.c", "b.d.0", "b.d.1"}),
        (Pair(X, {"x": X}), {"first", "second.x"}),
    ],
)
def test_names_of_outputs(result, names):
    assert set(named_outputs("predict", result)) == names


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (None, "nothing is returned"),
        ({"a": "text"}, "'a' is a str (return arrays only)"),
        ({"a.b": X, "a": {"b": X}}, "'a.b' is the name of two outputs"),
        ({"k": jax.random.key(0)}, "'k' is a typed PRNG key"),
    ],
)
def test_outputs_that_are_refused(result, part: str):
    with pytest.raises(ModelError) as raised:
        named_outputs("predict", result)
    assert part in str(raised.value)
    assert "outputs of function 'predict' have 1 fault" in str(raised.value)


def test_vmap_gives_one_example_with_scalar_length_and_seed():
    shapes = {}

    def mean(params, tokens, n, seed):
        shapes.update(tokens=tokens.shape, n=n.shape, seed=seed.shape)
        kept = jnp.where(jnp.arange(tokens.shape[0]) < n, tokens, 0)
        return {"mean": kept.sum() / n, "draw": jax.random.uniform(jax.random.key(seed))}

    model = Model(
        mean,
        inputs={"tokens": "float32[length]", "seed": "uint32[]"},
        lengths={"n": "length"},
        vmap=True,
    )
    got = run(model, tokens=X, n=np.array([2, 3], np.int32), seed=np.array([5, 9], np.uint32))
    assert shapes == {"tokens": (3,), "n": (), "seed": ()}
    np.testing.assert_allclose(got["mean"], [X[0, :2].mean(), X[1].mean()])
    np.testing.assert_allclose(got["draw"], [float(jax.random.uniform(jax.random.key(seed))) for seed in (5, 9)])


def test_vmap_over_an_axis_that_is_not_the_first():
    model = Model(lambda params, x: x.sum(), inputs={"x": "float32[3, batch]"}, vmap=True)
    np.testing.assert_array_equal(run(model, x=X.T)["output"], X.sum(1))


@pytest.fixture
def stateful() -> Model:
    model = Model(
        lambda params, x: x, inputs={"x": "float32[batch, 3]"}, state={"sum": "float32[3]", "calls": {"n": "int32[]"}}
    )

    @model.function(inputs={"x": "float32[batch, 3]"}, stateful=True)
    def accumulate(params, state, x):
        total = state["sum"] + x.sum(0) * params["w"]
        return {"sum": total, "calls": {"n": state["calls"]["n"] + 1}}, {"mean": total / (state["calls"]["n"] + 1)}

    @model.function(inputs={"position": "int32[]", "value": "float32[3]"}, stateful=True)
    def write(params, state, position, value):
        row = jax.lax.dynamic_update_slice(state["sum"], value[:1], (position,))
        return state | {"sum": row}, row[position]

    return model


def test_an_accumulator(stateful: Model):
    function = stateful.functions["accumulate"]
    assert [(spec.name, spec.text()) for spec in function.state] == [("calls.n", "int32[]"), ("sum", "float32[3]")]
    state = {"sum": np.zeros(3, np.float32), "calls.n": np.int32(0)}
    expected = np.zeros(3, np.float32)
    for calls in (1, 2, 3):
        state, outputs = function.call({"w": np.float32(2)}, state, {"x": X * calls})
        expected += (X * calls).sum(0) * 2
        np.testing.assert_allclose(state["sum"], expected)
        np.testing.assert_allclose(outputs["mean"], expected / calls)
        assert int(state["calls.n"]) == calls
    assert stateful.functions["predict"].state is None


def test_a_toy_cache_under_jit(stateful: Model):
    call = jax.jit(stateful.functions["write"].call)
    state = {"sum": jnp.zeros(3), "calls.n": jnp.int32(0)}
    for position, value in ((1, 5.0), (2, 7.0)):
        inputs = {"position": np.int32(position), "value": np.full(3, value, "f")}
        state, outputs = call({"w": np.float32(1)}, state, inputs)
        assert float(outputs["output"]) == value
    np.testing.assert_array_equal(state["sum"], [0, 5, 7])


def test_a_state_that_changes_is_refused_with_every_difference():
    model = Model(lambda params, x: x, state={"a": "float32[3]", "b": "int32[]", "c": "float32[]"})

    @model.function(inputs={"x": "float32[batch]"}, stateful=True)
    def step(params, state, x):
        return {"a": state["a"][:2], "b": state["b"] * 1.5, "d": x}, x

    @model.function(inputs={"x": "float32[batch]"}, stateful=True)
    def bare(params, state, x):
        return x

    state = {"a": jnp.zeros(3), "b": jnp.int32(0), "c": jnp.float32(0)}
    with pytest.raises(ModelError) as raised:
        model.functions["step"].call({}, state, {"x": X[0]})
    text = str(raised.value)
    assert "c is missing" in text
    assert "d is not in state=" in text
    assert "a is float32[2], declared as float32[3]" in text
    assert "b is float32[], declared as int32[]" in text
    assert "4 differences" in text
    with pytest.raises(ModelError, match=r"does not return \(state, outputs\)"):
        model.functions["bare"].call({}, state, {"x": X[0]})


def test_inputs_named_like_the_arguments_of_libraries():
    def call(params, variables, rngs, inputs):
        return variables + rngs + inputs

    model = Model(call, inputs={"variables": "float32[b]", "rngs": "float32[b]", "inputs": "float32[b]"})
    np.testing.assert_array_equal(run(model, variables=X[0], rngs=X[0], inputs=X[0])["output"], X[0] * 3)
