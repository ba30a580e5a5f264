"""Specs of tensors: reading, shapes, dimensions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from servax.core.errors import ModelError
from servax.core.tensors import Signature, TensorSpec, dtype_of, evaluate_dim


@pytest.mark.parametrize(
    ("text", "dtype", "shape", "default"),
    [
        ("int32[batch, length]", "int32", ("batch", "length"), None),
        ("float32[]", "float32", (), None),
        (" bfloat16 [ batch ,3 ] ", "bfloat16", ("batch", 3), None),
        ("float32[batch] = 1.5", "float32", ("batch",), 1.5),
        ("int32[batch]=-1", "int32", ("batch",), -1),
        ("bool[batch] = true", "bool", ("batch",), True),
        ("string[batch]", "string", ("batch",), None),
    ],
)
def test_specs_are_read_and_written(text: str, dtype: str, shape, default):
    spec = TensorSpec.parse("x", text, pad=2)
    assert (spec.dtype, spec.shape, spec.default, spec.pad) == (dtype, shape, default, 2)
    assert spec.required is (default is None)
    assert TensorSpec.parse("x", spec.text(), pad=2) == spec


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("int32", "cannot be read"),
        ("int32[batch", "cannot be read"),
        ("int32[a-b]", "dimension 'a-b' of tensor 'x' is neither a size nor a name"),
        ("int33[batch]", "'int33' is not a dtype"),
        ("float[batch]", "'float' is not a dtype"),
        ("datetime64[batch]", "'datetime64' is not a dtype"),
        ("int32[batch] = 1.5", "the default of tensor 'x' is not a int32"),
        ("bool[batch] = 2", "the default of tensor 'x' is not a bool"),
    ],
)
def test_specs_that_cannot_be_read(text: str, part: str):
    with pytest.raises(ModelError) as raised:
        TensorSpec.parse("x", text)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.dtype(np.float32)),
        ("bool", np.dtype(bool)),
        ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
        ("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
        ("string", np.dtype(object)),
    ],
)
def test_dtypes(name: str, dtype: np.dtype):
    assert dtype_of(name) == dtype
    assert TensorSpec("x", name, ()).numpy_dtype == dtype


@pytest.mark.parametrize(
    ("dim", "size"), [(3, 3), ("n", 5), ("2*n", 10), ("2*n+1", 11), ("n-3", 2), ("-1*n+100", 95), ("-2*n-1", -11)]
)
def test_dimensions_have_sizes(dim, size: int):
    assert evaluate_dim(dim, {"n": 5}) == size


def test_dimensions_without_a_size():
    with pytest.raises(KeyError):
        evaluate_dim("m", {"n": 5})
    with pytest.raises(ValueError, match=r"'n\*n' is neither"):
        evaluate_dim("n*n", {"n": 5})


def test_shapes_at_sizes():
    spec = TensorSpec("x", "float32", ("batch", 4, "2*length+1", "batch"))
    assert spec.concrete({"batch": 2, "length": 8}) == (2, 4, 17, 2)
    assert spec.dims == ("batch", "length")


def test_signatures_find_tensors_by_name():
    one, two = TensorSpec.parse("a", "int32[batch, n]"), TensorSpec.parse("b", "float32[m, batch]")
    signature = Signature((one, two)).with_outputs([TensorSpec("z", "int8", ()), TensorSpec("y", "int8", ())])
    assert signature.input("b") is two
    assert signature.output("z").dtype == "int8"
    assert [spec.name for spec in signature.outputs] == ["y", "z"]
    assert signature.dims == ("batch", "n", "m")
    with pytest.raises(KeyError):
        signature.input("z")
