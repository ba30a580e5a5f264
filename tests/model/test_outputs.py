"""Inferred outputs: dimensions as names and affine expressions, and what cannot be explained."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from servax.core.errors import ModelError
from servax.model import Model, infer_outputs

GRID = [{"batch": batch, "length": length} for batch in (1, 8) for length in (8, 32)]
TOKENS = {"tokens": "int32[batch, length]"}


def outputs(function, sizes=GRID, params=None, inputs=None, **options) -> dict[str, str]:
    model = Model(function, inputs=inputs or TOKENS, **options)
    inferred = infer_outputs(model.functions["predict"], params or {}, None, sizes)
    assert inferred.call is model.functions["predict"].call
    return {spec.name: spec.text() for spec in inferred.signature.outputs}


def test_names_and_affine_expressions():
    def call(params, tokens):
        batch, length = tokens.shape
        return {
            "same": tokens,
            "turned": tokens.T.astype(jnp.float32),
            "fixed": jnp.zeros((batch, 7)),
            "longer": jnp.concatenate([tokens, tokens, tokens[:, :1]], 1),
            "shorter": tokens[:, 3:],
            "mirror": jnp.zeros((100 - length,)),
            "scalar": tokens.sum(),
        }

    assert outputs(call) == {
        "same": "int32[batch, length]",
        "turned": "float32[length, batch]",
        "fixed": "float32[batch, 7]",
        "longer": "int32[batch, 2*length+1]",
        "shorter": "int32[batch, length-3]",
        "mirror": "float32[-1*length+100]",
        "scalar": "int32[]",
    }


def test_outputs_come_in_order_of_name():
    model = Model(lambda params, tokens: {"b": tokens, "a": tokens}, inputs=TOKENS)
    signature = infer_outputs(model.functions["predict"], {}, None, GRID).signature
    assert [spec.name for spec in signature.outputs] == ["a", "b"]


@pytest.mark.parametrize("sizes", [[{"batch": 8, "length": 32}], [{"batch": 1, "length": 1}], GRID])
def test_one_bucket_is_enough(sizes):
    assert outputs(lambda params, tokens: tokens[:, None], sizes) == {"output": "int32[batch, 1, length]"}


def test_no_size_beyond_the_largest_bucket_and_few_of_them():
    seen = []

    def call(params, tokens):
        seen.append(tokens.shape)
        return params["table"][: tokens.shape[1]] + tokens[..., None]

    params = {"table": jax.ShapeDtypeStruct((32, 4), jnp.float32)}
    assert outputs(call, params=params) == {"output": "float32[batch, length, 4]"}
    assert max(length for _, length in seen) == 32
    assert max(batch for batch, _ in seen) == 8
    assert len(seen) == 5  # the largest, each dimension smaller, all at once, and length 1 (batch 1 was seen)


def test_a_function_without_named_dimensions():
    assert outputs(lambda params, x: x[None], [{}], inputs={"x": "float32[3]"}) == {"output": "float32[1, 3]"}


def test_sizes_that_only_multiples_allow():
    def call(params, tokens):
        return tokens.reshape(tokens.shape[0], -1, 8)[:, :, 0].repeat(8, 1)

    assert outputs(call) == {"output": "int32[batch, length]"}
    assert outputs(call, [{"batch": 2, "length": 32}]) == {"output": "int32[batch, length]"}


def test_stateful_functions_are_evaluated_with_their_state():
    model = Model(lambda params, x: x, state={"sum": "float32[3]"})

    @model.function(inputs={"x": "float32[batch, 3]"}, stateful=True)
    def add(params, state, x):
        return {"sum": state["sum"] + x.sum(0)}, (x, state["sum"])

    inferred = infer_outputs(model.functions["add"], {}, None, [{"batch": 2}])
    assert [(spec.name, spec.text()) for spec in inferred.signature.outputs] == [
        ("output_0", "float32[batch, 3]"),
        ("output_1", "float32[3]"),
    ]


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda params, tokens: tokens.reshape(-1), "output 'output', axis 0, has size 256 at batch=8,length=32"),
        (lambda params, tokens: {"half": tokens[:, ::5]}, "output 'half', axis 1, has size 7 at batch=8,length=32"),
        (lambda params, tokens: tokens.squeeze(), "output 'output' has another rank or dtype at other sizes"),
        (
            lambda params, tokens: {"a": tokens} if tokens.shape[0] > 1 else {"b": tokens},
            "output 'b' is missing at batch=8,length=32, and there at batch=1,length=32",
        ),
    ],
)
def test_dimensions_that_cannot_be_explained(function, part: str):
    with pytest.raises(ModelError) as raised:
        outputs(function)
    text = str(raised.value)
    assert part in text
    assert "function 'predict'" in text
    assert raised.value.remedy is not None


def test_rounding_is_found_even_where_all_buckets_are_even():
    with pytest.raises(ModelError, match=r"axis 1, has size 32 at .*, 8 at .*, 30 at batch=7,length=31"):
        outputs(lambda params, tokens: jnp.zeros((tokens.shape[0], tokens.shape[1] // 2 * 2)))


def test_a_function_that_runs_at_one_size_only():
    def call(params, tokens):
        return tokens @ jnp.zeros((32, 2))

    with pytest.raises(ModelError) as raised:
        outputs(call, [{"batch": 2, "length": 32}])
    assert "runs at length=32 only" in str(raised.value)
    assert "Write the number 32 in place of 'length'" in str(raised.value)


def test_dimensions_without_a_size():
    with pytest.raises(ModelError, match=r"dimensions without a size") as raised:
        outputs(lambda params, tokens: tokens, [{"batch": 1}])
    assert "length" in raised.value.seen
    assert "--bucket" in raised.value.remedy


def test_arrays_in_objects_that_jax_does_not_know():
    class Hidden(nnx.Module):
        def __init__(self) -> None:
            self.config = SimpleNamespace(table=jnp.arange(3.0))

        def __call__(self, x):
            return x * self.config.table

    with pytest.raises(ModelError, match=r"uses arrays that the module's definition hid from JAX") as raised:
        outputs(Hidden, [{"batch": 2}], inputs={"x": "float32[batch, 3]"})
    assert "float32[3]" in raised.value.seen
    assert "assign them to the module" in raised.value.remedy


def test_nothing_is_computed():
    before = {id(array) for array in jax.live_arrays()}
    params = {"w": jax.ShapeDtypeStruct((2**19, 2**19), np.float32)}
    inputs = {"x": "float32[batch, 524288]"}
    assert outputs(lambda params, x: x @ params["w"], [{"batch": 4}], params, inputs) == {
        "output": "float32[batch, 524288]"
    }
    assert {id(array) for array in jax.live_arrays()} <= before


@pytest.mark.parametrize(
    "function",
    [lambda params, x: x[:, :4], lambda params, x: jnp.pad(x, ((0, 0), (0, max(0, 4 - x.shape[1]))))],
    ids=["cut to four", "filled up to four"],
)
def test_a_size_that_only_small_requests_show_is_refused(function):
    """With buckets 8 and 16 both look like a fixed or an equal size; at 1 they do not."""
    model = Model(function, inputs={"x": "float32[batch, length]"}, params={}, name="small")
    sizes = [{"batch": 1, "length": 8}, {"batch": 4, "length": 16}]
    with pytest.raises(ModelError, match="axis 1"):
        infer_outputs(model.functions["predict"], {}, None, sizes)


def test_a_valid_convolution_has_no_output_below_its_reach():
    def convolve(params, x):
        return jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3), mode="valid"))(x)

    model = Model(convolve, inputs={"x": "float32[batch, length]"}, params={}, name="conv")
    sizes = [{"batch": 1, "length": 8}, {"batch": 4, "length": 16}]
    function = infer_outputs(model.functions["predict"], {}, None, sizes)
    assert function.signature.outputs[0].shape == ("batch", "length-2")
