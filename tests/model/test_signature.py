"""Definitions of functions: what they become, and each fault with its remedy."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from servax.core.errors import ModelError
from servax.model.processors import Text
from servax.model.signature import Checked, Declaration, check, flat_items, mentioned, nested, state_specs


def accepts(function) -> inspect.Signature:
    return inspect.signature(function)


def checked(function=lambda **inputs: None, **declared) -> Checked:
    return check("predict", Declaration(**declared), accepts(function))


def faults(function=lambda **inputs: None, **declared) -> str:
    with pytest.raises(ModelError) as raised:
        checked(function, **declared)
    assert raised.value.where == "function 'predict'"
    return str(raised.value)


def test_nested_inputs_become_dotted_names_in_order():
    result = checked(inputs={"pair": {"right": "int32[batch]", "left": "int32[batch]"}, "a": "float32[batch, 2]"})
    assert [spec.name for spec in result.signature.inputs] == ["a", "pair.left", "pair.right"]
    assert result.signature.batch == "batch"


def test_nesting_and_dotted_names_are_inverse():
    tree = {"a": 1, "b": {"c": {"d": 2}, "e": 3}}
    flat = dict(flat_items(tree))
    assert flat == {"a": 1, "b.c.d": 2, "b.e": 3}
    assert nested(flat) == tree


def test_pads_nested_or_dotted_are_cast_to_the_input():
    inputs = {"pair": {"x": "float32[batch]", "y": "int32[batch]"}, "mask": "bool[batch]"}
    for pad in ({"pair": {"x": 1, "y": np.int64(3)}, "mask": True}, {"pair.x": 1, "pair.y": 3.0, "mask": 1}):
        signature = checked(inputs=inputs, pad=pad).signature
        assert [signature.input(name).pad for name in ("pair.x", "pair.y", "mask")] == [1, 3, True]
        assert isinstance(signature.input("pair.y").pad, int)


def test_lengths_are_further_inputs():
    signature = checked(
        lambda tokens, n: None, inputs={"tokens": "int32[batch, length]"}, lengths={"n": "length"}
    ).signature
    assert signature.input("n").text() == "int32[batch]"
    assert signature.lengths == {"n": "length"}
    single = checked(inputs={"tokens": "int32[length]"}, lengths={"n": "length"}).signature
    assert single.batch is None
    assert single.input("n").text() == "int32[]"


def test_vmap_takes_specs_of_one_example_or_of_the_batch():
    for spec in ("float32[4]", "float32[batch, 4]"):
        signature = checked(
            inputs={"x": spec, "seed": "uint32[batch]"} if "batch" in spec else {"x": spec}, vmap=True
        ).signature
        assert signature.input("x").text() == "float32[batch, 4]"
        assert signature.batch == "batch"
    assert checked(inputs={"x": "float32[4, rows]"}, vmap=True, batch="rows").signature.input("x").shape == (4, "rows")


def test_buckets_are_sorted_and_each_once():
    assert checked(inputs={"x": "float32[batch]"}, buckets={"batch": [8, 1, 8]}).buckets == {"batch": (1, 8)}


def test_flags_of_evaluation_are_set_where_taken_and_not_given():
    def call(x, train=True, deterministic=False, use_running_average=None, other=1):
        pass

    assert checked(call, inputs={"x": "float32[batch]"}, static={"deterministic": False, "other": 2}).fixed == {
        "train": False,
        "deterministic": False,
        "use_running_average": True,
        "other": 2,
    }


def test_every_fault_is_listed():
    def call(x, y, z):
        pass

    text = faults(
        call,
        inputs={"x": "float32[batch, length]", "w": "int32[batch]", "y": "not a spec", "v": 3},
        buckets={"width": [1], "length": [0]},
        pad={"u": 0, "w": 0.5},
        lengths={"n": "depth", "m": "batch"},
        processors={"t": Text("tokenizer.json", 8)},
    )
    for part in (
        "fault",
        "the spec of tensor 'y' cannot be read",
        "input 'v' has the spec 3",
        "pad= names 'u', which is no input (inputs are x, w, y, v)",
        "pad= of input 'w' is 0.5, which is no int32",
        "names the unknown dimension 'depth' (dimensions are batch, length)",
        "lengths= of 'm' names the batch dimension 'batch'",
        "buckets= names the unknown dimension 'width' (dimensions are batch, length)",
        "buckets= of 'length' are [0] (give sizes of at least 1)",
        "processors= names 't', which is no input",
        "the function takes no argument 'w' (its arguments are x, y, z)",
        "argument 'z' has no spec (add it to inputs=, lengths= or static=)",
    ):
        assert part in text
    assert text.count("\n    1. ") == 1
    assert "remedy" in text


def test_a_batch_that_is_not_an_axis():
    assert "batch='rows' is not an axis of any input (dimensions are n)" in faults(
        inputs={"x": "float32[n]"}, batch="rows"
    )
    text = faults(inputs={"x": "float32[batch]", "t": "float32[]", "y": "float32[batch, batch]"})
    assert "input 't' (float32[]) has the batch dimension 'batch' 0 times" in text
    assert "input 'y' (float32[batch, batch]) has the batch dimension 'batch' 2 times" in text
    assert "say batch=None" in text
    assert checked(inputs={"x": "float32[batch]", "t": "float32[]"}, batch=None).signature.batch is None


@pytest.mark.parametrize(
    ("declared", "part"),
    [
        ({"inputs": {"x": "string[batch]"}}, "input 'x' is a string, which no program takes"),
        ({"inputs": {"x": "int8[batch]"}, "pad": {"x": 200}}, "which is no int8"),
        ({"inputs": {"x": "int8[batch]"}, "pad": {"x": "0"}}, "which is no number"),
        ({"inputs": {"x": "int8[batch]"}, "vmap": True, "batch": None}, "vmap=True maps over the batch"),
        ({"inputs": {"x": "int8[batch]"}, "vmap": True, "stateful": True}, "exclude one another"),
        ({"inputs": {"x": "int8[batch]"}, "static": {"x": 1}}, "both an input and in static="),
        ({"inputs": {"x": "int8[b, n]"}, "lengths": {"x": "n"}}, "both an input and in lengths="),
        ({"inputs": {"x": "int8[b]"}, "processors": {"x": "tokenizer.json"}}, "use one of servax's"),
        ({"inputs": {"x": "int8[b]"}, "processors": {"x": Text("t.json", 8, name="x")}}, "give it another name="),
        ({"inputs": {"x": "int8[b]"}, "buckets": {"b": []}}, "buckets= of 'b' are []"),
    ],
)
def test_single_faults(declared, part: str):
    text = faults(**declared)
    assert part in text
    assert "1 fault" in text


def test_positional_only_arguments():
    def call(x, /):
        pass

    assert "argument 'x' is positional-only" in faults(call, inputs={"x": "int8[b]"})


def test_specs_of_the_state_are_fixed():
    assert [spec.text() for spec in state_specs({"b": "float32[2]", "a": {"c": "int32[]"}})] == [
        "int32[]",
        "float32[2]",
    ]
    with pytest.raises(ModelError, match=r"cache: float32\[batch, 4\]; step: int32\[\] = 1"):
        state_specs({"cache": "float32[batch, 4]", "step": "int32[] = 1", "fine": "int32[1]"})


def test_dimensions_that_specs_mention():
    assert mentioned({"x": "int32[batch, 4]", "y": {"z": "float32[ length ] = 1.0"}, "bad": 3}) == {"batch", "length"}
