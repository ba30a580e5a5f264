"""Model: sources, several functions, inheritance of options, parameters, and definitions that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core.errors import ModelError
from servax.core.monitoring import counts, register, thread_role
from servax.core.trees import flatten, path_text
from servax.model import Model, Text, infer_outputs

X = {"x": "float32[batch, 3]"}
SHAPE = jax.ShapeDtypeStruct((3, 2), jnp.float32)


def linear(params, x):
    return x @ params["w"]


@pytest.mark.parametrize(
    "params",
    [{"w": np.zeros((3, 2), np.float32)}, {"w": SHAPE}, lambda: {"w": jnp.zeros((3, 2))}],
    ids=["example", "shapes", "factory"],
)
def test_params_of_a_plain_function(params):
    model = Model(linear, inputs=X, params=params)
    assert model.abstract_params() == {"w": SHAPE}
    assert model.name == "linear"
    assert model.defaults() == {}
    assert model.random_state() == ()


def test_parameters_of_a_plain_function_come_back_as_the_users_own_pytree():
    seen = []

    def call(params, x):
        seen.append(jax.tree.structure(params))
        return x * params["mlp/~/linear"]["w"] * params["layers"][1][0] * params["scale"]

    example = {"mlp/~/linear": {"w": np.float32(2)}, "layers": [(), (np.float32(3), None)], "scale": 5.0}
    model = Model(call, inputs=X, params=example)
    paths = [path_text(path) for path in flatten(model.abstract_params())]
    assert paths == ["layers/1/0", "mlp/~/linear/w", "scale"]
    params = model.params_of(example)
    got = model.functions["predict"].call(params, None, {"x": np.ones((1, 3), np.float32)})[1]["output"]
    np.testing.assert_array_equal(got, np.full((1, 3), 30))
    assert seen == [jax.tree.structure(example)]


def test_a_plain_function_adopts_the_structure_of_a_checkpoint():
    model = Model(linear, inputs=X)
    assert model.abstract_params() is None
    bound = model.bind({"w": np.zeros((3, 2), np.float32)})
    assert bound.abstract_params() == {"w": SHAPE}
    assert model.abstract_params() is None
    inferred = infer_outputs(bound.functions["predict"], bound.abstract_params(), None, [{"batch": 2}])
    assert inferred.signature.output("output").text() == "float32[batch, 2]"


def test_a_structure_that_is_not_the_models_is_refused_with_every_difference():
    model = Model(linear, inputs=X, params={"w": SHAPE, "b": SHAPE})
    assert model.bind({"w": SHAPE, "b": SHAPE}) is model
    with pytest.raises(ModelError) as raised:
        model.bind({"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "mu": {"w": SHAPE}})
    text = str(raised.value)
    assert "3 differences" in text
    assert "b is missing" in text
    assert "mu/w is not expected" in text
    assert "w has shape (2, 3), expected (3, 2)" in text
    assert "select the right subtree" in text


def test_live_parameters_are_strong_arrays_of_jaxs_dtypes():
    model = Model(lambda params, x: x * params["a"] * params["b"], inputs=X)
    params = model.params_of({"a": jnp.asarray(2.0), "b": np.float64(3)})
    assert not jnp.asarray(params["a"]).weak_type
    assert params["b"].dtype == np.float32


def test_functions_take_what_they_do_not_say_from_the_model():
    text = Text("tokenizer.json", 8)
    model = Model(
        lambda params, tokens: tokens,
        inputs={"tokens": "int32[rows, length]"},
        buckets={"rows": [1, 2], "length": [8]},
        pad={"tokens": 7},
        batch="rows",
        processors={"tokens": text},
    )

    @model.function(inputs={"tokens": "int32[rows, length]", "k": "int32[rows]"}, buckets={"length": [4]}, pad={"k": 1})
    def top(net, tokens, k):
        return tokens

    @model.function(name="scale", inputs={"x": "float32[n]"}, processors={})
    def whatever(net, x):
        return x

    assert list(model.functions) == ["predict", "top", "scale"]
    top_function, scale = model.functions["top"], model.functions["scale"]
    assert top_function.buckets == {"rows": (1, 2), "length": (4,)}
    assert (top_function.signature.batch, top_function.signature.input("tokens").pad) == ("rows", 7)
    assert top_function.signature.input("k").pad == 1
    assert top_function.processors == {"tokens": text}
    assert (scale.buckets, scale.signature.batch, scale.processors) == ({}, None, {})
    assert top([], "tokens", "k") == "tokens"


def test_vmap_of_the_model_holds_for_its_functions_but_not_for_stateful_ones():
    model = Model(lambda params, x: x, inputs={"x": "float32[3]"}, vmap=True, state={"n": "int32[]"})

    @model.function(inputs={"x": "float32[3]"}, buckets={"batch": [2]})
    def mapped(net, x):
        return x

    @model.function(inputs={"x": "float32[batch, 3]"}, stateful=True)
    def whole(net, state, x):
        return state, x

    assert model.functions["mapped"].signature.input("x").text() == "float32[batch, 3]"
    assert model.functions["whole"].call({}, {"n": np.int32(0)}, {"x": np.ones((2, 3))})[1]["output"].shape == (2, 3)


def test_defaults_are_compiled_once():
    from flax import nnx

    class Masked(nnx.Module):
        def __init__(self) -> None:
            self.mask = jnp.tril(jnp.ones((3, 3)))

        def __call__(self, x):
            return x @ self.mask

    register()
    model = Model(Masked, inputs=X)
    with thread_role("test of defaults"):
        first = model.defaults()
        compiled = counts("test of defaults")
        second = model.defaults()
        assert counts("test of defaults") == compiled
    np.testing.assert_array_equal(first["mask",], np.tril(np.ones((3, 3))))
    assert second["mask",] is first["mask",]


@pytest.mark.parametrize(
    ("define", "part"),
    [
        (lambda model: model.function(inputs=X)(named("predict")), "two functions named 'predict'"),
        (lambda model: model.function(name="a-b", inputs=X)(named("f")), "'a-b' is not a name for a function"),
        (lambda model: model.function(inputs=X, stateful=True)(named("f")), "stateful, but the model has no state"),
        (lambda model: model.function(inputs={"y": "float32[b]"})(named("f")), "takes no argument 'y'"),
    ],
)
def test_functions_that_are_refused(define, part: str):
    model = Model(linear, inputs=X)
    with pytest.raises(ModelError) as raised:
        define(model)
    assert part in str(raised.value)
    assert raised.value.remedy is not None
    assert list(model.functions) == ["predict"]


def named(name: str):
    def function(net, x):
        return x

    function.__name__ = name
    return function


def fail():
    raise ValueError("no such configuration")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (3, "neither a module nor a function"),
        (lambda: 3, "the factory returns no module"),
        (fail, "the factory of the model raised ValueError"),
    ],
)
def test_sources_that_are_refused(source, part: str):
    with pytest.raises(ModelError) as raised:
        Model(source, inputs=X)
    assert part in str(raised.value)


def test_a_factory_that_raises_is_told_with_its_line():
    with pytest.raises(ModelError) as raised:
        Model(fail, inputs=X)
    assert "test_model.py" in raised.value.where
    assert "no such configuration" in str(raised.value)


def test_params_are_for_plain_functions():
    from flax import nnx

    with pytest.raises(ModelError, match=r"params= is for plain functions"):
        Model(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), inputs={"inputs": "float32[batch, 2]"}, params={})


def test_a_module_without_a_call():
    from flax import nnx

    class Silent(nnx.Module):
        pass

    with pytest.raises(ModelError, match=r"Silent cannot be called") as raised:
        Model(Silent, inputs=X)
    assert "@model.function" in raised.value.remedy
    assert Model(Silent).functions == {}


def test_the_file_of_the_definition_is_known():
    assert Model(linear, inputs=X).source_file == Path(__file__).resolve()
    assert Model(linear, inputs=X).reference is None


def test_parameter_paths_that_clash_are_refused():
    with pytest.raises(ModelError) as raised:
        Model(linear, inputs=X, params={"a": {"b": 1.0}, "a/b": 2.0})
    assert raised.value.where == "a/b"


def test_importing_the_room_imports_no_library():
    code = (
        "import sys; before = set(sys.modules); import servax.model\n"
        "heavy = {'jax', 'flax', 'orbax', 'tensorflow', 'starlette', 'numpy'}\n"
        "assert not heavy & {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert set(servax.model.__all__) == set(dir(servax.model))\n"
        "for name in servax.model.__all__: getattr(servax.model, name)\n"
        "assert not {'flax', 'equinox'} & set(sys.modules), 'plain functions need neither'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
