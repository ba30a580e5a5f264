from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from servax.core.errors import InvalidInput
from servax.core.tensors import TensorSpec
from servax.stages.conversion import Fault, Ragged, check_unicode, convert, described


def spec(text: str, name: str = "x") -> TensorSpec:
    return TensorSpec.parse(name, text)


def taken(value: Any, text: str) -> np.ndarray[Any, Any]:
    converted = convert(value, spec(text)).value
    assert isinstance(converted, np.ndarray)
    assert converted.dtype == spec(text).numpy_dtype
    return converted


def refused(value: Any, text: str) -> Fault:
    with pytest.raises(Fault) as caught:
        convert(value, spec(text))
    assert caught.value.tensor == "x"
    assert text in caught.value.expected
    return caught.value


def test_an_array_of_the_right_dtype_is_not_copied() -> None:
    array = np.ones((2, 3), np.float32)
    converted = convert(array, spec("float32[batch, length]"))
    assert converted.value is array
    assert not converted.owned


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([1, 2**31 - 1, -(2**31)]), "int32[batch]"),
        (np.array([0, 2**32 - 1], np.int64), "uint32[batch]"),
        (np.array([7], np.int32), "int64[batch]"),
        (np.array([0.5, np.nan, np.inf, -0.0]), "float32[batch]"),
        (np.array([0.5], np.float16), "float32[batch]"),
        (np.array([1.5], np.float32), "bfloat16[batch]"),
        (np.array([1.5], ml_dtypes.bfloat16), "float32[batch]"),
        (np.array([1.0], ">f4"), "float32[batch]"),
        (np.array([-8, 7]), "int4[batch]"),
        (np.array([1 + 2j]), "complex64[batch]"),
        (jnp.arange(3), "int32[batch]"),
        (jnp.ones(2, jnp.bfloat16), "float32[batch]"),
        (np.float64(0.1), "float32[]"),
        ([1, 2], "float32[batch]"),
        ([0.1, 2], "float32[batch]"),
        ([0.1], "bfloat16[batch]"),
        ([True, False], "bool[batch]"),
        (3, "int32[]"),
        (0.1, "float32[]"),
        ((1, 2), "uint8[batch]"),
        ([jnp.arange(2), jnp.arange(2)], "int32[batch, length]"),
        ([[]], "int32[batch, length]"),
    ],
)
def test_taken_as_numpy_would_cast_it(value: Any, text: str) -> None:
    expected = np.asarray(value).astype(spec(text).numpy_dtype)
    np.testing.assert_array_equal(taken(value, text), expected)


@pytest.mark.parametrize(
    ("value", "text", "seen"),
    [
        (np.array([2**31]), "int32[batch]", "int64[1] with values from 2147483648 to 2147483648"),
        ([300, -1], "uint8[batch]", "int64[2] with values from -1 to 300"),
        ([8], "int4[batch]", "int64[1] with values from 8 to 8"),
        (np.array([0.1]), "float32[batch]", "float64[1] with 1 of 1 values that change in float32, e.g. 0.1"),
        (np.array([1e-3], np.float32), "bfloat16[batch]", "float32[1] with 1 of 1 values that change in bfloat16"),
        (np.array([1e300]), "float32[batch]", "float64[1] with 1 of 1 values that change in float32, e.g. 1e+300"),
        ([1.0, 1e300], "float32[batch]", "float64[2] with 1 of 2 values beyond the range of float32, e.g. 1e+300"),
        ([1.0], "int32[batch]", "float64[1]"),
        (np.array([1.0]), "int32[batch]", "float64[1]"),
        (np.array([1]), "float32[batch]", "int64[1]"),
        ([True], "int32[batch]", "bool[1]"),
        (np.array([True]), "float32[batch]", "bool[1]"),
        ([1], "bool[batch]", "int64[1]"),
        (["a"], "int32[batch]", "string[1]"),
        ([None], "int32[batch]", "object[1]"),
        ([2**64], "int64[batch]", "object[1]"),
        (np.array([1j]), "float32[batch]", "complex128[1]"),
        ({"a": 1}, "int32[batch]", "object[], 0 axes"),
    ],
)
def test_refused(value: Any, text: str, seen: str) -> None:
    assert refused(value, text).seen.startswith(seen)


def test_the_range_of_the_dtype_is_said() -> None:
    assert refused([300], "uint8[batch]").expected == "uint8[batch], values from 0 to 255"


def test_an_array_of_another_kind_gets_the_cast_as_remedy() -> None:
    assert refused(np.array([0.1]), "float32[batch]").remedy == "convert it: x.astype('float32')"
    assert refused(np.array([1]), "float32[batch]").remedy == "convert it: x.astype('float32')"
    assert refused([1.0], "int32[batch]").remedy is None


def test_another_rank() -> None:
    fault = refused(np.zeros(3, np.int32), "int32[batch, length]")
    assert fault.seen == "int32[3], 1 axes"
    assert fault.expected == "int32[batch, length], 2 axes"
    assert fault.remedy == "a single row still needs its axis 'batch': x[None]"
    assert refused(np.zeros((1, 2, 3), np.int32), "int32[batch, length]").remedy is None
    assert refused([], "int32[batch, length]").seen == "no rows"


def test_strings() -> None:
    assert taken(["a", "b"], "string[batch]").tolist() == ["a", "b"]
    assert taken(np.array(["a"], object), "string[batch]").tolist() == ["a"]
    assert refused([1], "string[batch]").seen == "int64[1]"
    assert refused(np.array([b"a"], object), "string[batch]").seen == "bytes8[1]"


def ragged(value: Any, text: str) -> Ragged:
    converted = convert(value, spec(text))
    assert converted.owned
    assert isinstance(converted.value, Ragged)
    return converted.value


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3], [4]],
        ([1, 2, 3], [4]),
        [np.array([1, 2, 3]), np.array([4])],
        [np.array([1, 2, 3], np.int32), np.array([4], np.int64)],
        [jnp.array([1, 2, 3]), jnp.array([4])],
        np.array([[1, 2, 3], [4]], object),
    ],
)
def test_rows_of_different_length(rows: Any) -> None:
    found = ragged(rows, "int32[batch, length]")
    assert found.flat.tolist() == [1, 2, 3, 4]
    assert found.flat.dtype == np.int32
    assert found.lengths.tolist() == [3, 1]
    assert found.axis == 1
    assert found.shape == (2, 3)


def test_rows_may_be_ragged_along_a_later_axis() -> None:
    rows = [np.arange(6).reshape(2, 3), np.arange(2).reshape(2, 1)]
    found = ragged(rows, "int32[batch, 2, length]")
    assert found.axis == 2
    assert found.shape == (2, 2, 3)
    assert found.flat.tolist() == [[0, 3], [1, 4], [2, 5], [0, 1]]


def test_rows_of_python_floats_are_rounded() -> None:
    assert ragged([[0.1], [0.2, 3]], "float32[batch, length]").flat.tolist() == [
        float(np.float32(value)) for value in (0.1, 0.2, 3)
    ]


@pytest.mark.parametrize(
    ("rows", "text", "seen"),
    [
        ([[1, 2], []], "int32[batch, length]", "rows without elements: 1"),
        ([[1, 2], [3]], "int32[batch, 2]", "rows of lengths 2, 1"),
        ([np.zeros((1, 2)), np.zeros((2, 1))], "float32[batch, height, width]", "rows that differ in 2 axes"),
        ([np.zeros(2), np.zeros((2, 1))], "float32[batch, length]", "rows with 1, 2 axes"),
        ([[[1], [2]], [[3]]], "int32[batch, length]", "rows with 2 axes"),
        ([np.array([True]), np.array([1, 2])], "int32[batch, length]", "rows of different dtypes: bool, integer"),
        ([[1, 2], [300]], "uint8[batch, length]", "int64[3] with values from 1 to 300"),
        ([[1, [2]], [3]], "int32[batch, length]", "a list that is not an array"),
    ],
)
def test_rows_that_do_not_fit(rows: Any, text: str, seen: str) -> None:
    assert refused(rows, text).seen.startswith(seen)


def test_described() -> None:
    assert described(np.zeros((2, 3), np.float16)) == "float16[2, 3]"
    assert described(np.zeros((), ml_dtypes.bfloat16)) == "bfloat16[]"
    assert described(np.array(["a"])) == "string[1]"


def test_every_text_that_is_not_unicode_is_named() -> None:
    check_unicode("text", ["grün", "\U0001f600", ""])
    with pytest.raises(InvalidInput) as caught:
        check_unicode("text", ["a", "b\udfff", "c", "\ud800"])
    error = caught.value
    assert error.where == "text[1], text[3]"
    assert error.seen == "U+DFFF at character 1, U+D800 at character 0"
    assert "UTF-8" in str(error.expected)
    with pytest.raises(InvalidInput) as caught:
        check_unicode("text", ["\ud800"] * 20)
    assert str(caught.value.where).endswith("text[7], and 12 more")
