"""Errors of a user's own code: function, sizes, line, words and hint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core.errors import ModelError, UsageError
from servax.model import Model, infer_outputs
from servax.model.explain import explained, hint, location


def use_bool(params, x):
    if x.sum() > 0:
        return x
    return -x


def use_size(params, x):
    return jnp.zeros(int(x.shape[0] * 1)) + jnp.arange(x[0])[: x.shape[0]]


def use_numpy(params, x):
    return np.tanh(np.asarray(x))


def use_index(params, x):
    return jnp.asarray([1, 2, 3][x[0].astype(int)]) + x


def use_mask(params, x):
    return x[x > 0]


def mismatch(params, x):
    return x + jnp.zeros(x.shape[0] + 2)


def mismatch_dot(params, x):
    return x @ jnp.zeros((x.shape[0] + 3, 2))


@pytest.mark.parametrize(
    ("function", "kind", "part", "advice"),
    [
        (use_bool, "TracerBoolConversionError", "if x.sum() > 0", "jax.lax.cond"),
        (use_size, "ConcretizationTypeError", "jnp.arange(x[0])", "static="),
        (use_numpy, "TracerArrayConversionError", "np.asarray(x)", "jax.numpy counterpart"),
        (use_index, "TracerIntegerConversionError", "[1, 2, 3]", "jnp.take"),
        (use_mask, "NonConcreteBooleanIndexError", "x[x > 0]", "jnp.where"),
        (mismatch, "TypeError", "jnp.zeros(x.shape[0] + 2)", "Shapes do not fit"),
        (mismatch_dot, "TypeError", "x @ jnp", "Shapes do not fit"),
    ],
)
def test_common_kinds(function, kind: str, part: str, advice: str):
    model = Model(function, inputs={"x": "float32[batch]"})
    with pytest.raises(ModelError) as raised:
        infer_outputs(model.functions["predict"], {}, None, [{"batch": 4}])
    error = raised.value
    assert error.what == f"function 'predict' raised {kind} at batch=4"
    assert "test_explain.py" in error.where
    assert part in error.where
    assert advice in error.remedy
    assert type(error.__cause__).__name__ == kind
    assert str(error.__cause__).splitlines()[0].strip() in error.seen


def test_errors_of_servax_pass_as_they_are():
    with pytest.raises(UsageError), explained("predict", {}):
        raise UsageError("already explained")


def test_errors_without_a_hint_keep_their_words():
    with pytest.raises(ModelError) as raised, explained("embed", {"batch": 2, "length": 7}):
        raise RuntimeError("out of cheese")
    assert str(raised.value).splitlines()[0] == "function 'embed' raised RuntimeError at batch=2, length=7"
    assert "out of cheese" in raised.value.seen
    assert raised.value.remedy is None


def test_the_place_is_the_users_line_not_the_librarys():
    def user():
        return jax.eval_shape(lambda x: jnp.dot(x, jnp.zeros((3, 3))), jax.ShapeDtypeStruct((2,), jnp.float32))

    with pytest.raises(TypeError) as raised:
        user()
    assert "jnp.dot(x, jnp.zeros((3, 3)))" in location(raised.value)
    assert hint(raised.value) is not None


def test_a_function_that_exits_does_not_end_the_process():
    with pytest.raises(ModelError, match="SystemExit"), explained("predict", {"batch": 2}):
        raise SystemExit(3)
