import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from servax.core.safetensors_header import Entry, UnknownDtype, parse_header


def header(**tensors):
    return json.dumps(tensors).encode()


def test_the_header_of_the_formats_own_library():
    data = save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int8)}, {"note": "ä"})
    length = int.from_bytes(data[:8], "little")
    entries, metadata = parse_header(data[8 : 8 + length])
    assert entries == {
        "a": Entry(np.dtype("float32"), (2, 3), 0, 24),
        "b": Entry(np.dtype("int8"), (4,), 24, 28),
    }
    assert metadata == {"note": "ä"}


def test_a_dtype_that_numpy_lacks():
    entries, _ = parse_header(header(x={"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}))
    assert entries["x"].dtype == ml_dtypes.bfloat16


def test_an_unknown_dtype_names_the_tensor():
    with pytest.raises(UnknownDtype, match="tensor 'x': dtype 'Q7' is unknown") as caught:
        parse_header(header(x={"dtype": "Q7", "shape": [0], "data_offsets": [0, 0]}))
    assert (caught.value.tensor, caught.value.dtype) == ("x", "Q7")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"not json", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (header(x={"dtype": "F32"}), "cannot be read"),
        (header(x={"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}), r"x is float32\[4\] in 8 bytes"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}), "x is float32"),
        (header(__metadata__={"a": 1}), "cannot be read"),
    ],
)
def test_what_is_no_header(text, message):
    with pytest.raises(ValueError, match=message):
        parse_header(text)
