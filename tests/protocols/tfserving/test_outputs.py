import json
import math

import ml_dtypes
import numpy as np
import pytest

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.tfserving.outputs import require_json, require_rows, write_outputs, write_predictions


def outputs(**specs: str) -> Signature:
    return Signature((), tuple(TensorSpec.parse(name, text) for name, text in specs.items()))


def test_one_output_is_bare_and_several_are_objects():
    y = np.array([[1, 2], [3, 4]], np.float32)
    n = np.array([5, 6], np.int32)
    assert json.loads(write_predictions({"y": y})) == {"predictions": [[1.0, 2.0], [3.0, 4.0]]}
    assert json.loads(write_outputs({"y": y})) == {"outputs": [[1.0, 2.0], [3.0, 4.0]]}
    assert json.loads(write_predictions({"y": y, "n": n})) == {
        "predictions": [{"y": [1.0, 2.0], "n": 5}, {"y": [3.0, 4.0], "n": 6}]
    }
    assert json.loads(write_outputs({"y": y, "n": n})) == {"outputs": {"y": [[1.0, 2.0], [3.0, 4.0]], "n": [5, 6]}}
    assert json.loads(write_outputs({"y": np.float32(2).reshape(())})) == {"outputs": 2.0}


def test_what_json_has_no_number_for_are_bare_words():
    y = np.array([math.nan, math.inf, -math.inf, 1.5], np.float32)
    assert write_predictions({"y": y}) == b'{"predictions":[NaN,Infinity,-Infinity,1.5]}'
    assert write_outputs({"y": y, "n": np.array([1])}) == b'{"outputs":{"y":[NaN,Infinity,-Infinity,1.5],"n":[1]}}'


@pytest.mark.parametrize(
    ("dtype", "values", "text"),
    [
        ("bool", [True, False], b"[true,false]"),
        ("uint64", [2**64 - 1, 0], b"[18446744073709551615,0]"),
        ("int64", [-(2**63), 1], b"[-9223372036854775808,1]"),
        ("int4", [-8, 7], b"[-8,7]"),
        ("uint4", [15, 0], b"[15,0]"),
        ("bfloat16", [1.5, -2], b"[1.5,-2.0]"),
        ("float16", [1.5, -2], b"[1.5,-2.0]"),
        ("float8_e4m3fn", [1.5, -2], b"[1.5,-2.0]"),
        ("float8_e5m2", [1.5, -2], b"[1.5,-2.0]"),
    ],
)
def test_numbers_of_every_dtype(dtype, values, text):
    dtype = getattr(ml_dtypes, dtype, dtype)
    assert write_predictions({"y": np.array(values, dtype)}) == b'{"predictions":%s}' % text


def test_rows_need_one_first_dimension():
    require_rows(outputs(y="float32[batch, 2]", n="int32[batch]"))
    for wrong in (
        outputs(y="float32[batch]", n="int32[3]"),
        outputs(y="float32[]"),
        outputs(y="float32[b]", n="int32[]"),
    ):
        with pytest.raises(InvalidInput, match="row by row") as caught:
            require_rows(wrong)
        assert "columnar" in caught.value.remedy


def test_complex_numbers_are_named():
    with pytest.raises(InvalidInput) as caught:
        require_json(outputs(y="complex64[batch]", n="int32[batch]"))
    assert (caught.value.where, caught.value.seen) == ("y", "complex64")
