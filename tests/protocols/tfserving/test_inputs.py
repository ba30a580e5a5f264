import base64
import json
import math

import ml_dtypes
import numpy as np
import pytest

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.tfserving.inputs import array_of, from_inputs, from_instances, read


def signature(**specs: str) -> Signature:
    return Signature(tuple(TensorSpec.parse(name, text) for name, text in sorted(specs.items())))


ONE = signature(x="float32[batch, length]")
THREE = signature(sensor="float32[batch, 2, 2]", signal="int32[batch, 5]", tag="int64[batch]")
WORDS = Signature((TensorSpec.parse("tokens", "int32[batch, length]"),))
TEXTS = {"text": "tokens"}


def test_rows_of_one_tensor_need_no_name():
    tensors = from_instances(
        read(b'{"instances": [[[1, 2]], [[3, 4]]]}')["instances"], signature(x="int32[b, 1, 2]"), {}
    )
    np.testing.assert_array_equal(tensors["x"], np.array([[[1, 2]], [[3, 4]]], np.int32))
    assert tensors["x"].dtype == np.int32
    scalars = from_instances([1.5, 2, 3], signature(x="float32[batch]"), {})
    np.testing.assert_array_equal(scalars["x"], np.array([1.5, 2, 3], np.float32))


def test_rows_of_several_tensors_are_objects():
    # The example of TensorFlow Serving's page, its strings replaced by numbers: models of JAX take numbers.
    rows = [
        {"tag": 7, "signal": [1, 2, 3, 4, 5], "sensor": [[1, 2], [3, 4]]},
        {"tag": 8, "signal": [3, 4, 1, 2, 5], "sensor": [[4, 5], [6, 8]]},
    ]
    columns = {
        "tag": [7, 8],
        "signal": [[1, 2, 3, 4, 5], [3, 4, 1, 2, 5]],
        "sensor": [[[1, 2], [3, 4]], [[4, 5], [6, 8]]],
    }
    for tensors in (from_instances(rows, THREE, {}), from_inputs(columns, THREE, {})):
        np.testing.assert_array_equal(tensors["tag"], np.array([7, 8], np.int64))
        np.testing.assert_array_equal(tensors["signal"], np.array([[1, 2, 3, 4, 5], [3, 4, 1, 2, 5]], np.int32))
        np.testing.assert_array_equal(tensors["sensor"], np.array([[[1, 2], [3, 4]], [[4, 5], [6, 8]]], np.float32))
        assert [tensors[name].dtype for name in ("tag", "signal", "sensor")] == [np.int64, np.int32, np.float32]


def test_one_tensor_may_be_named_or_not_in_both_formats():
    expected = np.array([[1, 2]], np.float32)
    for tensors in (
        from_instances([[1, 2]], ONE, {}),
        from_instances([{"x": [1, 2]}], ONE, {}),
        from_inputs([[1, 2]], ONE, {}),
        from_inputs({"x": [[1, 2]]}, ONE, {}),
    ):
        np.testing.assert_array_equal(tensors["x"], expected)


def test_a_tensor_without_axes_is_a_bare_value_of_the_columnar_format():
    assert from_inputs(3, signature(x="float32[]"), {})["x"].tolist() == 3.0
    with pytest.raises(InvalidInput, match="does not fit"):
        from_instances([3], signature(x="float32[]"), {})


def test_values_without_a_name_are_for_the_one_tensor_that_is_needed():
    optional = Signature(
        (
            *signature(scale="float32[batch] = 1.0", x="float32[batch, length]").inputs,
            TensorSpec("n", "int32", ("batch",)),
        ),
        lengths={"n": "length"},
    )
    assert list(from_instances([[1.0]], optional, {})) == ["x"]
    with pytest.raises(InvalidInput, match="several tensors") as caught:
        from_instances([1, 2], THREE, {})
    assert caught.value.expected == "an object with sensor, signal, tag"
    with pytest.raises(InvalidInput, match="several tensors"):
        from_inputs([1, 2], THREE, {})


@pytest.mark.parametrize("value", [["foo", "bar"], [{"b64": base64.b64encode(b"foo").decode()}, "bar"]])
def test_texts_are_strings_or_base64(value):
    text = [item.decode() if isinstance(item, bytes) else item for item in from_instances(value, WORDS, TEXTS)["text"]]
    assert text == ["foo", "bar"]
    assert [str(len(each)) for each in from_inputs({"text": value}, WORDS, TEXTS)["text"]] == ["3", "3"]
    assert len(from_instances([{"text": item} for item in value], WORDS, TEXTS)["text"]) == 2


def test_numbers_go_to_the_tensor_itself_also_where_it_has_a_text():
    np.testing.assert_array_equal(from_instances([[1, 2]], WORDS, TEXTS)["tokens"], [[1, 2]])


def test_base64_is_read_without_its_padding_and_refused_where_it_is_none():
    assert from_inputs({"text": [{"b64": "Zm9vYg"}]}, WORDS, TEXTS)["text"] == [b"foob"]
    with pytest.raises(InvalidInput, match="base64") as caught:
        from_inputs({"text": ["a", {"b64": "!!"}]}, WORDS, TEXTS)
    assert caught.value.where == "text[1]"
    with pytest.raises(InvalidInput, match="something else") as caught:
        from_inputs({"text": ["a", {"b64": 7}]}, WORDS, TEXTS)
    assert (caught.value.where, caught.value.seen) == ("text[1]", "an object")
    with pytest.raises(InvalidInput, match="does not fit") as caught:
        from_inputs({"x": [[{"b64": "Zm9v"}]]}, ONE, {})
    assert (caught.value.where, caught.value.seen) == ("x[0][0]", "bytes")


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4", "uint4"]
)
def test_integers_of_every_width_up_to_their_limits(dtype):
    limits = ml_dtypes.iinfo(dtype)
    spec = TensorSpec.parse("x", f"{dtype}[batch]")
    array = array_of(spec, [int(limits.min), int(limits.max)])
    assert array.dtype == spec.numpy_dtype
    assert list(map(int, array)) == [limits.min, limits.max]
    for beyond in (int(limits.max) + 1, int(limits.min) - 1, 10**30):
        with pytest.raises(InvalidInput) as caught:
            array_of(spec, [0, beyond])
        assert (caught.value.where, caught.value.seen) == ("x", str(beyond))
        assert caught.value.expected == f"{dtype}[batch]: values from {limits.min} to {limits.max}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_take_integers_and_are_rounded(dtype):
    spec = TensorSpec.parse("x", f"{dtype}[batch]")
    array = array_of(spec, [1, 0.1, -2.5])
    np.testing.assert_array_equal(array, np.array([1, 0.1, -2.5]).astype(spec.numpy_dtype))
    assert array.dtype == spec.numpy_dtype
    if dtype != "float64":
        with pytest.raises(InvalidInput) as caught:
            array_of(spec, [1e300])
        assert (caught.value.where, caught.value.seen) == ("x", "1e+300")


def test_bare_nan_and_infinity_are_numbers():
    values = read(b'{"inputs": {"x": [[NaN, Infinity, -Infinity, 1.5]]}}')["inputs"]
    row = from_inputs(values, ONE, {})["x"][0].tolist()
    assert math.isnan(row[0])
    assert row[1:] == [math.inf, -math.inf, 1.5]


@pytest.mark.parametrize(
    ("value", "where", "seen"),
    [
        ([[1, "2"]], "x[0][1]", "'2'"),
        ([[1, True]], "x[0][1]", "true"),
        ([[1, None]], "x[0][1]", "null"),
        ([[1, {"a": 1}]], "x[0][1]", "an object"),
        ([[1, [2]]], "x[0][1]", "a list"),
        ([1, 2], "x[0]", "1"),
        ("text", "x", "'text'"),
        (None, "x", "null"),
        ([[1, 2], [3]], "x", "rows of 1, 2 values at axis 1"),
        ([], "x", "no values"),
    ],
)
def test_a_misfit_names_tensor_place_seen_and_expected(value, where, seen):
    with pytest.raises(InvalidInput) as caught:
        from_inputs({"x": value}, ONE, {})
    assert (caught.value.where, caught.value.seen) == (where, seen)
    assert "float32[batch, length]" in caught.value.expected


@pytest.mark.parametrize("value", [1.0, True, "1"])
def test_integers_are_written_as_integers(value):
    with pytest.raises(InvalidInput) as caught:
        from_inputs([value], signature(x="int32[batch]"), {})
    assert caught.value.expected == "an integer there, for int32[batch]"
    with pytest.raises(InvalidInput):
        from_inputs([1], signature(x="bool[batch]"), {})
    assert from_inputs([True, False], signature(x="bool[batch]"), {})["x"].tolist() == [True, False]


@pytest.mark.parametrize(
    ("instances", "what"),
    [
        ([], "no list of rows"),
        ("abc", "no list of rows"),
        ({"x": [1]}, "no list of rows"),
        (None, "no list of rows"),
        ([{"x": [1]}, [1]], "mixes"),
        ([[1], {"x": [1]}], "mixes"),
        ([{"x": [1]}, {"y": [1]}], "the same tensors"),
        ([{"x": [1]}, {}], "the same tensors"),
        ([{"nope": [1]}], "no input 'nope'"),
    ],
)
def test_rows_that_do_not_go_together_are_refused(instances, what):
    with pytest.raises(InvalidInput, match=what):
        from_instances(instances, ONE, {})


def test_tensors_are_known_by_a_saved_model_s_names_too():
    dotted = signature(**{"image.left": "float32[batch]", "_x": "float32[batch]"})
    for left, x in (("image.left", "_x"), ("image_left", "arg__x")):
        assert set(from_inputs({left: [1], x: [2]}, dotted, {})) == {"image.left", "_x"}
        assert from_instances([{left: 1, x: 2}], dotted, {})["_x"] == [2]
    with pytest.raises(InvalidInput, match="twice"):
        from_inputs({"image_left": [1], "image.left": [1]}, dotted, {})


def test_names_of_a_request_are_repeated_in_short():
    with pytest.raises(InvalidInput) as caught:
        from_inputs({"n" * 10_000: 1}, ONE, {})
    assert len(str(caught.value)) < 500


def test_a_dtype_without_json_is_refused_by_name():
    with pytest.raises(InvalidInput) as caught:
        from_inputs([[1]], signature(x="complex64[batch, length]"), {})
    assert "gRPC" in caught.value.expected


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"a": [1,]}', b"NaN,", b"[Infinity", b"[1e999]", b"nul", b'"\\ud800'],
)
def test_what_is_not_json_is_said_so(body):
    with pytest.raises(InvalidInput, match="not JSON"):
        read(body)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"[NaN," + b"[" * 100_000])
def test_deep_nesting_is_refused(body):
    with pytest.raises(InvalidInput, match=r"nested too deeply|not JSON"):
        read(body)


def test_lists_deeper_than_the_tensor_are_refused_quickly():
    value = json.loads("[" * 400 + "]" * 400)
    with pytest.raises(InvalidInput, match="does not fit"):
        from_inputs(value, ONE, {})
    with pytest.raises(InvalidInput, match="does not fit"):
        from_instances(value, WORDS, TEXTS)


def test_a_huge_integer_is_refused_without_being_written_out():
    body = b'{"inputs": [' + b"9" * 4000 + b"]}"
    with pytest.raises(InvalidInput):
        from_inputs(read(body)["inputs"], signature(x="int64[batch]"), {})
    with pytest.raises(InvalidInput):
        from_inputs(read(body)["inputs"], signature(x="float32[batch]"), {})
