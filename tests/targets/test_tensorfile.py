import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from servax.targets.tensorfile import tensors_from_bytes, tensors_to_bytes

DTYPES = ["bool", "int8", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float32", "float64", "complex64"]
EXTENDED = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "complex128"]


@pytest.mark.parametrize("name", DTYPES + EXTENDED)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_every_dtype_comes_back_with_its_bits(name, shape):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.random.RandomState(0).randint(0, 2, size=shape).astype(dtype)
    tensors, _ = tensors_from_bytes(tensors_to_bytes({"a/b.c": array}))
    assert tensors["a/b.c"].dtype == dtype
    assert tensors["a/b.c"].shape == shape
    assert tensors["a/b.c"].tobytes() == array.tobytes()


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    path = tmp_path / "x.safetensors"
    path.write_bytes(tensors_to_bytes({"x": array, "y": np.float32(4).reshape(())}, {"note": "ä"}))
    read = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(read["x"], array)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["note"] == "ä"


def test_metadata_comes_back():
    _, metadata = tensors_from_bytes(tensors_to_bytes({}, {"golden": "{}"}))
    assert metadata == {"golden": "{}"}


def test_a_bfloat16_file_of_another_writer_is_read():
    data = np.array([1.0, -2.5], ml_dtypes.bfloat16).tobytes()
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    tensors, _ = tensors_from_bytes(len(header).to_bytes(8, "little") + header + data)
    np.testing.assert_array_equal(tensors["x"].astype(np.float32), [1.0, -2.5])


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_file_that_is_cut_short_is_refused(cut):
    data = tensors_to_bytes({"x": np.arange(3)})
    with pytest.raises(ValueError, match=r"cut short|safetensors|truncated|malformed"):
        tensors_from_bytes(data[:cut])


def test_an_unknown_dtype_is_refused():
    header = json.dumps({"x": {"dtype": "Q7", "shape": [0], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(ValueError, match="dtype 'Q7' is unknown"):
        tensors_from_bytes(len(header).to_bytes(8, "little") + header)
